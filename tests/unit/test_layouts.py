"""The layout arithmetic of ``reference/layouts-and-engines.md``, as a table."""

import pytest

from roost import Layout, PlacementError, resolve_layout

A, R = 16, 8  # actor: 2 nodes of 8


@pytest.mark.parametrize(
    ("flags", "rollout_gpus", "reserve", "offset"),
    [
        ({"debug_train_only": True}, R, A, 0),
        ({"debug_train_only": True, "colocate": True}, R, A, 0),
        ({"debug_train_only": True, "external_engines": True}, R, A, 0),
        ({"external_engines": True, "debug_rollout_only": True}, R, A, 0),
        ({"external_engines": True}, R, A, A),
        ({"external_engines": True, "colocate": True}, R, A, A),
        ({"debug_rollout_only": True}, R, R, 0),
        ({"debug_rollout_only": True, "colocate": True}, R, R, 0),
        ({"colocate": True}, R, A, 0),
        ({"colocate": True}, 16, 16, 0),
        ({"colocate": True}, 24, 24, 0),
        ({}, R, A + R, A),
        ({}, 0, A, A),
        ({"async_training": True}, R, A + R, A),
    ],
)
def test_table(flags, rollout_gpus, reserve, offset):
    layout = resolve_layout(2, 8, rollout_gpus, **flags)
    assert isinstance(layout, Layout)
    assert (layout.num_accelerators, layout.rollout_offset) == (reserve, offset)


@pytest.mark.parametrize(
    ("flags", "rollout_gpus", "actor", "rollout"),
    [
        ({}, 8, range(16), range(16, 24)),
        ({"colocate": True}, 24, range(16), range(24)),  # the first A, not everything
        ({"colocate": True}, 8, range(16), range(8)),
        ({"colocate": True}, 16, range(16), range(16)),
        ({"external_engines": True}, 8, range(16), range(16, 16)),
        ({"debug_train_only": True}, 8, range(16), range(0)),
        ({"debug_rollout_only": True}, 8, range(0), range(8)),
    ],
)
def test_shares(flags, rollout_gpus, actor, rollout):
    layout = resolve_layout(2, 8, rollout_gpus, **flags)
    assert layout.actor == actor
    assert layout.rollout == rollout


@pytest.mark.parametrize(
    "flags",
    [
        {"debug_train_only": True, "debug_rollout_only": True},
        {"debug_train_only": True, "debug_rollout_only": True, "external_engines": True},
        {"colocate": True, "async_training": True},
    ],
)
def test_contradictions(flags):
    with pytest.raises(PlacementError):
        resolve_layout(2, 8, 8, **flags)


def test_all_contradictions_at_once():
    with pytest.raises(PlacementError) as caught:
        resolve_layout(-1, 8, 8, debug_train_only=True, debug_rollout_only=True, colocate=True, async_training=True)
    assert len(caught.value.findings) == 3


@pytest.mark.parametrize(
    "numbers", [(-1, 8, 8), (2, -8, 8), (2, 8, -1), (1.5, 8, 8), ("2", 8, 8), (None, 8, 8), (True, 8, 8)]
)
def test_numbers_that_are_none(numbers):
    with pytest.raises(PlacementError):
        resolve_layout(*numbers)
