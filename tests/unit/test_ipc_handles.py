"""Handles of GPU memory: which of torch's arguments are changed in them."""

import inspect

from torch.multiprocessing.reductions import rebuild_cuda_tensor

from roost.weights.ipc import COUNTER, DEVICE, EVENT_NEEDED, _counted_by


def test_what_is_changed_in_a_handle_are_its_counter_and_its_event():
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    handle = tuple(range(len(names)))
    changed = dict(zip(names, _counted_by(handle, ("file", 7)), strict=True))
    assert {name: value for name, value in changed.items() if value != names.index(name)} == {
        "ref_counter_handle": "file",
        "ref_counter_offset": 7,
        "event_sync_required": False,
    }
    assert (names[DEVICE], names[COUNTER], names[EVENT_NEEDED]) == (
        "storage_device",
        "ref_counter_handle",
        "event_sync_required",
    )
