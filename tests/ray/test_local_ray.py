"""``local_ray``: a many-node Ray on one computer, of which nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

import roost
from roost.cluster import local_ray as module
from roost.testing import local_ray


def mentioning(text: str) -> list[int]:
    """Processes, other than this one, whose command line or environment has a text."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                for part in ("cmdline", "environ"):
                    with open(f"/proc/{name}/{part}", "rb") as file:
                        if text.encode() in file.read():
                            found.append(int(name))
                            break
    return found


def alive() -> dict[str, float]:
    return {node["NodeManagerAddress"]: node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]}


def test_nodes_come_and_go_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.9.8.7:6379")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with local_ray("2x2", cpus=1) as machines:
        folder = os.environ["RAY_TMPDIR"]
        assert os.environ["RAY_ADDRESS"] == machines.address
        assert len(mentioning(folder)) >= 3  # the control store and two raylets
        cluster = roost.Cluster(num_nodes=2)  # joins it; and is not closed here
        assert ray.get_runtime_context().gcs_address == machines.address
        assert [cluster.get_node_ip(rank) for rank in range(2)] == [machines.node_address(rank) for rank in range(2)]
        assert alive() == {"127.0.0.2": 2, "127.0.0.3": 2}

        for rank in (0, 7):
            with pytest.raises(roost.ClusterError, match=rf"no node {rank} to kill"):
                machines.kill_node(rank)
        machines.kill_node(1)
        eventually(lambda: alive() == {"127.0.0.2": 2}, 60)
        with pytest.raises(roost.ClusterError):
            machines.kill_node(1)
        assert machines.add_node(accelerators=3) == 2
        eventually(lambda: alive() == {"127.0.0.2": 2, machines.node_address(2): 3}, 60)
        assert machines.topology.nodes[2].num_accelerators == 3
    assert os.environ["RAY_ADDRESS"] == "10.9.8.7:6379"
    assert "RAY_TMPDIR" not in os.environ
    assert not ray.is_initialized()
    eventually(lambda: mentioning(folder) == [], 60)
    assert not os.path.exists(folder)
    cluster.close()  # a second time does no harm
    with pytest.raises(roost.ClusterError, match="no Roost job runs"):
        roost.NodeManager.get_proxy()


def test_an_error_inside_leaves_nothing_either(eventually: Callable[..., None]) -> None:
    folder = ""
    before = os.environ.get("RAY_ADDRESS")
    with contextlib.suppress(ZeroDivisionError), local_ray("1x1", cpus=1):
        folder = os.environ["RAY_TMPDIR"]
        _ = 1 / 0
    assert folder
    assert os.environ.get("RAY_ADDRESS") == before
    eventually(lambda: mentioning(folder) == [], 60)
    assert not os.path.exists(folder)


def test_machines_that_make_no_sense_are_refused_before_anything_starts() -> None:
    with pytest.raises(roost.RoostError):
        local_ray("two by four")


OWN = """
import json, os, sys
from ray._raylet import AuthenticationMode, get_authentication_mode  # imported before the variable is there
import ray, roost
from roost.testing import local_ray

@ray.remote
def mode():
    return os.environ["RAY_AUTH_MODE"]

with local_ray("2x1", cpus=1) as machines:
    with roost.Cluster(num_nodes=2):
        found = [os.environ["RAY_AUTH_MODE"], ray.get(mode.remote())]
    print(json.dumps([machines.address, *found]), flush=True)
    sys.stdin.readline()
print(json.dumps([os.environ.get("RAY_AUTH_MODE"), get_authentication_mode() == AuthenticationMode.DISABLED]))
"""
STRANGER = "import ray, sys; ray.init(address=sys.argv[1])"


def test_a_token_of_the_user_is_used(tmp_path: Path) -> None:
    pytest.importorskip("ray._private.authentication", reason="this Ray has no authentication")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("the-own-token-of-this-user")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    command = [sys.executable, "-c", OWN]
    with subprocess.Popen(
        command, env={**env, "HOME": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as own:
        assert own.stdout is not None
        assert own.stdin is not None
        try:
            address, *modes = json.loads(own.stdout.readline())
            assert modes == ["token", "token"]
            stranger = subprocess.run(
                [sys.executable, "-c", STRANGER, address],
                env={**env, "RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert stranger.returncode != 0
            assert "Unauthenticated" in stranger.stderr + stranger.stdout
            own.stdin.write("\n")
            own.stdin.flush()
            assert json.loads(own.stdout.readline()) == [None, True], "as it was before"
        finally:
            own.kill()


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "disabled"), ({"RAY_AUTH_MODE": "token"}, None), ({"RAY_AUTH_TOKEN": "x"}, "token")]
)
def test_what_is_set_for_authentication(
    given: dict[str, str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert module._authentication() == ({} if expected is None else {"RAY_AUTH_MODE": expected})
