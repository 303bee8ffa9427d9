"""A process that changes a journaled buffer until it is killed, and prints each change that it got the answer of."""

from __future__ import annotations

import sys

from roost.data.journaled_buffer import JournaledBuffer
from roost.data.samples import Sample, SampleGroup


def group(name: str, version: int = 1, finish: str = "stop") -> SampleGroup:
    samples = [Sample([1, 2], [3] * 200, [-0.5] * 200, [version] * 200, finish_reason=finish)] * 4
    return SampleGroup(name, {"text": ("a", 1)}, samples)


def main(path: str) -> None:
    buffer = JournaledBuffer(64, path)
    number = 0
    while True:
        names = [f"g{number + index}" for index in range(4)]
        buffer.put([group(name, number) for name in names])
        print("put", *names, flush=True)
        taken = [one.id for one in buffer.take(3)]
        print("taken", *taken, flush=True)
        buffer.confirm(taken[:2])
        print("confirmed", *taken[:2], flush=True)
        buffer.give_back(taken[2:])
        print("given_back", *taken[2:], flush=True)
        if buffer.stats()["waiting"] > 40:
            rest = [one.id for one in buffer.take(30)]
            print("taken", *rest, flush=True)
            buffer.confirm(rest)
            print("confirmed", *rest, flush=True)
        number += 4


if __name__ == "__main__":
    main(sys.argv[1])
