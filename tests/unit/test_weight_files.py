"""Versions of the weights as files: whole tensors, one writer for each file, and disks that are full."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from roost.errors import RolloutError
from roost.plan import Sharding, TensorShards
from roost.plan.shards import intervals_of
from roost.weights.checkpoint import read_checkpoint
from roost.weights.files import FileWriter, discard_version, publish_version
from roost.weights.shard_files import INDEX_NAME, plan_files


def described(tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, int]) -> tuple[TensorShards, ...]:
    return tuple(
        TensorShards(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), cuts.get(name))
        for name, tensor in tensors.items()
    )


def own_part(side: Sharding, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a rank holds of the whole tensors."""
    own = {}
    for shards in side.tensors:
        own[shards.name] = tensor = tensors[shards.name]
        if shards.dim is not None:
            start, stop = intervals_of(shards, side.tp)[side.coordinates(rank)[0]]
            own[shards.name] = tensor.narrow(shards.dim, start, stop - start)
    return own


def write(folder: Path, side: Sharding, tensors: Mapping[str, torch.Tensor], version: int) -> Path:
    files = plan_files(side)
    writers = [(FileWriter(shard, str(folder)), own_part(side, shard.rank, tensors)) for shard in files]
    for writer, own in writers:
        writer.write(own, version)
    for writer, _ in writers:
        writer.join(version)
    return publish_version(str(folder), version, files)


TENSORS = {
    "rows": torch.randn(8, 6),
    "columns": torch.randn(4, 8).to(torch.bfloat16),
    "norm": torch.randn(5),
    "steps": torch.tensor(7),
    "mask": torch.rand(3, 3) > 0.5,
    "empty": torch.zeros(0, 4),
}
CUTS = {"rows": 0, "columns": 1}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_version_is_a_folder_that_others_read(tp: int, dp: int, tmp_path: Path) -> None:
    side = Sharding(described(TENSORS, CUTS), tp=tp, dp=dp)
    for version in (1, 2, 3):
        folder = write(tmp_path, side, TENSORS, version)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        assert not found.keys() & load_file(folder / file).keys(), "each tensor is there once"
        found |= load_file(folder / file)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert read_checkpoint(folder).keys() == TENSORS.keys()
    names = set(files) if len(files) == 1 else {*files, INDEX_NAME}
    assert {path.name for path in folder.iterdir()} == names, "pieces are gone"
    if len(files) > 1:
        index = json.loads((folder / INDEX_NAME).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
        for name, file in index["weight_map"].items():
            with safe_open(folder / file, framework="pt") as opened:
                assert name in opened.keys()  # noqa: SIM118
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-2", "version-3"]


def test_no_file_has_two_writers() -> None:
    side = Sharding(described(TENSORS, CUTS), tp=2, dp=2)
    files = plan_files(side)
    names = [shard.file for shard in files if shard.file] + [shard.pieces_file for shard in files]
    assert len(names) == len(set(names))
    assert len({shard.rank for shard in files}) == len(files)


def test_transformers_loads_what_two_ranks_wrote(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tensors = model.state_dict()
    cuts = {name: 0 if "_proj" in name else 1 for name in tensors if "_proj" in name or "embed" in name}
    folder = write(tmp_path, Sharding(described(tensors, cuts), tp=2), tensors, 1)
    assert len(list(folder.glob("*.safetensors"))) == 2
    config.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(read(tokens).logits, model.eval()(tokens).logits)


def test_a_missing_or_short_file_is_named_and_the_last_version_stays(tmp_path: Path) -> None:
    side = Sharding(described(TENSORS, CUTS), tp=2)
    write(tmp_path, side, TENSORS, 1)
    files = plan_files(side)
    for shard in files:
        FileWriter(shard, str(tmp_path)).write(own_part(side, shard.rank, TENSORS), 2)
    draft = tmp_path / ".version-2"
    (draft / files[1].pieces_file).write_bytes(b"short")
    with pytest.raises(RolloutError, match=r"rank 0 cannot write .*pieces-1 ends after 5 bytes") as caught:
        FileWriter(files[0], str(tmp_path)).join(2)
    assert caught.value.codes == ("S206",)
    (draft / files[1].file).unlink()
    with pytest.raises(OSError, match=files[1].file):
        publish_version(str(tmp_path), 2, files)
    discard_version(str(tmp_path), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["version-1"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """The private folder of the driver would be made on another node with a mode that lets others in, and stay."""
    [shard] = plan_files(Sharding(described(TENSORS, {})))
    with pytest.raises(
        RolloutError, match=r"rank 0 cannot write its weights: .* not shared between the nodes"
    ) as caught:
        FileWriter(shard, str(tmp_path / "roost-0" / "weights" / "1-abc")).write(TENSORS, 1)
    assert caught.value.codes == ("S206",)
    assert list(tmp_path.iterdir()) == []


# A full disk ------------------------------------------------------------------------------------

ON_A_FULL_DISK = """
import sys
import torch
from roost.errors import RolloutError
from roost.plan import Sharding, TensorShards
from roost.engines.sglang.staging import saved
from roost.weights.files import FileWriter
from roost.weights.shard_files import plan_files

folder, side = sys.argv[1], Sharding((TensorShards("a", (1 << 20,), "float32"),))
try:
    FileWriter(plan_files(side)[0], folder).write({"a": torch.ones(1 << 20)}, 1)
except RolloutError as error:
    print(repr(str(error)))
try:
    with saved({"a": torch.ones(1 << 20)}, folder):
        pass
except OSError as error:
    print(repr(str(error)))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "roost-test", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(small_disk: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, str(small_disk)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"signal {-done.returncode}: {done.stderr}"
    of_writer, of_staging = (ast.literal_eval(line) for line in done.stdout.splitlines())
    assert "rank 0 cannot write its weights (4096 KiB)" in of_writer
    assert "No space left on device" in of_writer
    assert "GiB are free" in of_writer
    assert "use a folder with room for three versions" in of_writer
    assert "No space left on device" in of_staging
