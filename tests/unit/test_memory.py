"""Storages sent away and called back; on the CPU here, since the mechanics are the same."""

from __future__ import annotations

import torch

from roost.weights.host_copies import HostCopies, device_storages


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
    kept = [host.data_ptr() for host in copies._kept]
    copies.onload()
    copies.offload(storages)
    assert [host.data_ptr() for host in copies._kept] == kept


def test_what_is_away_can_be_seen_and_written() -> None:
    base = torch.arange(12.0)
    other = torch.ones(3)
    view = base.view(3, 4)[1:, ::2]
    copies = HostCopies()
    copies.offload([base.untyped_storage()])
    assert copies.offload([base.untyped_storage(), other.untyped_storage()]) == 12  # what is away is left alone
    assert torch.equal(copies.view(view), torch.tensor([[4.0, 6.0], [8.0, 10.0]]))
    copies.view(view).fill_(-1.0)
    copies.onload()
    assert torch.equal(base, torch.tensor([0.0, 1, 2, 3, -1, 5, -1, 7, -1, 9, -1, 11]))
    assert torch.equal(other, torch.ones(3))
    assert copies.view(base) is base


def test_what_is_in_host_memory_stays_there() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert device_storages(model, optimizer) == []
    assert device_storages(None, None) == []
