"""The stable order of (address, accelerator id)."""

import itertools

import pytest

from roost import stable_order_key


def offline(name):
    return None


def order(pairs, resolve=offline):
    return sorted(pairs, key=lambda pair: stable_order_key(*pair, resolve=resolve))


@pytest.mark.parametrize(
    "ordered",
    [
        ["10.0.0.7", "10.0.0.66"],  # the classic: texts sort the other way round
        ["9.255.255.255", "10.0.0.0"],
        ["10.0.0.2", "10.0.1.1", "10.1.0.0"],
        ["fe80::2", "fe80::10"],
        ["2001:db8::9", "2001:db8::a", "2001:db8::10"],
        ["10.0.0.1", "::1"],  # IPv4 before IPv6
        ["fe80::1%eth2", "fe80::1%eth10"],
        ["node-2", "node-10"],
        ["node-2", "node-10", "node-10b"],
        ["rack1-node9", "rack1-node10", "rack2-node1"],
        ["a", "b"],
        ["255.255.255.255", "worker-1"],
        ["ffff::1", "worker-1"],
        ["10.0.0.300-node2", "10.0.0.300-node10"],  # no address at all
    ],
)
def test_addresses(ordered):
    for shuffled in itertools.permutations(ordered):
        assert [address for address, _ in order([(address, 0) for address in shuffled])] == ordered


@pytest.mark.parametrize(
    "ordered",
    [
        [0, 1, 2, 10],
        ["2", "10"],
        [1, "2", 10],
        ["GPU-2", "GPU-10"],
        ["MIG-1a", "MIG-1b"],
        [7, "GPU-00000000-0000-0000-0000-000000000000"],
        ["GPU-0", "MIG-GPU-0/1/0", "MIG-GPU-0/2/0", "MIG-GPU-0/10/0"],
        [0, ""],
        [3, "¹"],
    ],
)
def test_ids(ordered):
    for shuffled in itertools.permutations(ordered):
        assert [i for _, i in order([("10.0.0.1", i) for i in shuffled])] == ordered


def test_the_address_comes_before_the_id():
    pairs = [("10.0.0.10", 0), ("10.0.0.9", 7), ("10.0.0.10", "1"), ("10.0.0.9", "10"), ("10.0.0.9", "9")]
    assert order(pairs) == [
        ("10.0.0.9", 7),
        ("10.0.0.9", "9"),
        ("10.0.0.9", "10"),
        ("10.0.0.10", 0),
        ("10.0.0.10", "1"),
    ]


def test_a_resolvable_name_counts_as_its_address():
    table = {"zebra": "10.0.0.1", "ant": "10.0.0.3"}
    pairs = [("ant", 0), ("10.0.0.2", 0), ("zebra", 0), ("nobody", 0)]
    assert [a for a, _ in order(pairs, table.get)] == ["zebra", "10.0.0.2", "ant", "nobody"]


def test_localhost_resolves_by_itself():
    assert stable_order_key("localhost") in (stable_order_key("127.0.0.1"), stable_order_key("::1"))


def test_a_name_that_does_not_resolve_is_no_crash():
    names = ["node-10.invalid", "node-2.invalid"]
    assert sorted(names, key=stable_order_key) == ["node-2.invalid", "node-10.invalid"]


@pytest.mark.parametrize("address", ["", " ", "a..b", "-", "x" * 300, "a\0b", "münchen.invalid", "[", "host:8265"])
def test_odd_texts_are_no_crash(address):
    assert stable_order_key(address, 0) == stable_order_key(address, 0)


@pytest.mark.parametrize("text", ["node-" + "1" * 5000, "9" * 5000])
def test_absurd_numbers_are_no_crash(text):
    assert stable_order_key(text, text, offline) == stable_order_key(text, text, offline)


@pytest.mark.parametrize(
    ("one", "other"),
    [("::1", "[::1]"), ("10.0.0.1", " 10.0.0.1 "), ("10.0.0.1", "::ffff:10.0.0.1"), ("2001:db8::1", "2001:DB8:0::1")],
)
def test_forms_of_one_address(one, other):
    assert stable_order_key(one, 0, offline) == stable_order_key(other, 0, offline)


def test_number_and_numeric_text_are_one_id():
    assert stable_order_key("10.0.0.1", 3) == stable_order_key("10.0.0.1", "3")


def test_all_sorts_of_nodes_and_ids_sort_together():
    addresses = ["10.0.0.7", "fe80::1", "node-2", "2-node", ""]
    ids = [0, "1", "GPU-1", "0-GPU", ""]
    pairs = list(itertools.product(addresses, ids))
    assert order(pairs) == order(pairs[::-1])
