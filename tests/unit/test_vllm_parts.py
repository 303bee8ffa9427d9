"""What of the vLLM engine needs no vLLM: its command line, its checks, its requests and messages."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

import roost
from roost.engines.engine import EnginePlace
from roost.engines.vllm import inside
from roost.engines.vllm.command import check_options, check_vllm, command_of, environment_of, error_in_log
from roost.engines.vllm.generating import bodies_of
from roost.engines.vllm.messages import stream_from_json, stream_to_json
from roost.plan import WeightTransport
from roost.weights.streams import Piece, WeightStream

PLACE = EnginePlace(
    num_members=2, host="10.0.0.5", dist_init_addr="10.0.0.5:25000", ports=range(25000, 25030),
    accelerators=(4, 5), device="cuda:0", gpu_share=0.5,
)  # fmt: skip


def flags(words):
    """Options with what follows them."""
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def test_the_command_line_on_gpus_over_two_nodes():
    first = flags(command_of(PLACE, "/models/m", "/opt/python", "/run/s", ["--max-model-len", "4096"]))
    assert first["--tensor-parallel-size"] == "4", "two GPUs on each of two nodes"
    assert first["--distributed-executor-backend"] == "mp"
    assert first["--gpu-memory-utilization"] == "0.450"
    assert "--enable-sleep-mode" in first
    assert first["--uds"] == "/run/s"
    assert json.loads(first["--weight-transfer-config"]) == {"backend": "roost"}
    assert first["--max-model-len"] == "4096"
    second = flags(command_of(replace(PLACE, member=1), "/models/m", "/opt/python", "/run/s", []))
    assert "--headless" in second
    assert "--uds" not in second
    for words, rank in ((first, "0"), (second, "1")):
        assert (words["--nnodes"], words["--node-rank"]) == ("2", rank)
        assert (words["--master-addr"], words["--master-port"]) == ("10.0.0.5", "25000")


def test_the_command_line_on_a_cpu():
    place = EnginePlace()
    words = flags(command_of(place, "/models/m", sys.executable, "/run/s", []))
    assert words["--tensor-parallel-size"] == "1"
    assert not {"--nnodes", "--enable-sleep-mode", "--gpu-memory-utilization", "--headless"} & set(words)
    assert words["--kv-cache-memory-bytes"] == str(1 << 30)
    env = environment_of(place, "/run/here", {"VLLM_NO_USAGE_STATS": "0"})
    assert env["VLLM_RPC_BASE_PATH"] == "/run/here"
    assert (env["VLLM_SERVER_DEV_MODE"], env["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")
    assert env["VLLM_NO_USAGE_STATS"] == "0", "the user's win"


def test_options_that_are_the_plans():
    found = check_options(["--port=3", "--max-model-len", "9", "--tensor_parallel_size", "2"])
    assert [finding.message.split()[1] for finding in found] == ["--port", "--tensor-parallel-size"]
    with pytest.raises(roost.RolloutError) as error:
        roost.VllmEngine("/no/such/folder", options=["--port", "3"]).start(EnginePlace())
    assert error.value.codes == ("E123", "E123")
    assert "nothing is downloaded" in str(error.value)


# Which vLLM there is ------------------------------------------------------------------------------


def write_vllm(folder, version, files):
    """A package that looks like a vLLM, as far as is looked at."""
    for path, text in {"__init__.py": "raise ImportError('not to be imported')", **files}.items():
        (folder / "vllm" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "vllm" / path).write_text(text)
    (folder / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return {"PYTHONPATH": str(folder)}


def whole():
    files = {}
    for path, word in inside.NEEDED.values():
        files[path] = files.get(path, "") + f"{word}\n"
    return files


def test_a_vllm_that_lacks_something_is_refused_at_the_start(tmp_path):
    files = whole()
    del files["entrypoints/serve/dev/sleep/api_router.py"]
    files[inside.NEEDED["the version of each token"][0]] = "nothing of that"
    with pytest.raises(roost.RolloutError) as error:
        check_vllm(sys.executable, write_vllm(tmp_path, "0.11.2", files))
    (finding,) = error.value.findings
    assert finding.code == "E122"
    assert "vLLM 0.11.2 of" in finding.message
    assert finding.context == ("it lacks: sleeping over HTTP", "it lacks: the version of each token")
    assert "vLLM 0.32 has all that is needed" in str(error.value)
    assert "pip install 'vllm>=0.32'" in str(error.value)


def test_a_vllm_that_has_all_of_it(tmp_path):
    env = write_vllm(tmp_path, "0.40.1", whole())
    metadata = tmp_path / "roost_there-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: roost-there\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nroost = roost.engines.vllm.plugin:register\n")
    assert check_vllm(sys.executable, env) == "0.40.1"


def test_no_vllm_at_all(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm.py").write_text("a module, and no package")
    with pytest.raises(roost.RolloutError, match="has no vLLM"):
        check_vllm(sys.executable, {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(roost.RolloutError, match="cannot be asked"):
        check_vllm(str(tmp_path / "no-python"), {})
    with pytest.raises(roost.RolloutError, match="cannot be asked"):
        check_vllm("/bin/false", {})


LOG = """\
This can cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n
(Worker pid=7) ERROR 11-16 06:43:59 [core.py:12] ValueError: No available memory for the cache blocks. Decrease it.
(EngineCore pid=6) ERROR 11-16 06:43:59 [core.py:12] Exception: WorkerProc initialization failed due to an exception.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_why_vllm_ended():
    assert error_in_log(LOG) == "ValueError: No available memory for the cache blocks. Decrease it."
    assert error_in_log("torch.OutOfMemoryError: CUDA out of memory.") == "OutOfMemoryError: CUDA out of memory."
    assert error_in_log("INFO all is well") == ""


# What it is asked ---------------------------------------------------------------------------------


def test_each_sample_is_a_request_with_a_seed_of_its_own():
    params = {"max_new_tokens": 5, "n": 2, "seed": 7, "top_p": 0.5, "min_new_tokens": 2, "stop_token_ids": [3]}
    bodies = bodies_of([[1, 2], [3]], params, 10, 64, [9])
    assert [body["token_ids"] for body in bodies] == [[1, 2], [1, 2], [3], [3]]
    asked = [body["sampling_params"] for body in bodies]
    assert len({one["seed"] for one in asked}) == 4
    assert all(0 <= one["seed"] < 1 << 53 for one in asked)
    assert (asked[0]["top_p"], asked[0]["min_tokens"], asked[0]["max_tokens"]) == (0.5, 2, 5)
    assert asked[0]["stop_token_ids"] == [3, 9], "the end of a text too, which vLLM does not know without a tokenizer"
    assert bodies_of([[1, 2], [3]], params, 10, 64, [9]) == bodies
    (free,) = bodies_of([[1]], {"ignore_eos": True}, 10, 64, [9])
    assert free["sampling_params"]["stop_token_ids"] == []


def test_all_that_is_wrong_with_a_request():
    with pytest.raises(roost.RolloutError) as error:
        bodies_of([[1, 99]], {"max_new_tokens": 0, "regex": "a*", "top_p": 0.5}, 10, 64, [])
    assert error.value.codes == ("E101",) * 3


@pytest.mark.parametrize("address", ["/proc/1/fd/7", b"\x80pickled"])
def test_channels_cross_as_json(address):
    pieces = (Piece("w", "float32", (4, 2), ((0, 2), (0, 2)), ((0, 2), (0, 2)), ((2, 4), (0, 2)), (4, 2), 64, 16),)
    stream = WeightStream("c", WeightTransport.SHARED_MEMORY, 0, (0,), pieces, 80)
    said = json.loads(json.dumps(stream_to_json(stream, address)))
    assert stream_from_json(said) == (stream, address)
