"""The learning half of ``examples/grpo``: model, task and learner, without Ray."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo import task, tiny
from grpo.learner import Batch, GrpoConfig, advantages, grpo_loss, learn, make_optimizer, pack
from grpo.loop import Settings
from grpo.model import TinyConfig, TinyLM, make_model

from roost import RolloutError

LENGTH = task.TOKENS


@pytest.fixture(autouse=True)
def one_thread():
    """Sums of several threads may be added up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> TinyLM:
    return TinyLM(TinyConfig(vocab=task.VOCAB), seed=3)


@dataclasses.dataclass
class Sample:
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    index: int
    reward: float | None


@dataclasses.dataclass
class Group:
    id: str
    samples: list[Sample]


def group(name: str, rewards: list[float | None], output: tuple[int, ...] = (1, task.STOP)) -> Group:
    return Group(
        name, [Sample([3, 10, 8, 11], list(output), [-1.0] * len(output), i, r) for i, r in enumerate(rewards)]
    )


def some_ids(rows: int, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, task.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


# The task ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([1, task.STOP], 1.0),
        ([2, task.STOP], 0.0),
        ([1], 0.0),
        ([task.STOP], 0.0),
        ([1, 1], 0.0),
        ([1, task.STOP, task.STOP], 0.0),
        ([], 0.0),
    ],
)
def test_only_the_right_digit_and_a_stop_are_rewarded(output, expected):
    prompt = task.Prompt(ids=(3, task.PLUS, 8, task.EQUALS), answer=1)
    assert task.text([*prompt.ids, 1, task.STOP]) == "3 + 8 = 1 ."
    assert task.reward(prompt, output) == expected


def test_prompts_are_the_same_for_the_same_step_and_do_not_repeat_within_it():
    prompts = task.prompts_for(seed=0, step=7, count=64)
    assert prompts == task.prompts_for(seed=0, step=7, count=64)
    assert prompts == task.prompts_for(seed=0, step=7, count=100)[:64]
    assert prompts != task.prompts_for(seed=0, step=8, count=64)
    assert prompts != task.prompts_for(seed=1, step=7, count=64)
    assert len(set(prompts)) == 64
    assert len(set(task.prompts_for(seed=0, step=7, count=250))) == 100
    assert all(prompt.answer == (prompt.ids[0] + prompt.ids[2]) % 10 for prompt in prompts)


def test_a_new_model_is_at_chance(model):
    prompts = task.prompts_for(seed=0, step=0, count=100)
    with torch.no_grad():
        rows = torch.tensor([[*prompt.ids, prompt.answer, task.STOP] for prompt in prompts])
        taken = model(rows[:, :-1]).log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)
        likely = taken[:, task.PROMPT_TOKENS - 1 :].sum(-1).exp().mean().item()
    assert likely == pytest.approx(task.CHANCE, rel=0.5)


# The model --------------------------------------------------------------------------------


def test_weights_come_from_the_seed_alone():
    config = TinyConfig(vocab=task.VOCAB)
    torch.manual_seed(1)
    first = TinyLM(config, seed=5).state_dict()
    torch.manual_seed(2)
    again, other = TinyLM(config, seed=5).state_dict(), TinyLM(config, seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert 200_000 < sum(weight.numel() for weight in first.values()) < 600_000


def test_heads_that_cannot_share_the_width_are_refused():
    with pytest.raises(ValueError, match="cannot be shared"):
        TinyLM(TinyConfig(vocab=4, width=10, heads=3))


@torch.no_grad()
def test_a_later_token_changes_nothing_before_it(model):
    ids = some_ids(16)
    logits = model(ids)
    for position in range(1, LENGTH):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 1) % task.VOCAB
        other = model(changed)
        assert torch.equal(other[:, :position], logits[:, :position])
        assert not torch.equal(other[:, position], logits[:, position])


@torch.no_grad()
def test_padding_on_the_right_is_harmless(model):
    ids = some_ids(16)
    padded = torch.cat([ids[:, :4], torch.zeros(16, LENGTH - 4, dtype=torch.long)], 1)
    assert torch.equal(model(padded)[:, :4], model(ids)[:, :4])  # at one shape, to the bit
    torch.testing.assert_close(model(padded)[:, :4], model(ids[:, :4]))


@torch.no_grad()
@pytest.mark.parametrize("rows", [16, 33, 64, 256])
def test_a_row_gives_the_same_bits_wherever_it_stands(model, rows):
    ids = some_ids(rows)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(ids[order]), model(ids)[order])
    others = some_ids(rows, seed=2)
    for place in (0, rows // 2, rows - 1):
        others[place] = ids[0]
        assert torch.equal(model(others)[place], model(ids)[0])


# A model of transformers ------------------------------------------------------------------


def test_a_directory_is_trained_as_it_is(tmp_path):
    count = tiny.write_llama(tmp_path, seed=1, vocabulary=40)
    model, again = make_model(str(tmp_path), seed=0), make_model(str(tmp_path), seed=9)
    assert sum(weight.numel() for weight in model.parameters()) == count
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    assert not model.training
    batch = pack([group("a", [1.0, 0.0])], 2, LENGTH)
    for _ in range(20):
        shown = learn(model, make_optimizer(model, GrpoConfig()), batch, GrpoConfig(minibatches=1))
    assert all(torch.isfinite(torch.tensor(value)) for value in shown.values())
    assert not torch.equal(model.lm_head.weight, again.lm_head.weight)


def test_a_directory_that_cannot_be_trained(tmp_path):
    with pytest.raises(RolloutError, match="is not a directory"):
        make_model(str(tmp_path / "nowhere"), seed=0)
    tiny.write_llama(tmp_path, vocabulary=12)
    with pytest.raises(ValueError, match="knows 12 tokens, and the task has 13"):
        make_model(str(tmp_path), seed=0)


def test_workers_get_a_path_that_does_not_depend_on_where_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Settings.read({"cluster": {}, "grpo": {"model": "here"}}).model == str(tmp_path / "here")
    assert Settings.read({"cluster": {}, "grpo": {}}).model == ""


# The learner ------------------------------------------------------------------------------


def test_advantages_are_relative_to_the_group():
    values = advantages([1.0, 0.0, 0.0, 0.0])
    assert sum(values) == pytest.approx(0.0, abs=1e-9)
    assert values[0] == pytest.approx(3**0.5, rel=1e-3)
    assert values[1] == values[2] == values[3] < 0


@pytest.mark.parametrize("rewards", [[0.0] * 16, [1.0] * 16, [0.1] * 3, [0.7], []])
def test_equal_rewards_teach_nothing(rewards):
    assert advantages(rewards) == [0.0] * len(rewards)


def test_a_batch_has_one_shape_and_one_order():
    groups = [group("b", [0.0, 1.0]), group("a", [1.0, 0.0, 0.0], output=(task.STOP,))]
    batch = pack(groups, rows=8, length=LENGTH)
    assert batch.ids.shape == batch.mask.shape == batch.logprobs.shape == (8, LENGTH)
    assert batch.advantages.shape == (8,)
    assert batch.mask.sum(1).tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert batch.ids[0].tolist() == [3, 10, 8, 11, task.STOP, 0]
    assert batch.ids[3].tolist() == [3, 10, 8, 11, 1, task.STOP]
    assert batch.logprobs[3].tolist() == [0, 0, 0, 0, -1, -1]
    assert batch.advantages.sign().tolist() == [1, -1, -1, -1, 1, 0, 0, 0]

    shuffled = [Group(g.id, g.samples[::-1]) for g in groups[::-1]]
    for one, other in zip(dataclasses.astuple(batch), dataclasses.astuple(pack(shuffled, 8, LENGTH)), strict=True):
        assert torch.equal(one, other)
    assert pack([], rows=8, length=LENGTH).ids.shape == (8, LENGTH)


def test_what_does_not_fit_a_batch_is_refused():
    with pytest.raises(ValueError, match="sample 2 of a does not fit"):
        pack([group("a", [0.0, 1.0, 0.0])], rows=2, length=LENGTH)
    with pytest.raises(ValueError, match="7 tokens"):
        pack([group("a", [0.0], output=(1, 2, 3))], rows=2, length=LENGTH)
    with pytest.raises(ValueError, match="sample 1 of a has no reward"):
        pack([group("a", [0.0, None])], rows=2, length=LENGTH)
    with pytest.raises(ValueError, match="8 rows cannot be split into 3"):
        pack([], rows=8, length=LENGTH).split(3)


class Table(torch.nn.Module):
    """The same logits whatever came before: a toy whose gradient can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(task.VOCAB))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*ids.shape, task.VOCAB)


def toy_batch(logprob: float) -> Batch:
    """Token 1 was right, token 2 was wrong."""
    right, wrong = Sample([0], [1], [logprob], 0, 1.0), Sample([0], [2], [logprob], 1, 0.0)
    return pack([Group("a", [right, wrong])], rows=2, length=2)


def test_the_gradient_makes_right_answers_likelier():
    table, config = Table(), GrpoConfig(entropy=0.0)
    even = torch.tensor(1 / task.VOCAB).log().item()
    loss, shown = grpo_loss(table, toy_batch(even), config)
    loss.backward()
    downhill = -table.logits.grad
    assert downhill[1] > 0 > downhill[2]
    assert downhill[1].item() == pytest.approx(0.5, rel=1e-3)  # advantage 1, ratio 1, mean over two rows
    torch.testing.assert_close(downhill[3:], torch.zeros(task.VOCAB - 3), atol=1e-6, rtol=0)
    assert shown["clipped"] == 0


def test_the_clip_ends_a_sample_s_say():
    table, config = Table(), GrpoConfig(entropy=0.0)
    unlikely_then = torch.tensor(1 / task.VOCAB).log().item() - 1.0  # the ratio is e: token 1 gained all that it may
    loss, shown = grpo_loss(table, toy_batch(unlikely_then), config)
    loss.backward()
    assert shown["clipped"] == 1.0
    assert table.logits.grad[2] > 0  # a wrong token that became likelier is still pushed down
    assert table.logits.grad[1] == table.logits.grad[0]  # the right one moves no more than one nobody drew


def test_the_entropy_bonus_evens_out():
    table = Table()
    table.logits.data[1] = 2.0
    batch = dataclasses.replace(toy_batch(-1.0), advantages=torch.zeros(2))
    grpo_loss(table, batch, GrpoConfig(entropy=0.1))[0].backward()
    assert table.logits.grad[1] > 0  # downhill, the likely token loses
    assert (table.logits.grad[2:] < 0).all()


def test_rows_without_a_sample_and_prompts_have_no_gradient(model):
    loss, _ = grpo_loss(model, pack([], rows=4, length=LENGTH), GrpoConfig())
    loss.backward()
    assert loss.item() == 0
    assert all((weight.grad == 0).all() for weight in model.parameters())


def test_the_mean_gradient_of_two_trainers_is_that_of_one(model):
    config = GrpoConfig()
    groups = [group("a", [1.0, 0.0]), group("b", [0.0, 1.0], output=(4, task.STOP))]
    grpo_loss(model, pack(groups, 4, LENGTH), config)[0].backward()
    whole = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    for part in groups:
        (grpo_loss(model, pack([part], 2, LENGTH), config)[0] / 2).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, whole[name])


def test_learning_makes_the_rewarded_answer_likelier_and_repeats_to_the_bit():
    rewarded, other = (1, task.STOP), (2, task.STOP)
    samples = [*group("", [1.0] * 2, rewarded).samples, *group("", [0.0] * 2, other).samples]
    for index, sample in enumerate(samples):
        sample.index, sample.logprobs = index, [-2.565, -2.565]
    ends, calls = [], []
    for _ in range(2):
        model, config = TinyLM(TinyConfig(vocab=task.VOCAB), seed=0), GrpoConfig()
        optimizer = make_optimizer(model, config)
        batch = pack([Group("a", samples), Group("b", samples)], rows=8, length=LENGTH)
        for _ in range(3):
            shown = learn(model, optimizer, batch, config, average=calls.append)
        ends.append(model.state_dict())
    assert len(calls) == 2 * 3 * config.epochs * config.minibatches
    assert set(shown) == {"loss", "entropy", "clipped", "gradient"}
    chances = model(batch.ids)[0, task.PROMPT_TOKENS - 1].softmax(-1)
    assert chances[1] > 1 / task.VOCAB > chances[2]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
