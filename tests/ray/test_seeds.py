"""The examples that people bring along, as they stand but for the import.

Without CUDA ``available_gpus`` counts the visible-devices variable instead of asking torch. The
library writes nothing to stdout: doctest compares all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from processes import ray_state, run_driver, wait_for

from roost.testing import LocalRay

HEAD = """
>>> from roost import (
...     Cluster,
...     Worker,
...     {strategy},
... )
>>>
>>> class MyWorker(Worker):
...     def __init__(self, msg: str = "Hello, World!"):
...         super().__init__()
...         self._msg = msg
...
...     def hello(self):
...         return self._rank
...
...     def available_gpus(self):
...         import os
...         available_gpus = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
...         return available_gpus
>>>
>>> cluster = Cluster(num_nodes=1)
>>>
"""

EXAMPLES = {
    "FlexiblePlacementStrategy": """
>>> # `FlexiblePlacementStrategy` allows you to specify the *global* accelerator/GPU ranks for each process.
>>> placement = FlexiblePlacementStrategy([[0, 1], [2], [3]])
>>> my_worker = MyWorker.create_group().launch(
...     cluster=cluster, name="flexible_placement", placement_strategy=placement
... )
>>> my_worker.available_gpus().wait()
[2, 1, 1]
""",
    "PackedPlacementStrategy": """
>>> placement = PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3)
>>> my_worker = MyWorker.create_group().launch(
...     cluster=cluster, name="packed_placement", placement_strategy=placement
... )
>>> my_worker.available_gpus().wait() # This will run 4 processes on the first node's GPU 0, 1, 2, 3, each using 1 GPU.
[1, 1, 1, 1]
>>>
>>>
>>> placement_chunked = PackedPlacementStrategy(
...     start_hardware_rank=0, end_hardware_rank=3, num_hardware_per_process=2
... )
>>> my_worker_chunked = MyWorker.create_group().launch(
...     cluster=cluster,
...     name="chunked_placement",
...     placement_strategy=placement_chunked,
... )
>>> my_worker_chunked.available_gpus().wait()  # This will run 2 processes, each using 2 GPUs (0-1 and 2-3) of the first node.
[2, 2]
>>>
>>>
>>> placement_strided = PackedPlacementStrategy(
...     start_hardware_rank=0, end_hardware_rank=3, stride=2, num_hardware_per_process=2
... )
>>> my_worker_strided = MyWorker.create_group().launch(
...     cluster=cluster,
...     name="strided_placement",
...     placement_strategy=placement_strided,
... )
>>> # This will run 2 processes, each using 2 GPUs (0,2 1,3) of the first node.
>>> my_worker_strided.available_gpus().wait()
[2, 2]
""",
    "NodePlacementStrategy": """
>>> # `NodePlacementStrategy` allows you to specify the *global* node ranks for each process.
>>> placement = NodePlacementStrategy([0] * 4)
>>> my_worker = MyWorker.create_group().launch(
...     cluster=cluster, name="node_placement", placement_strategy=placement
... )
>>> my_worker.hello().wait() # This will run 4 processes on the first node
[0, 1, 2, 3]
""",
}

RUN_EXAMPLE = """
import doctest, sys
failed, tried = doctest.testfile(sys.argv[1], module_relative=False)
print(f"{tried} examples tried", file=sys.stderr)
sys.exit(1 if failed or not tried else 0)
"""


@pytest.fixture
def watched(four_nodes: LocalRay) -> Iterator[LocalRay]:
    """The nodes, seen from a driver that is no job: after a seed's end all is as it was before."""
    ray.init(address=four_nodes.address, logging_level="WARNING")
    before = ray_state()
    yield four_nodes
    wait_for(lambda: ray_state() == before, "the end of what the seed, which closes nothing, started")
    ray.shutdown()


@pytest.mark.parametrize("strategy", list(EXAMPLES))
def test_the_examples_of_the_strategies(watched: LocalRay, tmp_path: Path, strategy: str) -> None:
    example = tmp_path / "example.txt"
    example.write_text(HEAD.format(strategy=strategy) + EXAMPLES[strategy], encoding="utf-8")
    done = run_driver(RUN_EXAMPLE, tmp_path, "seed-003", str(example))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""


HYDRA = """
import hydra
from roost import Cluster, ComponentPlacement, Worker

class TestWorker(Worker):
	def __init__(self):
		super().__init__()

	def run(self):
		self.log_info(f"Hello from TestWorker rank {self._rank}!")

# 示例：YAML 配置文件名为 "conf.yaml"
@hydra.main(version_base=None, config_path=".", config_name="conf")
# cfg 即解析后的 YAML 配置
def main(cfg):
	# 使用配置初始化集群对象
	cluster = Cluster(cluster_cfg=cfg.cluster)

	# 创建 ComponentPlacement，解析放置规则
	placement = ComponentPlacement(cfg, cluster)

	# 获取组件 "test_worker" 对应的放置策略
	strategy = placement.get_strategy("test_worker")

	# 按照放置策略启动 TestWorker
	worker = TestWorker.create_group().launch(
		cluster, placement_strategy=strategy
	)
	worker.run().wait()

main()
"""

CONF = """\
cluster:
  num_nodes: 1
  component_placement:
    test_worker:  # 组件名称
      node_group: a800
      placement: 0-3  # 在节点组 a800（仅包含节点 0）上的 GPU 0-3 各启动一个进程

  node_groups:
    - label: a800
      node_ranks: 0
"""


def test_the_hydra_example(watched: LocalRay, tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text(CONF, encoding="utf-8")
    done = run_driver(HYDRA, tmp_path, "seed-001")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    logs = Path(os.environ["RAY_TMPDIR"]) / "ray" / "session_latest" / "logs"
    said = "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs.glob("worker-*.err"))
    for rank in range(4):
        assert f"INFO [TestWorker[{rank}] node 0] Hello from TestWorker rank {rank}!" in said
