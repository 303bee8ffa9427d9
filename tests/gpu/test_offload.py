"""Memory of a real GPU, sent to the host and back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from roost.weights.host_copies import HostCopies, device_storages  # noqa: E402

GIB = 2**30


def used_bytes() -> int:
    """What the driver says is in use on the device: not what torch believes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_offload_frees_the_device_and_onload_restores_every_bit() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, device="cuda") for _ in range(8)))
    model.tied = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8192, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tensors = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values() if v.is_cuda)]
    before = [tensor.detach().cpu() for tensor in tensors]
    torch.cuda.empty_cache()
    full = used_bytes()

    copies = HostCopies()
    for _ in range(2):  # the second time, host memory is there already
        moved = copies.offload(device_storages(model, optimizer))
        torch.cuda.empty_cache()
        assert moved > 5 * GIB
        assert full - used_bytes() > 0.98 * moved
        assert copies.is_offloaded
        assert copies.onload() == moved
        assert all(torch.equal(tensor.detach().cpu(), kept) for tensor, kept in zip(tensors, before, strict=True))
    assert model.tied.data_ptr() == model[0].weight.data_ptr()
