"""Requests for what is missing of groups of samples, and the seeds in them."""

import subprocess
import sys
from pathlib import Path

import pytest

from roost.data.samples import Sample, SampleGroup
from roost.engines import EngineClient, sample_seed
from roost.engines.requests import make_requests, params_of_samples
from roost.engines.sampling import MAX_SEED
from roost.errors import RolloutError

PARAMS = {"max_new_tokens": 4, "temperature": 1.0, "n": 7}


def group(name, data, count=3, **fields):
    return SampleGroup(name, data, [Sample([1, 2], index=index, **fields) for index in range(count)])


def seeds(requests):
    return [request["sampling_params"]["sampling_seed"] for request in requests]


def test_each_sample_is_a_request_with_a_seed_of_its_own():
    groups = [group("a", {"seed": 5}), group("b", {"seed": MAX_SEED})]
    requests, owners = make_requests(groups, PARAMS)
    assert owners == [[sample] for one in groups for sample in one.samples]
    assert all(request["input_ids"] == [1, 2] for request in requests)
    assert {request["sampling_params"]["n"] for request in requests} == {1}
    assert seeds(requests) == [sample_seed(seed, index) for seed in (5, MAX_SEED) for index in range(3)]
    assert len(set(seeds(requests))) == 6
    assert seeds(make_requests(groups, PARAMS)[0]) == seeds(requests), "the same again"


def test_groups_without_a_seed_get_different_ones():
    requests, _ = make_requests([group("a", {}), group("b", {})], PARAMS)
    again, _ = make_requests([group("a", {}), group("b", {})], PARAMS)
    found = seeds(requests) + seeds(again)
    assert len(set(found)) == len(found) == 12
    assert all(0 <= seed <= MAX_SEED for seed in found)


def test_samples_that_were_made_without_an_index_differ():
    requests, _ = make_requests([SampleGroup("a", {"seed": 1}, [Sample([1]), Sample([1])])], PARAMS)
    assert seeds(requests) == [sample_seed(1, 0), sample_seed(1, 1)]


def test_a_seed_of_all_requests_is_for_groups_without_one():
    requests, _ = make_requests([group("a", {}, 1), group("b", {"seed": 3}, 1)], {**PARAMS, "seed": 9})
    assert seeds(requests) == [9, 3]
    assert all("seed" not in request["sampling_params"] for request in requests)


def test_what_was_begun_goes_on_with_the_same_seed():
    begun = group("a", {"seed": 5})
    begun.samples[0].output_ids, begun.samples[0].finish_reason = [7, 7], "stop"
    begun.samples[1].output_ids, begun.samples[1].finish_reason = [8], "abort"
    begun.samples[2].output_ids = [9, 9, 9, 9]
    requests, owners = make_requests([begun], PARAMS)
    assert owners == [[begun.samples[1]]]
    assert requests[0]["input_ids"] == [1, 2, 8]
    assert requests[0]["sampling_params"]["max_new_tokens"] == 3
    assert seeds(requests) == [sample_seed(5, 1)]
    assert begun.samples[2].finish_reason == "length"


@pytest.mark.parametrize("seed", [-1, 2**63, "5", 1.0, True])
def test_seeds_that_engines_cannot_hold_are_refused(seed):
    with pytest.raises(RolloutError, match=r"group a: seed must be a whole number from 0 to 2\*\*63 - 1") as error:
        make_requests([group("a", {"seed": seed}), group("b", {})], PARAMS)
    assert error.value.codes == ("E101",)
    with pytest.raises(RolloutError, match="sampling_seed must be"):
        make_requests([group("b", {})], {**PARAMS, "sampling_seed": seed})
    client = EngineClient("http://127.0.0.1:9")
    with pytest.raises(RolloutError, match="request 1: seed must be") as error:
        client.generate_all([{"input_ids": [1]}, {"input_ids": [1], "sampling_params": {"seed": seed}}])
    client.close()
    assert error.value.codes == ("E101",)


def test_the_two_names_of_a_seed_must_agree():
    assert len(params_of_samples({"n": 2, "seed": 1, "sampling_seed": 1})) == 2
    with pytest.raises(RolloutError, match="seed is 1, and sampling_seed is 2"):
        params_of_samples({"seed": 1, "sampling_seed": 2})


def test_seeds_of_samples_stay_in_range():
    found = [sample_seed(seed, index) for seed in (0, 1, MAX_SEED) for index in range(1000)]
    assert all(0 <= seed <= MAX_SEED for seed in found)
    assert len(set(found)) == len(found)


def test_a_server_may_open_more_files_than_the_soft_limit_of_its_parent(tmp_path: Path):
    said = tmp_path / "limit"
    code = f"import resource; open({str(said)!r}, 'w').write(str(resource.getrlimit(resource.RLIMIT_NOFILE)))"
    outer = f"""
import resource, time
from roost.engines.server_process import ServerProcess
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
child = ServerProcess([{sys.executable!r}, "-c", {code!r}])
child.start()
while child.is_alive():
    time.sleep(0.05)
child.stop()
print(hard)
"""
    done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, check=True)
    hard = int(done.stdout)
    assert said.read_text() == str((min(hard, 65536) if hard >= 0 else 65536, hard))
