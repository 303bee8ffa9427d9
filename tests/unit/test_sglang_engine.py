"""SGLang as an engine by itself, against a server written to its documentation: its commands, and its end."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from other_user import listening_as_nobody, needs_root
from processes import wait_for
from rl_parts import Started
from sglang_model import GREEDY, PROMPT, meant, settings, tiny, write_home
from torch.multiprocessing.reductions import reduce_tensor

import roost
from roost.cluster.runtime_folder import runtime_folder
from roost.engines.engine import EnginePlace
from roost.engines.http_calls import ask
from roost.engines.keys import make_key
from roost.engines.server_process import ServerProcess
from roost.engines.sglang.command import ROUTES
from roost.engines.sglang.engine import SglangEngine
from roost.engines.sglang.exit_report import explain_exit
from roost.engines.sglang.intake import FolderIntake, GroupIntake, buckets_of, payload_of
from roost.engines.sglang.sender import DirectSender
from roost.weights.files import version_folder
from roost.weights.streams import Piece, WeightStream

LONG = {"max_new_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_home(tmp_path_factory.mktemp("sglang"))


@contextlib.contextmanager
def serving(home: Path, place: EnginePlace, step_s: float = 0.0, **arguments: Any) -> Iterator[SglangEngine]:
    engine = SglangEngine(str(home / "model"), **settings(home, TEST_STEP_S=str(step_s)), **arguments)
    with roost.lease_ports(2) as lease:
        assert engine.start(
            EnginePlace(nccl_port=lease.port, dist_init_addr=f"127.0.0.1:{lease.port + 1}", **vars_of(place))
        )
        try:
            get_healthy(engine)
            yield engine
        finally:
            engine.stop()


def get_healthy(engine: SglangEngine, reasons: list[str] | None = None) -> None:
    while reason := engine.health():
        if reasons is not None:
            reasons.append(reason)
        time.sleep(0.02)


def vars_of(place: EnginePlace) -> dict[str, Any]:
    plain = vars(EnginePlace())
    return {name: value for name, value in vars(place).items() if value != plain[name]}


@pytest.fixture(scope="module")
def engine(home: Path) -> Iterator[SglangEngine]:
    """One engine of two ranks, slow enough to be interrupted, whose memory can be taken away."""
    key = f"-{make_key()}"  # one key in 64 begins like an option
    place = EnginePlace(engine=3, accelerators=(0, 1), gpu_share=0.5, key=key)
    with serving(home, place, 0.01, offload=True, seed=40, options=["--enable-deterministic-inference"]) as started:
        yield started


def state(engine: SglangEngine) -> dict[str, Any]:
    return dict(engine.info()["internal_states"][0])


def said(engine: SglangEngine, prompt: Sequence[int] = PROMPT) -> tuple[list[int], set[int]]:
    """What an engine says at temperature 0, and which versions said it."""
    (output,) = engine.generate([prompt], GREEDY)
    assert output.finish_reason == "length"
    assert len(output.logprobs) == 8
    return output.output_ids, set(output.versions)


# The engine by itself -----------------------------------------------------------------------------


def test_it_is_started_as_its_place_says(engine: SglangEngine) -> None:
    found = engine.info()
    assert (found["tp_size"], found["base_gpu_id"], found["nnodes"], found["node_rank"]) == (2, 0, 1, 0)
    assert (found["mem_fraction_static"], found["random_seed"], found["device"]) == (0.45, 43, "cpu")
    assert found["skip_tokenizer_init"]
    assert found["enable_weights_cpu_backup"]
    assert (engine.broadcast, engine.broadcast_ranks) == ("gloo", 2)
    assert found["version"] == "0.5.9"


def test_it_obeys_who_has_its_key_and_nobody_reads_that(engine: SglangEngine) -> None:
    key = engine._place.key
    before = state(engine), engine.version, said(engine)
    for shown in ("", "x" * len(key)):
        for route in ROUTES:
            method = "GET" if route in ("/server_info", "/health_generate") else "POST"
            if route != "/health_generate":  # open, as SGLang has it
                with pytest.raises(roost.RolloutError, match="key") as caught:
                    ask(f"{engine._url}{route}", method, {} if method == "POST" else None, key=shown)
                assert caught.value.codes == ("E113",)
        assert ask(f"{engine._url}/health", key=shown) is None
    assert (state(engine), engine.version, said(engine)) == before
    words = b""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words += Path(f"/proc/{name}/cmdline").read_bytes()
    assert str(engine._place.server_port).encode() in words
    assert key.encode() not in words
    assert "server_args=" in engine.logs(), "it logs all of its settings"
    assert key not in engine.logs()
    assert key not in f"{engine.info()}"


def test_other_users_cannot_reach_its_temporary_files(home: Path) -> None:
    """SGLang's processes unpickle what comes over sockets there."""
    with serving(home, EnginePlace()) as engine:
        folder = Path(state(engine)["temporary"])
        assert folder.parent == Path(runtime_folder(), "sglang")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_folder_for_sockets_whose_path_is_too_long(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    engine = SglangEngine(str(home / "model"), **settings(home))
    with pytest.raises(roost.RolloutError, match="too long for Unix sockets") as error:
        engine.start(EnginePlace())
    assert error.value.codes == ("E123",)
    engine.stop()
    assert not list((long / "roost" / "sglang").iterdir())


def test_it_is_never_open(home: Path) -> None:
    with serving(home, EnginePlace(key="")) as engine, pytest.raises(roost.RolloutError, match="asks for a key"):
        ask(f"{engine._url}/server_info")


@needs_root
def test_another_user_who_took_its_port_while_it_starts_does_not_see_its_key(home: Path) -> None:
    engine = SglangEngine(str(home / "model"), **settings(home))
    with roost.lease_ports(2) as lease, listening_as_nobody(lease.port) as heard:
        engine.start(EnginePlace(server_port=lease.port, nccl_port=lease.port + 1))
        reasons: list[str] = []
        with pytest.raises(roost.RolloutError, match="in use") as error:
            get_healthy(engine, reasons)
        assert error.value.codes == ("E121",)
        assert set(reasons) == {f"it does not listen on port {lease.port} yet"}
        engine.stop()
    assert heard == [""]


def test_a_key_that_looks_like_an_option(home: Path) -> None:
    with serving(home, EnginePlace(key="-key")) as engine:
        assert ask(f"{engine._url}/server_info", key="-key")


def test_it_generates(engine: SglangEngine) -> None:
    outputs = engine.generate([PROMPT, [5]], {**GREEDY, "n": 2})
    assert [output.output_ids for output in outputs[:2]] == [meant(tiny(7).state_dict())] * 2
    assert [output.output_ids for output in outputs[2:]] == [meant(tiny(7).state_dict(), [5])] * 2
    drawn = [engine.generate([PROMPT], {"max_new_tokens": 8, "seed": seed})[0] for seed in (1, 1, 2)]
    assert drawn[0].output_ids == drawn[1].output_ids != drawn[2].output_ids
    for seed in ({}, {"seed": 2**63 - 1}):
        outputs = engine.generate([PROMPT], {"max_new_tokens": 20, "n": 4, **seed})
        assert len({tuple(output.output_ids) for output in outputs}) == 4, "all samples differ"
    with pytest.raises(roost.RolloutError, match="tempature"):
        engine.generate([PROMPT], {"tempature": 1})


@pytest.mark.parametrize("params", [{"seed": 2**63}, {"sampling_seed": 2**64}, {"n": 2, "seed": -1}, {"n": 0}])
def test_seeds_and_counts_out_of_range_do_not_reach_the_server(engine: SglangEngine, params: dict[str, int]) -> None:
    with pytest.raises(roost.RolloutError) as error:
        engine.generate([PROMPT], {"max_new_tokens": 1, **params})
    assert error.value.codes == ("E101",)
    assert said(engine)[0] == meant(tiny(7).state_dict()), "it serves as before"


def test_the_tensors_that_it_wants(engine: SglangEngine) -> None:
    assert engine.describe_weights() == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tiny(7).state_dict().items()
    }


def pieces(weights: Mapping[str, torch.Tensor]) -> tuple[Piece, ...]:
    found = []
    for name, tensor in weights.items():
        box, shape = tuple((0, size) for size in tensor.shape), tuple(tensor.shape)
        kind = str(tensor.dtype).removeprefix("torch.")
        found.append(Piece(name, kind, shape, box, box, box, shape, 0, tensor.nbytes))
    return tuple(found)


def by_tensor(engine: SglangEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> None:
    """As handles come: what rebuilds each tensor, for each rank."""
    commands = []
    for bucket in buckets_of(pieces(weights), engine.bucket_bytes):
        payload = payload_of((piece.name, *reduce_tensor(weights[piece.name])) for piece in bucket)
        commands.append(("update_weights_from_tensor", {"serialized_named_tensors": [payload] * 2}))
    assert len(commands) == (2 if engine.bucket_bytes == 1000 else 1)
    engine.update(commands, version)


def by_group(engine: SglangEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> None:
    """Twice over the same group, as a trainer does."""
    kind = roost.WeightTransport.BROADCAST
    stream = WeightStream("c", kind, 0, (5,), pieces(weights), 0, "gloo", "", (1,), 1 + engine.broadcast_ranks)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sender = DirectSender(stream, "127.0.0.1", 60)
    joining = Started(sender.join)
    intake = GroupIntake(engine, [stream], {"c": sender.address}, 5, 60)
    joining.result()
    for number, sent in enumerate([tiny(99).state_dict(), weights], version - 1):
        sending = Started(functools.partial(sender.send, sent, number))
        intake.commit(number)
        sending.result()
    intake.close()
    sender.close()


def by_folder(engine: SglangEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> None:
    """From a folder that trainers wrote."""
    from safetensors.torch import save_file

    (there := version_folder(str(folder), version)).mkdir()
    save_file(dict(weights), there / "model.safetensors")
    FolderIntake(engine, str(folder)).commit(version)


def by_memory(engine: SglangEngine, weights: Mapping[str, torch.Tensor], version: int, folder: Path) -> None:
    """Whatever came to the worker."""
    engine.load_weights(weights, version)


@pytest.mark.parametrize("way", [by_tensor, by_group, by_folder, by_memory])
@pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "not paused"])
def test_what_it_says_is_what_the_weights_say(
    engine: SglangEngine, tmp_path: Path, way: Callable[..., None], is_paused: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr("roost.engines.sglang.engine.BUCKET_BYTES", 1000)  # several commands
    before = engine.version
    weights = tiny(100 + before).state_dict()
    if is_paused:
        engine.pause()
    way(engine, weights, before + 2, tmp_path)
    if is_paused:
        assert state(engine)["is_paused"]
        engine.resume()
    assert engine.version == before + 2
    for prompt in (PROMPT, [30], [9, 9, 3]):
        assert said(engine, prompt) == (meant(weights, prompt), {before + 2})


def test_an_update_waits_for_what_runs_and_holds_what_comes(engine: SglangEngine) -> None:
    old, new = engine.version, engine.version + 1
    weights = tiny(55).state_dict()
    before = said(engine)[0]
    running = Started(lambda: engine.generate([PROMPT], LONG)[0])
    wait_for(lambda: state(engine)["running"] == 1, "work")
    engine.load_weights(weights, new)  # as an update that does not pause
    later = Started(lambda: said(engine))
    output = running.result()
    assert (output.finish_reason, output.output_ids[:8]) == ("length", before), "it was finished with the old weights"
    assert len(output.output_ids) == 200
    assert old != new
    assert later.result() == (meant(weights), {new})


def test_pausing_aborts_or_waits_and_holds(engine: SglangEngine) -> None:
    whole = engine.generate([PROMPT], LONG)[0].output_ids
    for mode in ("abort", "wait"):
        running = Started(lambda: engine.generate([PROMPT], LONG)[0])
        wait_for(lambda: state(engine)["running"] == 1, "work")
        engine.pause(mode)
        assert state(engine)["running"] == 0
        output = running.result()
        assert output.finish_reason == ("abort" if mode == "abort" else "length")
        assert output.output_ids == whole[: len(output.output_ids)]
        assert (len(output.output_ids) < 200) is (mode == "abort")
        assert engine.health() == "", "a paused engine is healthy"
        held = Started(lambda: said(engine))
        time.sleep(0.1)
        assert state(engine)["running"] == 0
        engine.pause(mode)
        engine.resume()
        assert held.result()[0] == whole[:8]
    with pytest.raises(roost.RolloutError, match="cannot be paused with mode 'never'"):
        engine.pause("never")


def test_waiting_for_what_runs_has_an_end(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Started(lambda: engine.generate([PROMPT], LONG))
    wait_for(lambda: state(engine)["running"] == 1, "work")
    monkeypatch.setattr(engine, "timeout_s", 0.1)
    with pytest.raises(roost.RolloutError, match=r"still had running requests after 0\.1 s"):
        engine.pause("wait")
    monkeypatch.undo()
    assert asked.result()[0].finish_reason == "length"  # nothing was done to it


def test_aborting_one_request(engine: SglangEngine) -> None:
    body = {"input_ids": PROMPT, "rid": "mine", "sampling_params": LONG}
    mine = Started(lambda: ask(f"{engine._url}/generate", "POST", body, key=engine._place.key))
    other = Started(lambda: engine.generate([PROMPT], LONG)[0])
    wait_for(lambda: state(engine)["running"] == 2, "work")
    engine.abort("mine")
    assert mine.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert state(engine)["running"] == 1
    engine.abort()
    assert other.result().finish_reason == "abort"


def test_memory_is_given_and_taken(engine: SglangEngine) -> None:
    before = said(engine)
    running = Started(lambda: engine.generate([PROMPT], LONG)[0])
    wait_for(lambda: state(engine)["running"] == 1, "work")
    engine.offload()
    engine.offload()
    assert running.result().finish_reason == "length", "what ran was finished"
    assert state(engine)["offloaded"] == ["kv_cache", "weights"]
    assert engine.health() == ""
    held = Started(lambda: said(engine))
    engine.pause()
    engine.resume()
    assert state(engine)["is_paused"], "still: its memory is away"
    engine.onload()
    engine.onload()
    assert held.result() == before, "its weights are those that it had"

    engine.offload()
    weights, version = tiny(66).state_dict(), engine.version + 1
    engine.load_weights(weights, version)
    assert state(engine)["offloaded"] == ["kv_cache", "weights"], "an update does not bring its memory back"
    engine.pause()
    engine.onload()
    assert state(engine)["is_paused"]
    engine.resume()
    assert said(engine) == (meant(weights), {version})


# What goes wrong ----------------------------------------------------------------------------------


def test_an_update_that_fails_ends_it(home: Path) -> None:
    with serving(home, EnginePlace()) as engine:
        wrong = {**tiny(1).state_dict(), "scale": torch.ones(3)}
        with pytest.raises(roost.RolloutError, match=r"was not loaded, and the engine was stopped.*load weight \(3,\)"):
            engine.load_weights(wrong, 1)
        assert engine.version == 0
        with pytest.raises(roost.RolloutError, match="was not loaded") as error:
            engine.health()
        assert error.value.codes == ("E124",)
        wait_for(lambda: "version 1 of the weights was not loaded" in engine.ended(), "its end")


def interpreter(folder: Path, free_gib: float, total_gib: float) -> dict[str, Any]:
    """A Python on a node with a GPU of which so much is free, as torch of that Python says."""
    folder.mkdir()
    free, total = (int(gib * 2**30) for gib in (free_gib, total_gib))
    answer = f"[[{total}, {total}], [{free}, {total}]]"
    script = f'case "$*" in *mem_get_info*) echo \'{answer}\';; *) exec {sys.executable} "$@";; esac'
    (folder / "python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "python").chmod(0o755)
    return {"python": str(folder / "python"), "free": str(free_gib)}


@pytest.mark.parametrize(("free_gib", "static_gib"), [(60, 45), (40, 36)], ids=["enough is free", "less is free"])
def test_it_gets_the_memory_that_the_plan_says_whatever_else_is_on_the_gpu(
    home: Path, tmp_path: Path, free_gib: float, static_gib: float, caplog: pytest.LogCaptureFixture
) -> None:
    made = interpreter(tmp_path / "bin", free_gib, 100)
    engine = SglangEngine(
        str(home / "model"), python=made["python"], **settings(home, TEST_FREE_GIB=made["free"]), offload=False
    )
    with roost.lease_ports(2) as lease:
        engine.start(
            EnginePlace(
                accelerators=(0,), device="cuda:0", gpu_share=0.5, nccl_port=lease.port,
                dist_init_addr=f"127.0.0.1:{lease.port + 1}",
            )
        )  # fmt: skip
        try:
            get_healthy(engine)
            assert state(engine)["static_gib"] == pytest.approx(static_gib, rel=0.001)
        finally:
            engine.stop()
    assert ("the plan gives the engine 50.0 GiB of each GPU, but only 40.0 GiB are free" in caplog.text) is (
        free_gib < 50
    )


def test_a_server_that_is_killed(home: Path) -> None:
    with serving(home, EnginePlace()) as engine:
        os.kill(state(engine)["pid"], signal.SIGKILL)
        wait_for(lambda: "SGLang ended with exit code 137" in engine.ended(), "its end")
        with pytest.raises(roost.RolloutError, match="SGLang ended") as error:
            engine.pause()
        assert error.value.codes == ("E121",)
        engine.stop()
        assert engine.ended() == ""


def test_a_scheduler_that_is_killed_is_named(home: Path) -> None:
    with serving(home, EnginePlace(accelerators=(0, 1))) as engine:
        with pytest.raises(roost.RolloutError, match="tempature"):  # its log says so, and that explains nothing
            engine.generate([PROMPT], {"tempature": 1})
        (pid,) = state(engine)["pids_of_ranks"]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: engine.ended(), "its end")
        expected = (
            f"SGLang ended with exit code 137: Subprocess scheduler_1 (pid={pid}) crashed with exit code -9 (SIGKILL)"
        )
        assert engine.ended() == expected
        with pytest.raises(roost.RolloutError) as error:
            engine.health()
        assert error.value.codes == ("E121",)
        assert "out-of-memory killer" in str(error.value)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            ["Scheduler hit an exception: Traceback (most recent call last):", "RuntimeError: shapes differ",
             "Subprocess scheduler_1 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup..."],
            "RuntimeError: shapes differ",
        ),
        (
            ["RuntimeError: no kernel for this GPU",
             "[x] Subprocess scheduler_0 (pid=7) crashed with exit code -3. Triggering SIGQUIT for cleanup..."],
            "RuntimeError: no kernel for this GPU",
        ),
        (
            ["ValueError: a request was refused", "[x] Subprocess detokenizer (pid=7) crashed with exit code -11. Trigg"],
            "Subprocess detokenizer (pid=7) crashed with exit code -11 (SIGSEGV)",
        ),
    ],
    ids=["an exception before", "ended by SGLang itself", "a segmentation fault"],
)  # fmt: skip
def test_the_line_that_explains_an_end(tmp_path: Path, log: list[str], expected: str) -> None:
    (tmp_path / "log").write_text("\n".join(log))
    ended = ServerProcess(["sh", "-c", f"cat {tmp_path / 'log'}; exit 1"], name="SGLang")
    ended.start()
    wait_for(lambda: not ended.is_alive(), "its end")
    assert explain_exit(ended, EnginePlace()).message == f"SGLang ended with exit code 1: {expected}"
    ended.stop()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        (["--mem-fraction-static", "0.99"], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=["too little", "too much"],
)
def test_too_little_memory_is_said_in_its_own_words(home: Path, options: list[str], words: str) -> None:
    place = EnginePlace(accelerators=(0,), gpu_share=0.1)
    with pytest.raises(roost.RolloutError) as error, serving(home, place, options=options):
        pass
    text = str(error.value)
    assert error.value.codes == ("E121",)
    assert f"SGLang ran out of memory: {words}" in text
    given = options[-1] if options else "0.090"
    assert f"the plan gives it 10% of 1 GPU; it was started with --mem-fraction-static {given}" in text
    assert "gpu_share: 0.3" in text


def test_options_that_it_does_not_know(home: Path) -> None:
    with (
        pytest.raises(roost.RolloutError, match="unrecognized arguments: --no-such-thing") as error,
        serving(home, EnginePlace(), options=["--no-such-thing"]),
    ):
        pass
    assert error.value.codes == ("E121",)


def test_a_server_that_obeys_without_its_key_is_not_used(home: Path) -> None:
    engine = SglangEngine(str(home / "model"), **settings(home, TEST_OPEN="1"))
    with roost.lease_ports() as lease:
        engine.start(EnginePlace(nccl_port=lease.port))
        with pytest.raises(roost.RolloutError, match="does not refuse requests without its key") as error:
            get_healthy(engine)
        assert error.value.codes == ("E122",)
        engine.stop()


def test_commands_that_it_does_not_have(home: Path) -> None:
    engine = SglangEngine(str(home / "model"), **settings(home, TEST_WITHOUT="/pause_generation"))
    with roost.lease_ports() as lease:
        engine.start(EnginePlace(nccl_port=lease.port))
        with pytest.raises(roost.RolloutError, match="this SGLang has no /pause_generation") as error:
            get_healthy(engine)
        assert error.value.codes == ("E122",)
        assert "SGLang 0.5.6 and newer have them" in str(error.value)
        engine.stop()
