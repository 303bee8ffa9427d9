"""SGLang's command line for a place, the versions that are taken, and what a model's folder says of its tensors."""

import ast
import asyncio
import base64
import json
import math
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import reduce_tensor
from toy_models import until

from roost.cluster.ports import lease_ports
from roost.engines.engine import EnginePlace
from roost.engines.http_calls import ask
from roost.engines.keys import VARIABLE
from roost.engines.server_process import ServerProcess
from roost.engines.sglang import inside
from roost.engines.sglang.command import check_options, check_version, command_of, ranks_of
from roost.engines.sglang.engine import SglangEngine
from roost.engines.sglang.intake import buckets_of, make_intake, payload_of
from roost.engines.sglang.memory import FreeMemory, measure_free, static_fraction
from roost.engines.sglang.staging import saved
from roost.errors import RolloutError
from roost.plan import WeightTransport
from roost.weights.checkpoint_shapes import checkpoint_tensors
from roost.weights.ipc import IpcAddress
from roost.weights.streams import Piece, WeightStream

# Flags ---------------------------------------------------------------------------------------


def flags(place, seed=0, offload=False, options=()):
    words = command_of(place, "/model", "python3", seed, 4, offload, options)
    assert words[:2] == ["python3", inside.__file__]
    found = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            value = words[index + 1] if index + 1 < len(words) else "--"
            found[word] = "" if value.startswith("--") else value
    return found


def test_flags_of_an_engine_on_four_gpus():
    place = EnginePlace(
        engine=2, host="10.0.0.1", server_port=3000, nccl_port=3001, dist_init_addr="10.0.0.1:3002",
        accelerators=(4, 5, 6, 7), device="cuda:0", gpu_share=0.5,
    )  # fmt: skip
    assert flags(place, seed=10, offload=True) == {
        "--model-path": "/model", "--host": "10.0.0.1", "--port": "3000", "--tp-size": "4", "--base-gpu-id": "0",
        "--nnodes": "1", "--node-rank": "0", "--skip-tokenizer-init": "", "--weight-version": "4",
        "--random-seed": "12", "--dist-init-addr": "10.0.0.1:3002", "--nccl-port": "3001",
        "--mem-fraction-static": "0.450", "--enable-memory-saver": "", "--enable-weights-cpu-backup": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("share", "free_gib", "fraction"),
    [(0.5, 100, 0.45), (0.5, 60, 0.75), (0.5, 50, 0.9), (0.5, 40, 0.9), (0.4, 99, 0.36 / 0.99), (0.5, 0, 0.45)],
)
def test_the_fraction_of_free_memory_that_makes_the_share(share, free_gib, fraction):
    assert static_fraction(share, FreeMemory(free_gib, 100)) == pytest.approx(fraction)


def test_memory_that_cannot_be_measured_is_taken_to_be_free(tmp_path):
    assert measure_free(sys.executable, {}) is None or torch.cuda.is_available()
    assert measure_free(str(tmp_path / "no-python"), {}) is None
    assert static_fraction(0.5, None) == 0.45


def test_flags_of_the_second_of_two_members():
    place = EnginePlace(
        member=1, num_members=2, server_port=3000, dist_init_addr="10.0.0.1:3002", accelerators=tuple(range(8)),
        device="cuda:0",
    )  # fmt: skip
    found = flags(place)
    assert (found["--tp-size"], found["--nnodes"], found["--node-rank"]) == ("16", "2", "1")
    assert found["--dist-init-addr"] == "10.0.0.1:3002"
    assert not {"--mem-fraction-static", "--enable-memory-saver", "--device", "--nccl-port"} & set(found)
    assert ranks_of(place) == 16


def test_the_users_options_come_last_and_win():
    place = EnginePlace(server_port=1, gpu_share=0.5)
    words = command_of(place, "/model", "python3", 0, 0, False, ["--mem-fraction-static", "0.3"])
    assert words[-2:] == ["--mem-fraction-static", "0.3"]
    assert words.count("--mem-fraction-static") == 2
    assert flags(place)["--device"] == "cpu"


def test_options_that_follow_from_the_plan_are_refused_all_at_once():
    with pytest.raises(RolloutError) as error:
        SglangEngine("/model", options=["--tp", "2", "--port=5", "--context-length", "9", "--node_rank", "1"])
    assert error.value.codes == ("E123",) * 3
    assert [str(finding).split()[1] for finding in error.value.findings] == ["--tp", "--port", "--node-rank"]
    check_options(["--context-length", "9"])
    with pytest.raises(RolloutError, match="--admin-api-key is made by Roost"):
        check_options(["--admin-api-key=mine"])


@pytest.mark.parametrize(
    "options", [["--tokenizer-worker-num", "2"], ["--tokenizer_worker_num=2"], ["--tokenizer-worker-num", 2]]
)
def test_a_mode_that_checks_no_key_is_refused(options):
    with pytest.raises(RolloutError, match="--tokenizer-worker-num is 2, and must be 1") as error:
        check_options(options)
    assert error.value.codes == ("E123",)
    check_options(["--tokenizer-worker-num", "1"])
    check_options(["--tokenizer-worker-num=1", "--context-length", "2"])


# Requests without the key ----------------------------------------------------------------------

OPEN = """
import sys

import uvicorn


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


if __name__ == "__main__":
    assert "--api-key=the-key" in sys.argv
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[-1]), lifespan="off", log_level="warning")
"""


def test_routes_that_sglang_leaves_open_need_the_key(tmp_path):
    """An application that checks no key at all stands for those routes."""
    env = package(tmp_path, "0.5.9")
    (tmp_path / "sglang" / "launch_server.py").write_text(OPEN)
    with lease_ports() as lease:
        server = ServerProcess(
            [sys.executable, inside.__file__, "--port", str(lease.port)], env={**env, VARIABLE: "the-key"}
        )
        server.start()
        try:
            url = f"http://127.0.0.1:{lease.port}"
            until(lambda: not server.is_alive() or answers(url))
            for route in ("health_generate", "metrics", "server_info", "health/", "%68ealth_generate"):
                for key in ("", "another"):
                    for method in ("GET", "POST", "OPTIONS"):
                        with pytest.raises(RolloutError) as error:
                            ask(f"{url}/{route}", method, key=key)
                        assert error.value.codes == ("E113",), server.logs()
                assert ask(f"{url}/{route}", key="the-key").startswith("/")
            assert ask(f"{url}/health") == "/health"
            with pytest.raises(RolloutError, match="asks for a key"):
                ask(f"{url}/health", "POST")
        finally:
            server.stop()


def answers(url):
    try:
        ask(f"{url}/health")
    except RolloutError:
        return False
    return True


def test_websockets_need_the_key_too():
    served, sent = [], []

    async def app(scope, receive, send):
        served.append(scope["type"])

    async def send(message):
        sent.append(message)

    guard = inside.guarded(app, "the-key")
    for headers in ([], [(b"authorization", b"Bearer another")], [(b"authorization", b"Bearer the-key")]):
        asyncio.run(guard({"type": "websocket", "path": "/health", "headers": headers}, None, send))
    assert served == ["websocket"]
    assert sent == [{"type": "websocket.close", "code": 1008}] * 2
    asyncio.run(guard({"type": "lifespan"}, None, send))
    assert served == ["websocket", "lifespan"]


# Versions ------------------------------------------------------------------------------------


def package(folder, version):
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("version", ["0.5.6", "0.5.10.post2", "0.6.0rc1", "1.0.0", "0.0.0.dev1+gabc", "nightly"])
def test_versions_that_are_taken(tmp_path, version):
    assert check_version(sys.executable, package(tmp_path, version)) == version


@pytest.mark.parametrize("version", ["0.5.5.post3", "0.4.10"])
def test_versions_that_are_too_old(tmp_path, version):
    with pytest.raises(RolloutError) as error:
        check_version(sys.executable, package(tmp_path, version))
    text = str(error.value)
    assert error.value.codes == ("E122",)
    assert f"SGLang {version} is too old" in text
    assert "rule: SGLang 0.5.6 and newer" in text
    assert "pip install 'sglang>=0.5.6'" in text


def test_interpreters_without_sglang(tmp_path):
    with pytest.raises(RolloutError, match="No module named 'sglang'") as error:
        check_version(sys.executable, {"PYTHONPATH": str(tmp_path)})
    assert error.value.codes == ("E122",)
    assert "python=" in str(error.value)
    with pytest.raises(RolloutError, match="cannot be asked"):
        check_version(str(tmp_path / "python"), {})


# What a model has ------------------------------------------------------------------------------


def test_tensors_of_a_folder_with_one_file_or_shards(tmp_path):
    tensors = {
        "a": torch.zeros(2, 3, dtype=torch.bfloat16),
        "b": torch.zeros(0, 4),
        "c": torch.zeros((), dtype=torch.int64),
    }
    said = {"a": ((2, 3), "bfloat16"), "b": ((0, 4), "float32"), "c": ((), "int64")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_tensors(tmp_path) == said
    shards = tmp_path / "shards"
    shards.mkdir()
    save_file({"a": tensors["a"]}, shards / "one.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, shards / "two.safetensors")
    save_file({"stray": tensors["a"]}, shards / "three.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_tensors(shards) == said


def test_tensors_of_a_folder_with_a_config_alone(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 40}  # fmt: skip
    for tied in (True, False):
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=tied, dtype="bfloat16")
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        whole, bare = tmp_path / f"whole-{tied}", tmp_path / f"bare-{tied}"
        model.save_pretrained(whole)
        config.save_pretrained(bare)
        assert checkpoint_tensors(bare) == checkpoint_tensors(whole)
        assert ("lm_head.weight" in checkpoint_tensors(bare)) is not tied


def test_folders_that_say_nothing(tmp_path):
    with pytest.raises(RolloutError, match="is not a folder"):
        checkpoint_tensors(tmp_path / "nowhere")
    with pytest.raises(RolloutError, match=r"neither \*.safetensors nor a config.json"):
        checkpoint_tensors(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RolloutError, match="transformers cannot build the model"):
        checkpoint_tensors(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 8)
    (tmp_path / "b.safetensors").write_bytes(b"")
    with pytest.raises(RolloutError) as error:
        checkpoint_tensors(tmp_path)
    assert error.value.codes == ("E102",) * 2
    (tmp_path / "x.safetensors.index.json").write_text("[]")
    with pytest.raises(RolloutError, match="not an index of safetensors files"):
        checkpoint_tensors(tmp_path)


# What goes to it -------------------------------------------------------------------------------


def piece(name, shape, box=None, nbytes=4):
    box = box or tuple((0, size) for size in shape)
    return Piece(name, "float32", shape, box, box, box, shape, 0, nbytes)


def test_buckets_are_bounded_and_keep_the_order():
    pieces = [piece(str(number), (1,), nbytes=size) for number, size in enumerate([4, 4, 20, 1, 9, 1])]
    assert [[int(one.name) for one in bucket] for bucket in buckets_of(pieces, 10)] == [[0, 1], [2], [3, 4], [5]]
    assert [len(bucket) for bucket in buckets_of(pieces, math.inf)] == [6]
    assert buckets_of([], 10) == []


def test_a_payload_is_read_as_named_tensors():
    named = {"a": torch.arange(6.0).reshape(2, 3)[:, 1:], "b": torch.ones(2, dtype=torch.bfloat16)}
    payload = payload_of((name, *reduce_tensor(tensor)) for name, tensor in named.items())
    found = pickle.loads(base64.b64decode(payload, validate=True))  # noqa: S301
    assert [name for name, _ in found] == ["a", "b"]
    assert all(torch.equal(tensor, named[name]) for name, tensor in found)


def test_handles_of_all_tensors_come_in_one_command():
    class Halted(SglangEngine):
        told = ()
        _is_halted = True

        def update(self, commands, version):
            self.told = commands

    pieces = tuple(piece(str(number), (2**27,), nbytes=2**29) for number in range(5))
    streams = [
        WeightStream(f"c{number}", WeightTransport.IPC, number, (0,), some, 0)
        for number, some in enumerate((pieces[:2], pieces[2:]))
    ]
    handle = ("tensor class", (1,), (1,), 0, "storage class", "dtype", 3, *range(8))
    addresses = {one.id: IpcAddress("GPU-x", [handle] * len(one.pieces), 1).to_bytes() for one in streams}
    engine = Halted("/model")
    make_intake(engine, EnginePlace(accelerators=(0, 1)), streams, addresses, 0, 1.0).commit(1)
    [(route, body)] = engine.told
    assert route == "update_weights_from_tensor"
    first, second = body["serialized_named_tensors"]
    assert first == second
    recipes = pickletools.genops(base64.b64decode(first))
    words = [argument for _, argument, _ in recipes if isinstance(argument, str)]
    assert [word for word in words if word.isdigit()] == ["0", "1", "2", "3", "4"]
    assert "GPU-x" in words


@pytest.mark.parametrize(
    ("kind", "box", "members"),
    [
        (WeightTransport.SHARED_MEMORY, None, 1),
        (WeightTransport.IPC, ((0, 1), (0, 3)), 1),
        (WeightTransport.IPC, None, 2),
    ],
    ids=["host memory", "parts", "two nodes"],
)
def test_what_the_worker_puts_together_first(kind, box, members):
    stream = WeightStream("c", kind, 0, (0,), (piece("a", (2, 3), box),), 24)
    place = EnginePlace(num_members=members)
    assert make_intake(SglangEngine("/model"), place, [stream], {"c": b""}, 0, 1.0) is None


@pytest.fixture
def private(tmp_path_factory, monkeypatch):
    """The private folder of this user, for this test alone."""
    runtime = tmp_path_factory.mktemp("runtime")
    runtime.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime / "roost"


@pytest.mark.parametrize("is_shared", [True, False], ids=["a folder", "memory"])
def test_tensors_are_in_a_folder_for_as_long_as_they_are_read(tmp_path, private, is_shared):
    named = {"a": torch.randn(3, 5)[:, ::2], "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.zeros(0, 4),
             "d": torch.tensor(7), "e": torch.tensor([True, False])}  # fmt: skip
    with saved(named, str(tmp_path) if is_shared else None) as folder:
        assert Path(folder).parent == (tmp_path if is_shared else private / "sglang")
        (file,) = Path(folder).glob("*.safetensors")
        code = f"from safetensors.torch import load_file; print({{k: v.sum().item() for k, v in load_file('{file}').items()}})"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ast.literal_eval(found.stdout) == pytest.approx(
            {name: tensor.sum().item() for name, tensor in named.items()}
        )
        assert all(torch.equal(tensor, named[name]) for name, tensor in load_file(file).items())
        assert checkpoint_tensors(folder)["b"] == ((2,), "bfloat16")
    assert not Path(folder).exists()
    assert not list(tmp_path.iterdir())


STAGES = """
import os, signal, torch
from roost.engines.sglang.staging import saved
with saved({"a": torch.ones(1)}, None) as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_process_that_was_killed_goes_with_the_next_one(private):
    killed = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert left.parent == private / "sglang"
    assert left.is_dir()
    with saved({"a": torch.ones(1)}, None) as folder:
        assert [path.name for path in left.parent.iterdir()] == [Path(folder).name]


def test_an_engine_on_two_nodes_wants_a_folder_that_both_see(tmp_path):
    engine = SglangEngine("/model")
    engine._place = EnginePlace(num_members=2)
    with pytest.raises(RolloutError, match="an engine on 2 nodes") as error:
        engine.load_weights({"a": torch.zeros(1)}, 1)
    assert error.value.codes == ("E123",)
    assert "folder=" in str(error.value)
