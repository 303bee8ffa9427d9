"""Storages sent away and called back; on the CPU here, since the mechanics are the same."""

from __future__ import annotations

import torch

from roost.rl.memory import HostCopies, device_storages


def test_views_and_ties_survive() -> None:
    base = torch.arange(12.0)
    view, tied = base[4:8], base.view(3, 4)
    copies = HostCopies()
    assert copies.offload([base.untyped_storage()]) == 48
    assert base.untyped_storage().nbytes() == 0
    assert copies.is_offloaded
    assert copies.onload() == 48
    assert not copies.is_offloaded
    assert torch.equal(base, torch.arange(12.0))
    assert torch.equal(view, torch.arange(4.0, 8.0))
    assert tied[2, 3] == 11.0


def test_host_memory_is_kept_between_uses() -> None:
    storages = [torch.ones(4).untyped_storage(), torch.ones(8).untyped_storage()]
    copies = HostCopies()
    copies.offload(storages)
    kept = [host.data_ptr() for host in copies._kept.values()]
    copies.onload()
    copies.offload(storages)
    assert [host.data_ptr() for host in copies._kept.values()] == kept


def test_what_is_in_host_memory_stays_there() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert device_storages(model, optimizer) == []
    assert device_storages(None, None) == []
