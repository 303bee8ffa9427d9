"""The buffer between generators and trainers: bounded, fair, and nothing is lost or doubled."""

import json
import pickle
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from roost import CallTimeoutError, DataBuffer, RolloutError, RoostError, Sample, SampleGroup
from roost.data.buffer_file import LONG, write_lines

WAIT_S = 60


def group(name, version=1, finish="stop", tokens=2):
    samples = [Sample([1, 2], [7] * tokens, [-0.5] * tokens, [version] * tokens, i, finish, 1.0) for i in range(2)]
    return SampleGroup(name, {"text": name}, samples)


def groups(names, **kwargs):
    return [group(name, **kwargs) for name in names]


def ids(taken):
    return "".join(one.id for one in taken)


def code_of(call, kind=RolloutError):
    with pytest.raises(kind) as caught:
        call()
    return caught.value.codes[0], str(caught.value)


class Background:
    """A call in a thread; ``result()`` waits for it and raises what it raised."""

    def __init__(self, call):
        self.value = self.error = None
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call):
        try:
            self.value = call()
        except Exception as error:
            self.error = error

    def result(self):
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "it still waits"
        if self.error:
            raise self.error
        return self.value

    @property
    def is_waiting(self):
        return self.thread.is_alive()


def wait_until(buffer, **counts):
    deadline = time.monotonic() + WAIT_S
    while any(buffer.stats()[name] != count for name, count in counts.items()):
        assert time.monotonic() < deadline, buffer.stats()
        time.sleep(0.001)


# Samples ----------------------------------------------------------------------------------------


def test_samples_know_whether_they_are_finished_and_how_old():
    one = group("a")
    assert one.is_finished
    assert one.samples[0].is_finished
    assert one.oldest_version == 1
    one.samples[1].versions = [3, 2, 5]
    one.samples[0].versions = []
    assert (one.oldest_version, one.samples[0].oldest_version, one.samples[1].oldest_version) == (2, None, 2)
    for reason in ("abort", ""):
        assert not group("a", finish=reason).is_finished
    assert SampleGroup("a").oldest_version is None


def test_samples_go_through_json_and_pickle():
    one = group("a")
    one.samples[0].extra = {"tools": [{"name": "x"}]}
    assert SampleGroup.from_json(json.loads(json.dumps(one.to_json()))) == one
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(one, protocol)) == one  # noqa: S301
        assert pickle.loads(pickle.dumps(one.samples[0], protocol)) == one.samples[0]  # noqa: S301


@dataclass
class OwnSample(Sample):
    image: str = ""


def test_samples_of_a_subclass_stay_what_they_are():
    one = SampleGroup("a", {}, [OwnSample([1], image="cat"), Sample([1])])
    again = pickle.loads(pickle.dumps(one))  # noqa: S301
    assert again == one
    assert type(again.samples[0]) is OwnSample


@pytest.mark.parametrize("numbers", [[2**40] * LONG, [*range(LONG - 1), 2**40], [*range(LONG)], [-200] * LONG, [7]])
def test_numbers_of_every_kind_are_saved_as_they_are(tmp_path, numbers):
    buffer, again = DataBuffer(1), DataBuffer(1)
    logprobs, versions = [float("-inf")] * len(numbers), [abs(number) for number in numbers]
    one = SampleGroup("a", {}, [Sample(numbers, numbers, logprobs, versions, finish_reason="stop")])
    buffer.put([one])
    buffer.save(tmp_path / "saved")
    again.load(tmp_path / "saved")
    assert again.take(1, float("inf")) == [one]


# Put, take, confirm, give back --------------------------------------------------------------------


def test_groups_come_in_the_order_in_which_they_were_put():
    buffer = DataBuffer(8)
    assert buffer.put(groups("ab")) == 2
    assert buffer.put(groups("cd")) == 2
    taken = buffer.take(3)
    assert taken == groups("abc")
    assert buffer.confirm("abc") == 0
    assert buffer.confirm(["a", "b", "c"]) == 3
    assert ids(buffer.take(1)) == "d"


def test_what_is_here_or_was_used_is_ignored():
    buffer = DataBuffer(8)
    assert buffer.put(groups("abc")) == 3
    assert buffer.put(groups("abcd")) == 1
    buffer.take(2)
    assert buffer.put(groups("ab")) == 0
    buffer.confirm(["a", "b"])
    assert buffer.put(groups("ab")) == 0
    assert buffer.confirm(["a", "b"]) == 0
    stats = buffer.stats()
    assert (stats["waiting"], stats["in_flight"], stats["total_put"], stats["total_repeated"]) == (2, 0, 4, 7)


def test_the_latest_used_ids_are_remembered():
    buffer = DataBuffer(8, remembered_ids=2)
    buffer.put(groups("abc"))
    buffer.take(3)
    buffer.confirm(["a", "b", "c"])
    assert buffer.put(groups("abc")) == 1


def test_giving_back_restores_the_order_whoever_is_first():
    buffer = DataBuffer(8)
    buffer.put(groups("abcdefg"))
    first, second = buffer.take(2), buffer.take(3)
    assert buffer.give_back([one.id for one in reversed(first)]) == 2
    assert buffer.give_back(one.id for one in second) == 3
    assert buffer.give_back(["a"]) == 0
    assert ids(buffer.take(7)) == "abcdefg"
    assert buffer.give_back() == 7
    assert ids(buffer.take(7)) == "abcdefg"


def test_what_is_not_here_cannot_be_given_back():
    buffer = DataBuffer(8)
    buffer.put(groups("abc"))
    buffer.take(2)
    buffer.confirm(["a"])
    code, text = code_of(lambda: buffer.give_back(["a", "b", "x"]))
    assert code == "B105"
    assert "confirmed before: a" in text
    assert "unknown: x" in text
    assert buffer.stats()["in_flight"] == 1
    assert code_of(lambda: buffer.give_back([1]))[0] == "B105"


def test_used_is_used_wherever_the_group_is():
    buffer = DataBuffer(8)
    buffer.put(groups("ab"))
    buffer.take(2)
    buffer.give_back()
    assert buffer.confirm(["a", "never seen"]) == 1
    assert ids(buffer.take(1)) == "b"
    assert buffer.put(groups(["never seen"])) == 0


def test_old_groups_are_set_aside_and_can_be_had():
    buffer = DataBuffer(4)
    buffer.put([group("a", 1), group("b", 5), group("c", 2), group("d", 5)])
    assert buffer.stats()["oldest_version"] == 1
    assert ids(buffer.take(2, min_version=4)) == "bd"
    assert buffer.stats()["stale"] == 2
    assert buffer.put(groups("ac")) == 0
    assert ids(buffer.drain_stale()) == "ac"
    assert buffer.drain_stale() == []
    assert buffer.put(groups("ac", version=6)) == 2


def test_what_is_given_back_to_a_waiting_taker_is_looked_at_too():
    buffer = DataBuffer(4)
    buffer.put([group("a", 1), group("b", 9)])
    buffer.take(1)
    taker = Background(lambda: buffer.take(2, min_version=5))
    wait_until(buffer, take_waiters=1)
    buffer.give_back(["a"])
    wait_until(buffer, stale=1)
    buffer.put(groups("c", version=9))
    assert ids(taker.result()) == "bc"


def test_a_group_without_versions_is_never_too_old():
    buffer = DataBuffer(4)
    buffer.put([SampleGroup("a", {}, [Sample([1], finish_reason="stop")])])
    assert ids(buffer.take(1, min_version=7)) == "a"


def test_stale_groups_do_not_pile_up():
    buffer = DataBuffer(2)
    for names in ("ab", "cd"):
        buffer.put(groups(names))
        call = lambda: buffer.take(1, 0, min_version=5)  # noqa: E731
        code, text = code_of(call, RoostError)
    assert code == "B111"
    assert "drain_stale" in text
    assert ids(buffer.drain_stale()) == "ab"
    assert buffer.stats()["waiting"] == 2


# Back-pressure ----------------------------------------------------------------------------------


def test_what_could_never_be_is_refused_at_once():
    buffer = DataBuffer(2, partial_capacity=1)
    for call in (
        lambda: buffer.put(groups("abc")),
        lambda: buffer.put_partial(groups("ab")),
        lambda: buffer.take(3),
        lambda: buffer.take(0),
        lambda: DataBuffer(0),
        lambda: DataBuffer(True),
    ):
        assert code_of(call)[0] == "B101"
    for batch in (groups("aa"), groups([""]), ["a"], groups("a", finish="abort")):
        assert code_of(lambda batch=batch: buffer.put(batch))[0] == "B104"
    assert buffer.stats()["waiting"] == 0


def test_a_full_buffer_says_how_full_it_is_and_who_waits():
    buffer = DataBuffer(4)
    buffer.put(groups("abcd"))
    buffer.take(3, caller="trainer")
    code, text = code_of(lambda: buffer.put(groups("ef"), 0.01, caller="engine-1"), CallTimeoutError)
    assert code == "B102"
    for part in ("engine-1 waited", "no room for 2 groups", "1 waiting, 3 in flight, room for 4", "'a' by trainer"):
        assert part in text
    assert "waiting to put: engine-1 (2 groups, since" in text
    assert buffer.put(groups("abcd")) == 0
    assert buffer.stats()["put_waiters"] == 0


def test_an_empty_buffer_says_who_waits():
    buffer = DataBuffer(4)
    buffer.put(groups("a"))
    code, text = code_of(lambda: buffer.take(2, 0.01, caller="trainer"), TimeoutError)
    assert code == "B103"
    assert "waiting to take: trainer (2 groups" in text
    assert ids(buffer.take(1, 0)) == "a"


def test_putters_are_served_in_the_order_in_which_they_came():
    buffer = DataBuffer(2)
    buffer.put(groups("ab"))
    putters = []
    for index, names in enumerate(("cd", "e", "f")):
        putters.append(Background(lambda names=names: buffer.put(groups(names))))
        wait_until(buffer, put_waiters=index + 1)
    buffer.take(1)
    buffer.confirm(["a"])  # room for e, and it is the turn of cd
    assert buffer.stats()["put_waiters"] == 3
    order = ""
    for name in "bcdef":
        order += ids(buffer.take(1, WAIT_S))
        buffer.confirm([name])
    assert order == "bcdef"
    assert [one.result() for one in putters] == [2, 1, 1]
    assert buffer.stats()["total_put_wait_s"] > 0


def test_who_gives_up_lets_the_next_one_pass():
    buffer = DataBuffer(2)
    buffer.put(groups("ab"))
    large = Background(lambda: buffer.put(groups("cd"), 3.0))
    wait_until(buffer, put_waiters=1)
    small = Background(lambda: buffer.put(groups("e")))
    wait_until(buffer, put_waiters=2)
    buffer.confirm(["a"])
    with pytest.raises(CallTimeoutError):
        large.result()
    assert small.result() == 1
    assert ids(buffer.take(2)) == "be"


def test_a_repeated_put_does_not_double_what_waits_in_line():
    buffer = DataBuffer(2)
    buffer.put(groups("ab"))
    putters = [Background(lambda: buffer.put(groups("cd"))) for _ in range(2)]
    wait_until(buffer, put_waiters=2)
    assert buffer.put(groups("ab"), 0) == 0  # needs no room: waits for nobody
    buffer.confirm(["a", "b"])
    assert sorted(one.result() for one in putters) == [0, 2]


def test_takers_are_served_in_the_order_in_which_they_came():
    buffer = DataBuffer(8)
    large = Background(lambda: buffer.take(3))
    wait_until(buffer, take_waiters=1)
    small = Background(lambda: buffer.take(1))
    wait_until(buffer, take_waiters=2)
    buffer.put(groups("ab"))
    assert small.is_waiting
    buffer.put(groups("cd"))
    assert (ids(large.result()), ids(small.result())) == ("abc", "d")


def test_closing_wakes_everybody():
    buffer = DataBuffer(2)
    buffer.put(groups("ab"))
    buffer.take(1)
    waiting = [Background(lambda: buffer.put(groups("cd"))), Background(lambda: buffer.take(2))]
    wait_until(buffer, put_waiters=1, take_waiters=1)
    buffer.close()
    for one in waiting:
        assert code_of(one.result)[0] == "B110"
    for call in (lambda: buffer.put([]), lambda: buffer.take(1), lambda: buffer.take_partial(1)):
        assert code_of(call)[0] == "B110"
    assert buffer.confirm(["a"]) == 1


def test_many_threads_lose_and_double_nothing(tmp_path):
    buffer = DataBuffer(16)
    names = [[f"{putter}-{n}" for n in range(60)] for putter in range(4)]
    used, lock = [], threading.Lock()

    def produce(own):
        return sum(buffer.put(groups(own[i : i + 5]), WAIT_S) for i in range(0, len(own), 5))

    def consume(turns):
        for turn in range(turns):
            taken = [one.id for one in buffer.take(4, WAIT_S)]
            if turn % 5 == 4:
                buffer.give_back(taken)
                taken = [one.id for one in buffer.take(4, WAIT_S)]
            with lock:
                used.extend(taken)
            buffer.confirm(taken)

    work = [Background(lambda own=own: produce(own)) for own in names]
    work += [Background(lambda: consume(30)) for _ in range(2)]
    for _ in range(5):
        buffer.save(tmp_path / "saved")
        DataBuffer(16).load(tmp_path / "saved")
    assert [one.result() for one in work[:4]] == [60] * 4
    for one in work[4:]:
        one.result()
    assert sorted(used) == sorted(name for own in names for name in own)


# Partial groups ----------------------------------------------------------------------------------


def test_partial_groups_keep_what_they_have_and_are_handed_out_first_in_first_out():
    buffer = DataBuffer(2)
    assert buffer.put_partial(groups("ab", finish="abort", version=3)) == 2
    (one,) = buffer.take_partial(1)
    assert one == group("a", finish="abort", version=3)
    one.samples[0].output_ids.append(9)
    assert buffer.put_partial([one]) == 1
    assert buffer.put_partial([one]) == 0
    assert ids(buffer.take_partial(9)) == "ba"
    assert buffer.take_partial(1) == []
    assert buffer.put(groups("ab")) == 2
    stats = buffer.stats()
    assert (stats["waiting"], stats["partial"], stats["partial_out"]) == (2, 0, 0)
    assert buffer.put_partial(groups("ab", finish="abort")) == 0


def test_a_finished_group_takes_the_place_of_its_partial_one():
    buffer = DataBuffer(2)
    buffer.put_partial(groups("a", finish="abort"))
    assert buffer.put(groups("a")) == 1
    assert buffer.take_partial(1) == []


def test_partial_groups_have_a_capacity_of_their_own():
    buffer = DataBuffer(1, partial_capacity=2)
    buffer.put(groups("z"))
    buffer.put_partial(groups("ab", finish=""))
    code, text = code_of(lambda: buffer.put_partial(groups("c", finish=""), 0.01), CallTimeoutError)
    assert code == "B102"
    assert "2 partial, 0 handed out, room for 2" in text
    putter = Background(lambda: buffer.put_partial(groups("c", finish="")))
    wait_until(buffer, put_partial_waiters=1)
    back = buffer.take_partial(1)
    assert buffer.put_partial(back, 0) == 1  # its room was kept, and it waits for nobody
    assert buffer.confirm(["a"]) == 1
    assert putter.result() == 1
    assert ids(buffer.take_partial(9)) == "bc"
    assert buffer.give_back(["c"]) == 1
    assert buffer.give_back() == 1
    assert ids(buffer.take_partial(9)) == "bc"


# Save and load -----------------------------------------------------------------------------------


def test_everything_comes_back(tmp_path):
    path = tmp_path / "buffer.jsonl"
    buffer = DataBuffer(8, partial_capacity=4)
    long = group("long", version=6, tokens=LONG * 3)
    long.samples[0].output_ids = list(range(LONG * 3))
    long.samples[0].logprobs = [-1 / (n + 3) for n in range(LONG * 3)]
    long.samples[1].output_ids[0] = 2**40
    long.samples[1].versions[-1] = 7
    buffer.put([*groups("ab", version=1), long, *groups("cde", version=6)])
    buffer.put_partial(groups("xy", finish="abort"))
    buffer.take_partial(1)
    buffer.take(1)
    buffer.confirm(["a"])
    buffer.take(2, min_version=5)
    buffer.save(path)
    again = DataBuffer(8, partial_capacity=4)
    again.load(path)
    assert again.put(groups("abcdexy")) == 2  # x and y; a is known as used, the rest is there
    assert again.confirm("xy") == 0
    assert again.drain_stale() == [group("b")]
    assert again.take(4) == [long, *groups("cde", version=6)]
    assert again.stats()["total_confirmed"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_partial_groups_come_back(tmp_path):
    buffer = DataBuffer(8)
    buffer.put_partial(groups("xyz", finish="abort"))
    buffer.take_partial(2)
    buffer.save(tmp_path / "saved")
    again = DataBuffer(8)
    again.load(tmp_path / "saved")
    assert again.take_partial(9) == groups("xyz", finish="abort")


def saved(tmp_path):
    buffer = DataBuffer(8)
    buffer.put(groups("abc"))
    buffer.save(tmp_path / "saved")
    return tmp_path / "saved"


def test_what_is_given_back_is_as_it_was_before_somebody_wrote_into_it(tmp_path):
    buffer = DataBuffer(4)
    whole = group("a", finish="abort")
    whole.samples[0].extra["turns"] = [1]
    before = pickle.loads(pickle.dumps(whole))  # noqa: S301
    buffer.put_partial([whole])
    (taken,) = buffer.take_partial(1)
    taken.samples[0].output_ids += [8, 9]  # and died before log probabilities and versions
    taken.samples[0].extra["turns"].append(2)
    taken.samples.pop()
    taken.data["text"] = "another"
    buffer.save(tmp_path / "saved")
    again = DataBuffer(4)
    again.load(tmp_path / "saved")
    assert again.take_partial(1) == [before]
    assert buffer.give_back(["a"]) == 1
    assert buffer.take_partial(1) == [before]


@dataclass
class Named(Sample):
    name: str = ""


def test_a_copy_keeps_classes_and_shares_nothing():
    one = SampleGroup("a", {"list": [1]}, [Named([1], name="x")])
    other = one.copy()
    assert other == one
    assert type(other.samples[0]) is Named
    other.samples[0].prompt_ids.append(2)
    other.data["list"].append(2)
    assert one == SampleGroup("a", {"list": [1]}, [Named([1], name="x")])


def test_a_file_that_was_cut_off_anywhere_is_refused(tmp_path):
    path = saved(tmp_path)
    content = path.read_bytes()
    buffer = DataBuffer(8)
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        assert code_of(lambda: buffer.load(path))[0] == "B106"
    path.write_bytes(content.replace(b'"a"', b'"z"'))
    assert "checksum" in code_of(lambda: buffer.load(path))[1]
    path.write_bytes(b"\x80\x04no JSON")
    assert code_of(lambda: buffer.load(path))[0] == "B106"
    assert code_of(lambda: buffer.load(tmp_path / "none"))[0] == "B106"
    assert code_of(lambda: buffer.save(tmp_path / "none" / "x"))[0] == "B106"
    path.write_bytes(content)
    buffer.load(path)
    assert ids(buffer.take(3)) == "abc"


def test_a_file_of_another_version_is_refused(tmp_path):
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2', 1))
    code, text = code_of(lambda: DataBuffer(8).load(path))
    assert code == "B107"
    assert "version 2" in text


def test_only_a_new_and_large_enough_buffer_loads(tmp_path):
    path = saved(tmp_path)
    code, text = code_of(lambda: DataBuffer(2).load(path))
    assert code == "B109"
    assert "3 finished groups; here is room for 2" in text
    busy = DataBuffer(8)
    busy.put(groups("a"))
    code, text = code_of(lambda: busy.load(path))
    assert code == "B109"
    assert "waiting" in text


def test_what_is_no_json_cannot_be_saved_and_leaves_the_old_file(tmp_path):
    path = saved(tmp_path)
    before = path.read_bytes()
    buffer = DataBuffer(8)
    buffer.put([SampleGroup("odd", {"what": object()}, [])])
    code, text = code_of(lambda: buffer.save(path))
    assert code == "B108"
    assert "'odd'" in text
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_ids": [1.5] * LONG}, "prompt_ids are integers"),
        ({"output_ids": [True]}, "output_ids are integers"),
        ({"versions": [1.5] * 3}, "versions are integers"),
        ({"output_ids": None}, "output_ids are None, not a list"),
        ({"logprobs": ["0.5"] * 3}, "logprobs are numbers"),
        ({"logprobs": [-0.5]}, "there are 1 logprobs for 3 tokens"),
        ({"versions": [1] * 4}, "there are 4 versions for 3 tokens"),
        ({"versions": [1, -1, 1]}, "the version -1 is negative"),
        ({"index": -1}, "the index is -1"),
        ({"index": 0.5}, "the index is 0.5"),
        ({"finish_reason": None}, "the finish_reason is None"),
        ({"reward": "good"}, "the reward is 'good'"),
        ({"extra": [1]}, "extra is "),
    ],
)
def test_a_sample_whose_fields_have_other_types_or_do_not_fit_is_neither_saved_nor_loaded(tmp_path, fields, reason):
    sound = {"output_ids": [5, 6, 7], "logprobs": [-0.5] * 3, "versions": [1] * 3, "finish_reason": "stop"}
    buffer = DataBuffer(8)
    buffer.put_partial([SampleGroup("odd", {}, [Sample([1]), Sample(**{"prompt_ids": [1], **sound, **fields})])])
    code, text = code_of(lambda: buffer.save(tmp_path / "saved"))
    assert code == "B108"
    assert "'odd' cannot be saved: sample 1: " in text
    assert reason in text
    samples = [Sample([1]).to_json(), {**Sample([1], **sound).to_json(), **fields}]
    code, text = code_of(lambda: loaded(tmp_path / "made", samples=samples))
    assert code == "B106"
    assert "made, line 3: not a saved buffer: sample 1: " in text


def test_log_probabilities_of_numpy_are_saved(tmp_path):
    buffer = DataBuffer(8)
    buffer.put([SampleGroup("a", {}, [Sample([1], [5], [np.float64(-0.5)], [1], 0, "stop")])])
    buffer.save(tmp_path / "saved")
    again = DataBuffer(8)
    again.load(tmp_path / "saved")
    assert again.take(1)[0].samples[0].logprobs == [-0.5]


def test_a_group_that_counts_as_finished_and_is_not_is_not_loaded(tmp_path):
    code, text = code_of(lambda: loaded(tmp_path / "made", samples=[Sample([1]).to_json()]))
    assert code == "B106"
    assert (
        "line 3: not a saved buffer: the group 'b' is on the shelf of finished groups, but has unfinished samples"
        in text
    )


def loaded(path, header=None, **changes):
    """Load a file whose checksum is right, and whose last group has other fields."""
    sound = {"id": "b", "data": {}, "samples": [Sample([1], [5], [-0.5], [1], 0, "stop").to_json()]}
    lines = [{"shelf": "finished", "group": {**sound, "id": "a"}}, {"shelf": "finished", "group": {**sound, **changes}}]
    write_lines(path, {"used": ["z"], "totals": {"put": 2}, **(header or {})}, lines)
    buffer = DataBuffer(8)
    buffer.load(path)
    return buffer


HUGE = {"same": 1, "count": 10**10}


@pytest.mark.parametrize(
    "packed",
    [
        {"prompt_ids": HUGE},
        {"output_ids": HUGE},
        {"versions": HUGE},
        {"logprobs": {"same": 0.5, "count": 10**10}},
        {"versions": {"same": 1, "count": -1}},
        {"versions": {"same": 1, "count": True}},
        {"versions": {"same": 1}},
        {"versions": {"same": None, "count": 1}},
        {"output_ids": {"i4": "AAAA"}},
        {"output_ids": {"i4": "AAA"}},
        {"output_ids": {"i4": "é"}},
        {"output_ids": {"i4": 7}},
        {"output_ids": {"i8": "AAAAAAAAAAA="}},
        {"output_ids": {"i4": "AAAAAA==", "f8": ""}},
        {"output_ids": {}},
        {"output_ids": "AAAA"},
        {"logprobs": {"i4": "AAAAAA=="}},
        {"colour": "red"},
    ],
)
def test_a_list_that_is_packed_wrongly_or_too_long_is_refused(tmp_path, packed):
    code, text = code_of(
        lambda: loaded(tmp_path / "made", samples=[{**Sample([1], [5], [-0.5], [1]).to_json(), **packed}])
    )
    assert code == "B106"
    assert "made, line 3: not a saved buffer: sample 0: " in text


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"header": {"used": "abc"}}, "line 1: not a saved buffer: used"),
        ({"header": {"used": [1]}}, "line 1: not a saved buffer: used"),
        ({"header": {"used": None}}, "line 1: not a saved buffer: used"),
        ({"header": {"totals": {"put": -1}}}, "line 1: not a saved buffer: totals"),
        ({"header": {"totals": {"put": "2"}}}, "line 1: not a saved buffer: totals"),
        ({"header": {"totals": [1]}}, "line 1: not a saved buffer: totals"),
        ({"id": ""}, "line 3: not a saved buffer: the id of a group is ''"),
        ({"id": 7}, "line 3: not a saved buffer: the id of a group is 7"),
        ({"id": "a"}, "line 3: not a saved buffer: the group 'a' is there twice"),
        ({"data": []}, "line 3: not a saved buffer: data is a mapping"),
        ({"samples": {}}, "line 3: not a saved buffer: data is a mapping"),
        ({"samples": [7]}, "line 3: not a saved buffer: sample 0: a sample has the fields"),
        ({"samples": [{}]}, "line 3: not a saved buffer: sample 0: a sample has the fields"),
        ({"colour": "red"}, "line 3: not a saved buffer: a group has the fields"),
    ],
)
def test_a_header_or_a_group_of_other_types_is_refused_with_its_line(tmp_path, changes, place):
    assert ids(loaded(tmp_path / "sound").take(2)) == "ab"
    code, text = code_of(lambda: loaded(tmp_path / "made", **changes))
    assert code == "B106"
    assert place in text


def test_loading_wakes_takers(tmp_path):
    path = saved(tmp_path)
    buffer = DataBuffer(8)
    taker = Background(lambda: buffer.take(3))
    wait_until(buffer, take_waiters=1)
    buffer.load(path)
    assert ids(taker.result()) == "abc"
