"""Small causal language models for tests of engines, and a way to wait for something."""

import threading
import time

import torch
from torch import nn

VOCABULARY = 32


class Toy(nn.Module):
    """One attention layer, tied embeddings, a buffer; random weights that give broad distributions."""

    def __init__(self, size=16):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size)
        self.place = nn.Embedding(256, size)
        self.qkv = nn.Linear(size, 3 * size)
        self.head = nn.Linear(size, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.3]))

    def forward(self, ids):
        hidden = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.qkv(hidden)[:, None].chunk(3, dim=-1)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return self.head(hidden + seen) * self.scale


def toy(seed=0):
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Toy()
    torch.random.set_rng_state(generator)
    return model


class Gated(nn.Module):
    """A toy that takes a step only when told to; trying it out is free."""

    def __init__(self):
        super().__init__()
        self.inner = toy()
        self.permits = threading.Semaphore(0)
        self.is_free = threading.Event()
        self.steps = 0
        self.is_broken = False

    def forward(self, ids):
        if ids.shape[0] > 1:
            while not self.is_free.is_set() and not self.permits.acquire(timeout=0.01):
                pass
            self.steps += 1
            if self.is_broken:
                raise ValueError("broken on purpose")
        return self.inner(ids)

    def step(self, count=1):
        """Lets so many steps happen, and waits until they have begun."""
        before = self.steps
        for _ in range(count):
            self.permits.release()
        until(lambda: self.steps >= before + count)


class Slow(nn.Module):
    """A toy whose every step takes a while."""

    def __init__(self, seconds=0.05):
        super().__init__()
        self.inner = toy()
        self.seconds = seconds

    def forward(self, ids):
        if ids.shape[0] > 1:
            time.sleep(self.seconds)
        return self.inner(ids)


def slow():
    return Slow()


def samples_in(engine):
    """How many samples an engine has, running or waiting."""
    info = engine.info()
    return info["num_running_samples"] + info["num_waiting_samples"]


def until(is_done, timeout_s=60.0):
    """Waits for something; gives up after a while."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.005)
