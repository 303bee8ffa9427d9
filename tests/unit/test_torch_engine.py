"""The built-in engine: sampling, batching, versions of weights, pausing, memory."""

import collections
import math
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from toy_models import VOCABULARY, Gated, Toy, samples_in, toy, until

from roost import EngineOutput, RolloutError, TorchEngine
from roost.engines import sample_seed
from roost.engines.sampling import uniform


@pytest.fixture
def make():
    engines = []

    def make(factory=toy, **options):
        engines.append(TorchEngine(factory, **{"context": 64, "length_multiple": 16, "batch_rows": 4, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


@pytest.fixture
def gated(make):
    module = Gated()
    engine = make(lambda: module)
    engine.describe_weights()
    yield engine, module
    module.is_free.set()


def weights_of(module, **changed):
    return {
        **{name: tensor.clone() for name, tensor in module.state_dict().items() if name != "head.weight"},
        **changed,
    }


def codes(error):
    return set(error.value.codes)


# Sampling ------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_samples_and_another_gives_others(make):
    engine, other = make(), make(batch_rows=3)
    params = {"max_new_tokens": 20, "n": 3, "seed": 7}
    first = engine.generate([[1, 2, 3]], params)
    assert first == other.generate([[1, 2, 3]], params)
    assert len({tuple(output.output_ids) for output in first}) == 3
    assert first != engine.generate([[1, 2, 3]], {**params, "seed": 8})
    assert first == engine.generate([[1, 2, 3]], {"max_new_tokens": 20, "n": 3, "sampling_seed": 7})


def test_without_a_seed_samples_are_random(make):
    engine = make()
    params = {"max_new_tokens": 30}
    assert engine.generate([[1]], params) != engine.generate([[1]], params)


@pytest.mark.parametrize("batch_rows", [1, 4])
def test_neighbours_change_no_bit(make, batch_rows):
    engine = make(batch_rows=batch_rows)
    chooser = random.Random(3)  # noqa: S311
    requests = [
        ([chooser.randrange(VOCABULARY) for _ in range(chooser.choice([1, 5, 15, 16, 17, 40]))], {"seed": seed, "n": 2})
        for seed in range(12)
    ]
    params = {"max_new_tokens": 10, "temperature": 0.8}
    alone = [engine.generate([prompt], {**params, **more}) for prompt, more in requests]
    order = list(range(len(requests)))
    chooser.shuffle(order)
    futures = {i: engine.submit([requests[i][0]], {**params, **requests[i][1]}) for i in order}
    assert [futures[i].result() for i in range(len(requests))] == alone


def test_shapes_as_needed_give_the_same_tokens(make):
    params = {"max_new_tokens": 8, "seed": 1, "n": 5}
    exact, loose = make().generate([[4, 5]], params), make(is_invariant=False).generate([[4, 5]], params)
    assert [output.output_ids for output in exact] == [output.output_ids for output in loose]


def test_a_batch_is_prompt_after_prompt(make):
    engine = make()
    outputs = engine.generate([[1], [2, 3]], {"max_new_tokens": 2, "n": 2, "seed": 5})
    assert [output.prompt_tokens for output in outputs] == [1, 1, 2, 2]
    alone = engine.generate([[2, 3]], {"max_new_tokens": 2, "seed": sample_seed(5, 3)})
    assert alone == outputs[3:]


def test_logprobs_are_of_the_distribution_that_was_sampled(make):
    engine, module = make(), toy()
    for temperature in (0.5, 1.0, 2.0):
        (output,) = engine.generate([[3, 1]], {"max_new_tokens": 12, "temperature": temperature, "seed": 2})
        with torch.no_grad():
            logits = module(torch.tensor([[3, 1, *output.output_ids]]))[0, 1:-1].double()
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(output.logprobs, dtype=torch.float64), expected, atol=1e-4)


def test_temperature_zero_takes_the_likeliest(make):
    (output,) = make().generate([[3]], {"max_new_tokens": 10, "temperature": 0})
    with torch.no_grad():
        logits = toy()(torch.tensor([[3, *output.output_ids]]))[0, :-1]
    assert output.output_ids == logits.argmax(-1).tolist()
    assert all(logprob <= 0 for logprob in output.logprobs)


def test_samples_follow_the_distribution(make):
    engine = make(batch_rows=64)
    count = 2000
    found = collections.Counter(
        output.output_ids[0] for output in engine.generate([[9]], {"max_new_tokens": 1, "n": count, "seed": 11})
    )
    with torch.no_grad():
        expected = torch.softmax(toy()(torch.tensor([[9]]))[0, -1].double(), -1).tolist()
    distance = sum((found[token] - count * p) ** 2 / (count * p) for token, p in enumerate(expected))
    freedom = VOCABULARY - 1
    assert distance < freedom + 5 * math.sqrt(2 * freedom)


def test_numbers_are_uniform_and_keyed():
    numbers = [uniform(seed, index, position) for seed in range(10) for index in range(10) for position in range(20)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.03
    assert uniform(5, 3, 8) == uniform(sample_seed(5, 3), 0, 8)
    assert sample_seed(5, 0) == 5


# Ends ----------------------------------------------------------------------------------------


def test_stop_tokens_and_length(make):
    engine = make()
    (whole,) = engine.generate([[1]], {"max_new_tokens": 20, "seed": 1})
    assert (whole.finish_reason, len(whole.output_ids), len(whole.versions)) == ("length", 20, 20)
    stop = whole.output_ids[4]
    (cut,) = engine.generate([[1]], {"max_new_tokens": 20, "seed": 1, "stop_token_ids": [stop]})
    end = whole.output_ids.index(stop) + 1
    assert (cut.finish_reason, cut.output_ids) == ("stop", whole.output_ids[:end])


def test_the_context_bounds_what_is_generated(make):
    (output,) = make(context=10).generate([[1, 2, 3]], {"max_new_tokens": 100})
    assert (output.finish_reason, len(output.output_ids)) == ("length", 7)


def test_everything_wrong_with_a_request_at_once(make):
    params = {
        "max_new_tokens": 0, "temperature": -1, "n": "two", "seed": -1, "stop_token_ids": "x", "top_p": 0.5, "tempature": 1,
    }  # fmt: skip
    with pytest.raises(RolloutError) as error:
        make(context=8).generate([[1] * 8, [], [1, VOCABULARY, -1, "a"]], params)
    text = str(error.value)
    for part in (
        "prompt 0 has 8 tokens", "context is 8", "prompt 1 is empty", "prompt 2 has 3 token ids out of range", "0 to 31",
        "max_new_tokens", "temperature must be", "n must be", "seed must be", "stop_token_ids", "top_p=0.5", "tempature",
    ):  # fmt: skip
        assert part in text
    assert codes(error) == {"E101"}
    assert len(error.value.findings) == 10


def test_neutral_parameters_of_sglang_are_taken(make):
    params = {"max_new_tokens": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop": None, "skip_special_tokens": True}
    assert len(make().generate([[1]], params)) == 1


# Weights -------------------------------------------------------------------------------------


def test_tied_tensors_are_described_once(make):
    described = make().describe_weights()
    assert described["embed.weight"] == ((VOCABULARY, 16), "float32")
    assert described["scale"] == ((1,), "float32")
    assert "head.weight" not in described


def test_new_weights_and_their_version(make):
    engine, trained = make(), make(lambda: toy(1))
    params = {"max_new_tokens": 10, "seed": 3}
    assert set(engine.generate([[1]], params)[0].versions) == {0}
    engine.load_weights(weights_of(toy(1)), 3)
    after, expected = engine.generate([[1]], params)[0], trained.generate([[1]], params)[0]
    assert after.output_ids == expected.output_ids
    assert (engine.version, set(after.versions)) == (3, {3})
    engine.load_weights({**toy(2).state_dict()}, 4)  # with both names of the tied tensor
    assert engine.version == 4


def test_what_is_wrong_with_weights_is_said_at_once_and_nothing_is_written(make):
    engine = make()
    before = engine.generate([[1]], {"max_new_tokens": 10, "seed": 3})
    wrong = weights_of(toy(1), extra=torch.zeros(1), scale=torch.zeros(2))
    wrong["place.weight"] = wrong["place.weight"].double()
    wrong["head.weight"] = torch.zeros(VOCABULARY, 16)
    del wrong["qkv.bias"]
    with pytest.raises(RolloutError) as error:
        engine.load_weights(wrong, 1)
    text = str(error.value)
    for part in (
        "no tensor 'extra'",
        "scale has shape [2]",
        "place.weight is float64",
        "qkv.bias is missing",
        "one tensor",
    ):
        assert part in text
    assert codes(error) == {"E102"}
    assert engine.generate([[1]], {"max_new_tokens": 10, "seed": 3}) == before
    assert engine.version == 0


@pytest.mark.parametrize("version", [1, 2])
def test_versions_only_grow(make, version):
    engine = make(version=2)
    before = engine.generate([[1]], {"max_new_tokens": 5, "seed": 3})
    with pytest.raises(RolloutError, match="versions only grow") as error:
        engine.load_weights(weights_of(toy(1)), version)
    assert codes(error) == {"E103"}
    assert engine.generate([[1]], {"max_new_tokens": 5, "seed": 3}) == before


def test_weights_change_between_two_tokens(gated):
    engine, module = gated
    future = engine.submit([[1]], {"max_new_tokens": 6, "seed": 1})
    module.step(2)
    until(lambda: len(module_tokens(engine)) == 2)
    loading = threading.Thread(target=engine.load_weights, args=(weights_of(module), 1))
    loading.start()
    until(lambda: engine._batcher._commands)
    module.step(1)  # the step that had begun
    loading.join()
    module.is_free.set()
    assert future.result()[0].versions == [0, 0, 0, 1, 1, 1]


def module_tokens(engine):
    return [token for row in engine._batcher._running for token in row.output.output_ids]


# Pausing -------------------------------------------------------------------------------------


def test_pause_waits_for_what_runs_and_holds_what_is_new(gated):
    engine, module = gated
    running = engine.submit([[1]], {"max_new_tokens": 3, "n": 6})  # more than fit at once
    module.step(1)
    pausing = threading.Thread(target=engine.pause)
    pausing.start()
    until(lambda: engine.info()["is_paused"])
    new = engine.submit([[2]], {"max_new_tokens": 3})
    assert pausing.is_alive()
    module.is_free.set()
    pausing.join()
    assert [output.finish_reason for output in running.result()] == ["length"] * 6
    assert not new.done()
    engine.resume()
    assert new.result()[0].finish_reason == "length"


def test_abort_returns_what_there_is_and_it_goes_on_as_if_nothing_had_been(gated):
    engine, module = gated
    params = {"max_new_tokens": 8, "seed": 4, "n": 2}
    running = engine.submit([[1, 2]], params)
    module.step(3)
    until(lambda: len(module_tokens(engine)) == 6)
    queued = engine.submit([[3]] * 8, {"max_new_tokens": 2})
    engine.pause("abort")
    parts = running.result()
    assert [(part.finish_reason, len(part.output_ids)) for part in parts] == [("abort", 3)] * 2
    assert {output.finish_reason for output in queued.result()} == {"abort"}
    new = engine.submit([[2]], {"max_new_tokens": 1})
    module.is_free.set()
    assert not new.done()
    engine.resume()
    new.result()
    whole = engine.generate([[1, 2]], params)
    for index, part in enumerate(parts):
        more = {"max_new_tokens": 5, "seed": sample_seed(4, index)}
        (rest,) = engine.generate([[1, 2, *part.output_ids]], more)
        assert part.output_ids + rest.output_ids == whole[index].output_ids
        assert part.logprobs + rest.logprobs == whole[index].logprobs


def test_abort_by_name(gated):
    engine, module = gated
    first = engine.submit([[1]], {"max_new_tokens": 2}, "a")
    second = engine.submit([[1]], {"max_new_tokens": 2}, "b")
    until(lambda: samples_in(engine) == 2)
    engine.abort("a")
    assert first.result()[0].finish_reason == "abort"
    assert not second.done()
    module.is_free.set()
    assert second.result()[0].finish_reason == "length"


def test_a_mode_that_there_is_not(make):
    with pytest.raises(RolloutError, match="known modes: wait, abort"):
        make().pause("now")


def test_a_cancelled_request_leaves_the_batch(gated):
    engine, module = gated
    future = engine.submit([[1]], {"max_new_tokens": 60, "n": 8})
    until(lambda: engine.info()["num_running_samples"] == 4)
    assert future.cancel()
    assert samples_in(engine) == 0
    module.is_free.set()
    assert len(engine.generate([[1]], {"max_new_tokens": 2})) == 1


# Memory, failures, ends ----------------------------------------------------------------------


def test_offload_holds_requests_and_takes_weights(gated):
    engine, module = gated
    params = {"max_new_tokens": 6, "seed": 1}
    running = engine.submit([[1]], params)
    module.step(2)
    module.permits.release()
    engine.offload()
    engine.pause()  # nothing runs while it is away
    engine.resume()
    engine.load_weights(weights_of(module), 1)
    made = len(module_tokens(engine))
    module.is_free.set()
    new = engine.submit([[2]], params)
    assert engine.info()["is_offloaded"]
    assert not running.done()
    assert not new.done()
    engine.onload()
    assert running.result()[0].versions == [0] * made + [1] * (6 - made)
    assert new.result()[0].versions == [1] * 6


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(gated):
    engine, module = gated
    module.is_free.set()
    module.is_broken = True
    with pytest.raises(RolloutError, match="broken on purpose") as error:
        engine.generate([[1]], {"max_new_tokens": 2, "n": 9})
    assert codes(error) == {"E104"}
    assert "broken on purpose" in engine.logs()
    module.is_broken = False
    assert engine.health() == ""
    assert len(engine.generate([[1]], {"max_new_tokens": 2})) == 1


def test_logits_that_are_not_finite_are_an_error(make):
    engine = make()
    engine.load_weights(weights_of(toy(), scale=torch.tensor([math.nan])), 1)
    with pytest.raises(RolloutError, match="not finite"):
        engine.generate([[1]], {"max_new_tokens": 2})


def test_stopping_fails_what_is_left(gated):
    engine, module = gated
    running, waiting = engine.submit([[1]], {"n": 4}), engine.submit([[1]], {})
    until(lambda: engine.info()["num_running_samples"] == 4)
    module.is_free.set()
    engine.stop()
    engine.stop()
    for future in (running, waiting):
        with pytest.raises(RolloutError, match="stopped") as error:
            future.result()
        assert codes(error) == {"E105"}
    with pytest.raises(RolloutError, match="stopped"):
        engine.generate([[1]], {})
    with pytest.raises(RolloutError, match="stopped"):
        engine.load_weights(weights_of(module), 1)
    assert engine.health() == "it was stopped"
    assert not [thread for thread in threading.enumerate() if thread.name == "torch-engine"]


class WithLogits(Toy):
    config = SimpleNamespace(max_position_embeddings=12, use_cache=True)

    def forward(self, ids):
        return SimpleNamespace(logits=super().forward(ids))


def test_models_that_return_an_object_with_logits(make):
    engine = make(WithLogits, context=None)
    (output,) = engine.generate([[1]], {"max_new_tokens": 100})
    assert isinstance(output, EngineOutput)
    assert len(output.output_ids) == 11
    assert WithLogits.config.use_cache is False


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: 3, "returned int, not a torch module"),
        (lambda: nn.Linear(3, 3), "fails on two tokens"),
        (lambda: nn.Flatten(), r"returned \[1, 2\] for \[1, 2\]"),
    ],
)
def test_factories_that_make_no_language_model(make, factory, message):
    with pytest.raises(RolloutError, match=message) as error:
        make(factory).describe_weights()
    assert codes(error) == {"E109"}


def test_sizes_that_cannot_be():
    with pytest.raises(RolloutError, match="batch_rows cannot be 0"):
        TorchEngine(toy, batch_rows=0)
