"""The loss of Ray's head: an error of Roost, before Ray ends the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

DRIVER = """
import json, os, signal, sys, threading, time
import psutil, ray, roost
from roost.testing import local_ray
from roost.worker import GroupRequest

class Sleeper(roost.Worker):
    def nap(self, seconds):
        time.sleep(seconds)

with local_ray("1x1") as machines:
    ray.init(logging_level="warning")  # close() then leaves the connection, which takes seconds to end without a GCS
    cluster = roost.Cluster(num_nodes=1)
    group = GroupRequest(Sleeper).launch(cluster)
    result = group.nap(600)
    gcs = psutil.Process(machines._nodes[0].all_processes["gcs_server"][0].process.pid)
    for process in [*gcs.children(recursive=True), gcs]:
        process.send_signal(signal.SIGKILL)
    try:
        result.wait()
    except roost.RoostError as error:
        said = {"codes": error.codes, "text": str(error)}
    cluster.close()
    said["open"] = cluster.is_open
    said["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("roost")]
    with open(sys.argv[1], "w") as file:
        json.dump(said, file)
"""


def test_the_loss_of_rays_head_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    report = tmp_path / "said.json"
    # Ray ends the driver 40 s after the loss, and Roost raises after 20 s; without Roost's error there is no report.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables["RAY_gcs_rpc_server_reconnect_timeout_s"] = "40"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "driver.py"), str(report)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert report.exists(), done.stderr[-3000:]
    said = json.loads(report.read_text())
    assert said["codes"] == ["R116"]
    assert "Ray's head, node 0 (127.0.0.2), is gone: its GCS at 127.0.0.2:" in said["text"]
    assert "Connection refused" in said["text"]
    assert said["open"] is False
    assert said["threads"] == []
    assert "node 0 (127.0.0.2), is gone" in done.stderr
