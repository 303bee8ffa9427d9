"""Death: of a worker, a node, a group, a driver. Nothing may hang, and nothing may be left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import alive, is_alive, ray_state, run_driver, wait_for, wardens_of

import roost
from roost.cluster.warden import bearers_of, end, start_of
from roost.engines.handles import EngineHandle
from roost.rl.fleet import Fleet
from roost.rl.lost_engines import check_nodes_of, none_alive
from roost.testing import LocalRay, local_ray
from roost.worker import results

SLEEP_S = 600.0


class Parent(roost.Worker):
    def pid(self) -> int:
        return os.getpid()

    def child(self) -> int:
        """A child in a session of its own, as engines start theirs."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def orphan(self) -> int:
        """A grandchild whose parent has gone already."""
        shell = subprocess.run(
            ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, check=True, timeout=20
        )
        return int(shell.stdout)

    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank


def two_of(cluster: roost.Cluster, name: str) -> roost.WorkerGroup:
    """Rank 0 on node 0, rank 1 on node 1, with one GPU each."""
    return Parent.create_group().launch(cluster, roost.FlexiblePlacementStrategy([[0], [4]]), name=name)


def test_a_stopped_worker_is_named_by_the_timeout_and_killed_by_close(
    cluster: roost.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that SIGSTOP holds is not dead for Ray, and does not do what Ray tells it to."""
    group = two_of(cluster, "stopped")
    pids = group.pid().wait()
    children = group.child().wait()
    monkeypatch.setattr(results, "ASK_BEFORE_S", 3.0)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        result = group.pid()
        assert next(result.as_completed()) == (0, pids[0])
        started = time.monotonic()
        with pytest.raises(roost.CallTimeoutError) as caught:
            result.wait(timeout_s=6)
        assert time.monotonic() - started < 60, "a process that hangs is not waited for"
        assert "1 of 2 ranks did not end within 6 s" in str(caught.value)
        assert "rank 1: does not answer" in str(caught.value)
        group.close()
        wait_for(lambda: not alive([*pids, *children]) and not wardens_of(pids), "the end of all", 60.0)
    finally:
        for pid in alive(pids):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_ends_the_call_and_its_children(cluster: roost.Cluster, free_gpus: Callable[[], float]) -> None:
    before = ray_state()
    with two_of(cluster, "killed") as group:
        pids = group.pid().wait()
        children = group.child().wait() + group.orphan().wait()
        assert alive([*pids, *children]) == [*pids, *children]
        result = group.nap(SLEEP_S)
        wait_for(lambda: all(state["state"] == "busy" for state in group.states()), "the call")
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(roost.WorkerDiedError) as caught:
            result.wait()
        assert time.monotonic() - started < 90, "rank 0 sleeps on, and is not waited for"
        error = caught.value
        assert isinstance(error, roost.WorkerError)
        assert (error.group, error.rank, error.node_rank) == ("killed", 1, 1)
        assert "killed[1] on node 1 died during nap()" in str(error)
        assert re.search(rf"on node 1, the files in {os.environ['RAY_TMPDIR']}/ray/session_2[^/]*/logs", str(error))
        wait_for(lambda: not alive([children[1], children[3]]), "the end of the dead worker's children")
        assert alive([pids[0], children[0], children[2]]) == [pids[0], children[0], children[2]]
        states = group.states(timeout_s=60)
        assert [state["state"] for state in states] == ["busy", "dead"]
        with pytest.raises(roost.WorkerDiedError) as again:
            group.execute_on(1).pid().wait(timeout_s=60)
        assert again.value.rank == 1
        with pytest.raises(roost.WorkerDiedError):
            list(group.execute_on(1).pid().as_completed())
    wait_for(lambda: not alive([*pids, *children]) and not wardens_of(pids), "the end of all")
    wait_for(lambda: ray_state() == before, "as it was before")


def test_closing_a_group_leaves_nothing(cluster: roost.Cluster, free_gpus: Callable[[], float]) -> None:
    before = ray_state()
    group = two_of(cluster, "closed")
    pids = group.pid().wait()
    children = group.child().wait() + group.orphan().wait()
    assert len(wardens_of(pids)) == 2
    assert free_gpus() == before[0] - 2
    group.close()
    wait_for(lambda: not alive(pids), "the end of the workers")
    wait_for(lambda: not alive(children) and not wardens_of(pids), "the end of the children")
    wait_for(lambda: ray_state() == before, "as it was before")
    group.close()
    with pytest.raises(roost.RoostError):
        group.pid().wait(timeout_s=60)
    with two_of(cluster, "closed") as second:
        assert second.pid().wait() != pids, "name and accelerators can be had again at once"


def test_closing_the_cluster_closes_its_groups(four_nodes: LocalRay) -> None:
    with roost.Cluster(num_nodes=4) as cluster:
        group = two_of(cluster, "forgotten")
        pids = group.pid().wait() + group.child().wait()
    wait_for(lambda: not alive(pids), "the end of workers and children")


def test_a_killed_node_ends_the_call() -> None:
    with local_ray("2x2") as machines, roost.Cluster(num_nodes=2) as cluster:
        strategy = roost.FlexiblePlacementStrategy([[0], [2]])
        group = Parent.create_group().launch(cluster, strategy, name="nodes")
        pids = group.pid().wait()
        children = group.child().wait()
        result = group.nap(SLEEP_S)
        wait_for(lambda: all(state["state"] == "busy" for state in group.states()), "the call")
        machines.kill_node(1)
        started = time.monotonic()
        with pytest.raises(roost.WorkerDiedError) as caught:
            result.wait()
        assert time.monotonic() - started < 90
        assert (caught.value.rank, caught.value.node_rank) == (1, 1)
        assert caught.value.codes == ("W205",)
        assert str(caught.value.findings[0]).startswith("node 1 (127.0.0.3) is gone: ")
        assert "nodes[1] on node 1 died with it during nap()" in str(caught.value)
        assert [(node.rank, node.address) for node in cluster.lost_nodes()] == [(1, "127.0.0.3")]
        assert cluster.lost_nodes([0]) == []
        check_engines_of_a_lost_node(cluster, group)
        wait_for(lambda: not alive([pids[1], children[1]]), "the end of the node's processes")
        started = time.monotonic()
        group.close()
        assert time.monotonic() - started < 60
        wait_for(lambda: not alive([*pids, *children]), "the end of all")


def check_engines_of_a_lost_node(cluster: roost.Cluster, group: roost.WorkerGroup) -> None:
    """``recover()`` is advised for engines on node 0, and not for those on node 1, which is gone."""
    assert group.binding is not None
    component = group.binding.plan.component("nodes")
    here, there = (EngineHandle(f"nodes/{rank}", component, (rank,), group, rank) for rank in range(2))
    assert "rollout.recover()" in str(none_alive(cluster, [here]))
    text = str(none_alive(cluster, [there]))
    assert "no engine is alive, and nodes/1 cannot be started again: their nodes are gone" in text
    assert "node 1 (127.0.0.3) is gone: " in text
    assert "rollout.recover()" not in text
    assert "cluster.close(); Cluster(num_nodes=0)" in text
    assert "rollout.recover()" in str(none_alive(cluster, [here, there]))
    fleet = Fleet("nodes", [there], None, "", "key")  # type: ignore[arg-type]
    wait_for(lambda: fleet.find_dead() == [there], "the dead engine")
    assert any("nodes/1 was ended: its process ended; node 1 (127.0.0.3) is gone: " in t for t in fleet.troubles(0.0))
    check_nodes_of(cluster, here)
    with pytest.raises(roost.RolloutError, match=r"nodes/1 cannot be started again: node 1 \(127\.0\.0\.3\) is gone"):
        check_nodes_of(cluster, there)


DRIVER = """
import json, os, subprocess, sys, time
import roost

class Parent(roost.Worker):
    def pids(self):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return [os.getpid(), child.pid]

cluster = roost.Cluster(num_nodes=4)
group = Parent.create_group().launch(cluster, roost.FlexiblePlacementStrategy([[0], [4]]))
found = group.pids().wait()
with open(sys.argv[1] + ".tmp", "w") as file:
    json.dump(found, file)
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""


def test_a_killed_driver_leaves_nothing(cluster: roost.Cluster, tmp_path: Path) -> None:
    before = ray_state()
    (tmp_path / "driver.py").write_text(DRIVER)
    report = tmp_path / "pids.json"
    driver = subprocess.Popen(
        [sys.executable, str(tmp_path / "driver.py"), str(report)],
        env={**os.environ, "ROOST_NAMESPACE": "to-be-killed"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: report.exists() or driver.poll() is not None, "the driver's workers", 200.0)
        pids = json.loads(report.read_text())
        workers, everyone = [pair[0] for pair in pids], [pid for pair in pids for pid in pair]
        assert len(alive(everyone)) == 4
        assert len(wardens_of(workers)) == 2
        wait_for(lambda: ray_state()[0] == before[0] - 2, "the reservation")
        assert ("to-be-killed", "Parent:0") in ray_state()[1]
    finally:
        driver.kill()
        driver.wait(timeout=60)
    wait_for(lambda: not alive(everyone), "the end of workers and children")
    wait_for(lambda: not wardens_of(workers), "the end of their wardens")
    wait_for(lambda: ray_state() == before, "free accelerators, no actor, no placement group")
    with roost.Cluster() as same, two_of(same, "after") as group:
        assert all(is_alive(pid) for pid in group.pid().wait())


EMBEDDED = """
import json, os, subprocess, sys, time
import roost
from roost.testing import local_ray

class Parent(roost.Worker):
    def pids(self):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return [os.getpid(), child.pid, int(os.environ["RAY_RAYLET_PID"])]

machines = local_ray("2x2", cpus=1)
machines.__enter__()
cluster = roost.Cluster(num_nodes=2)
group = Parent.create_group().launch(cluster, roost.FlexiblePlacementStrategy([[0], [2]]))
found = {"workers": group.pids().wait(), "folder": os.environ["RAY_TMPDIR"]}
with open(sys.argv[1] + ".tmp", "w") as file:
    json.dump(found, file)
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:  # it has just ended
        return ""


def test_killed_raylets_and_a_killed_driver_leave_nothing(tmp_path: Path) -> None:
    """The driver does not wait for its raylets: they stay zombies, which Ray's own checks take for alive."""
    (tmp_path / "driver.py").write_text(EMBEDDED)
    report = tmp_path / "pids.json"
    variables = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    driver = subprocess.Popen(
        [sys.executable, str(tmp_path / "driver.py"), str(report)],
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    session: dict[int, str] = {}
    try:
        wait_for(lambda: report.exists() or driver.poll() is not None, "the driver's workers", 200.0)
        found = json.loads(report.read_text())
        (head, head_child, head_raylet), (worker, child, raylet) = found["workers"]
        session = bearers_of(f"RAY_TMPDIR={found['folder']}".encode())
        managers = [pid for pid in session if "_Managers" in command_of(pid)]
        assert len(managers) == 1
        assert {head, worker, head_raylet, raylet, head_child, child} <= set(session)
        os.kill(raylet, signal.SIGKILL)
        wait_for(lambda: not alive([worker, child]), "the end of the worker and its child", 60.0)
        assert alive([head, head_child]) == [head, head_child], "the other node is not affected"
        os.kill(head_raylet, signal.SIGKILL)
        wait_for(lambda: not alive([head, head_child, *managers]), "the end of what ran on the head", 60.0)
        driver.kill()
        driver.wait()
        wait_for(lambda: not [pid for pid, born in session.items() if start_of(pid) == born], "the end of Ray", 60.0)
        wait_for(lambda: not os.path.exists(found["folder"]), "the end of the folder", 60.0)
    finally:
        driver.kill()
        driver.wait()
        end(session)


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("sys.exit(3)", 3),
        ("with cluster: sys.exit(4)", 4),
        ("group.boom().wait()", 1),
        ("pass", 0),
    ],
)
def test_a_drivers_exit_code_is_its_own(four_nodes: LocalRay, tmp_path: Path, last: str, code: int) -> None:
    script = f"""
import sys, roost
class W(roost.Worker):
    def boom(self):
        raise ValueError("raised in a worker")
cluster = roost.Cluster(num_nodes=1)
group = W.create_group().launch(cluster, roost.NodePlacementStrategy([0]))
try:
    group.boom().wait()
except roost.WorkerError as error:
    print("caught", error.rank, error.node_rank)
{last}
"""
    done = run_driver(script, tmp_path, "exit-code")
    assert done.returncode == code, done.stderr
    assert done.stdout == "caught 0 0\n"
    if code == 1:
        assert "W[0] on node 0: boom() raised ValueError: raised in a worker" in done.stderr
