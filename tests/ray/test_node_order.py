"""The one order of nodes: the same whatever order they joined in."""

from __future__ import annotations

import itertools
import random

import pytest

import roost
from roost.cluster.nodes import NodeInfo, order_nodes
from roost.testing import LocalRay, local_ray


def addresses(nodes: list[NodeInfo]) -> list[str]:
    assert [node.rank for node in nodes] == list(range(len(nodes)))
    return [node.address for node in nodes]


def node(address: str, **fields: object) -> NodeInfo:
    return NodeInfo(ray_id=f"id of {address}", address=address, **fields)  # type: ignore[arg-type]


def in_every_order(nodes: list[NodeInfo], order: str = "address") -> list[str]:
    found = {tuple(addresses(order_nodes(shuffled, order))) for shuffled in itertools.permutations(nodes)}
    assert len(found) == 1
    return list(found.pop())


def test_addresses_count_as_numbers() -> None:
    nodes = [node(address) for address in ("10.0.0.66", "10.0.0.7", "9.255.0.1", "10.0.0.100")]
    assert in_every_order(nodes) == ["9.255.0.1", "10.0.0.7", "10.0.0.66", "10.0.0.100"]


def test_ipv6_counts_as_numbers_and_comes_after_ipv4() -> None:
    nodes = [node(address) for address in ("fd00::10", "fd00::9", "10.0.0.1", "fd00:0:0:0::a")]
    assert in_every_order(nodes) == ["10.0.0.1", "fd00::9", "fd00:0:0:0::a", "fd00::10"]


def test_names_that_are_no_addresses_come_in_natural_order() -> None:
    nodes = [node(address) for address in ("node-10", "node-2", "node-1")]
    assert in_every_order(nodes) == ["node-1", "node-2", "node-10"]


def test_the_head_comes_first_whatever_its_address() -> None:
    nodes = [node("10.0.0.1"), node("10.0.0.9", is_head=True), node("10.0.0.3")]
    assert in_every_order(nodes) == ["10.0.0.9", "10.0.0.1", "10.0.0.3"]


def test_order_by_name_is_natural_and_equal_names_go_by_address() -> None:
    nodes = [node("10.0.0.1", name="gpu-10"), node("10.0.0.12", name="gpu-2"), node("10.0.0.4", name="gpu-2")]
    assert in_every_order(nodes, "name") == ["10.0.0.4", "10.0.0.12", "10.0.0.1"]


def test_order_by_a_label() -> None:
    nodes = [node("10.0.0.1", labels={"rack": "r10"}), node("10.0.0.2", labels={"rack": "r9"})]
    assert in_every_order(nodes, "label:rack") == ["10.0.0.2", "10.0.0.1"]


def test_a_missing_label_is_named_with_its_node() -> None:
    nodes = [node("10.0.0.1", labels={"rack": "1"}), node("10.0.0.2", labels={"zone": "a"})]
    with pytest.raises(roost.ClusterError, match=r"10\.0\.0\.2 has no label 'rack'") as caught:
        order_nodes(nodes, "label:rack")
    assert "zone" in str(caught.value)


def test_explicit_ranks_win_over_everything() -> None:
    nodes = [
        node("10.0.0.1", is_head=True, wanted_rank="2"),
        node("10.0.0.2", wanted_rank="0"),
        node("10.0.0.3", wanted_rank="1"),
    ]
    assert in_every_order(nodes) == ["10.0.0.2", "10.0.0.3", "10.0.0.1"]
    assert in_every_order(nodes, "name") == ["10.0.0.2", "10.0.0.3", "10.0.0.1"]


@pytest.mark.parametrize(
    "ranks",
    [("0", ""), ("", "1"), ("1", "2"), ("0", "2"), ("0", "0"), ("0", "-1"), ("0", "one")],
    ids=["partial", "partial too", "not from zero", "gap", "twice", "negative", "no number"],
)
def test_explicit_ranks_that_are_not_complete_are_refused(ranks: tuple[str, str]) -> None:
    nodes = [node(f"10.0.0.{i}", wanted_rank=rank) for i, rank in enumerate(ranks)]
    with pytest.raises(roost.ClusterError, match="on all nodes or on none") as caught:
        order_nodes(nodes)
    for rank in ranks:
        assert f": {rank or 'not set'}" in str(caught.value)


def test_a_thousand_nodes_come_in_one_order() -> None:
    nodes = [node(f"10.{i // 250}.7.{i % 250}") for i in range(1000)]
    shuffled = random.Random(3).sample(nodes, len(nodes))  # noqa: S311
    assert addresses(order_nodes(shuffled)) == [item.address for item in nodes]


def test_nodes_that_joined_in_a_shuffled_order_get_their_ranks_by_address(four_nodes: LocalRay) -> None:
    joined = list(four_nodes._nodes)
    assert joined != sorted(joined)
    with roost.Cluster(num_nodes=4) as cluster:
        assert [cluster.get_node_ip(rank) for rank in range(4)] == [f"127.0.0.{2 + rank}" for rank in range(4)]
        assert cluster.get_node_info(0).is_head


def test_ranks_that_nodes_were_started_with_win() -> None:
    ranks = {0: {"ROOST_NODE_RANK": "1"}, 1: {"ROOST_NODE_RANK": "0"}}
    with local_ray("2x1", cpus=1, env_vars=ranks), roost.Cluster(num_nodes=2) as cluster:
        assert [cluster.get_node_ip(rank) for rank in range(2)] == ["127.0.0.3", "127.0.0.2"]
        assert not cluster.get_node_info(0).is_head
        assert cluster.master_ip == "127.0.0.3"
        assert roost.NodeManager.get_proxy().get_master_ip() == "127.0.0.3"
