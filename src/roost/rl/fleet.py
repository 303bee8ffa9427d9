"""The engines of a rollout: which of them are alive, and which get requests."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import TypeAlias

from roost.engines.client import EngineClient
from roost.engines.handles import EngineHandle, ExternalEngine
from roost.engines.pulses import Pulses
from roost.errors import ClusterError, Finding, RolloutError, RoostError
from roost.rl.hub import HubLink
from roost.rl.lost_engines import lost_nodes_of

__all__ = ["Fleet", "joined"]

IN_FLIGHT = 2048
"""Requests in flight of one call, each for one sample. Engines queue those for which they have no memory."""
WATCH_S = 1.0
ANSWER_S = 2.0
"""Seconds to wait for what engines' processes are doing; one that does not answer for so long is not dead."""
NAMED_S = 2.0
"""Errors of requests name engines that have not answered for so many seconds."""
REMOVE_S = 5.0
"""Seconds that the router may take to forget an engine whose processes were ended."""
STOP_S = 60.0
"""Seconds to wait for the end of the thread: it calls Ray, and must not do so after the cluster is closed."""


logger = logging.getLogger("roost")

_Found: TypeAlias = tuple[EngineHandle | ExternalEngine, tuple[str, int], str]
"""An engine that is dead or hangs, its identity, and what was seen of it."""


class Fleet:
    """Engines, of which some may be gone.

    Args:
        name: Of the rollout.
        engines: All of them; those that come later are added to this list.
        hub: Calls the hub, where their router is.
        url: Of the router; empty: there is none.
        key: Of the router.
        silence_limit_s: Seconds without an answer after which an engine counts as hung, and is ended.
        add_s: Seconds that the router may take to find a new engine healthy.

    Attributes:
        client: Sends requests to the router, or to all engines that get requests in turn.
        changing: Held while engines come and go.
    """

    def __init__(
        self,
        name: str,
        engines: list[EngineHandle | ExternalEngine],
        hub: HubLink,
        url: str,
        key: str,
        silence_limit_s: float = 60.0,
        add_s: float = 70.0,
    ) -> None:
        self.client = EngineClient(url, concurrency=IN_FLIGHT, key=key)
        self.changing = threading.RLock()
        self._engines = engines
        self._hub = hub
        self._url = url
        self._routers = 0
        self._routing = threading.Lock()
        self._asking_router: threading.Thread | None = None
        self._add_s = add_s
        self.pulses = Pulses(silence_limit_s)
        self._evicting = threading.Lock()
        self._evicted: list[tuple[float, str]] = []
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)

    def watch(self) -> None:
        """Look after engines in the background from now on: requests do not go to the dead or the hung for long."""
        self._watcher.start()

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            try:
                self._look()
            except Exception as error:
                if isinstance(error, ClusterError) and "R115" in error.codes:
                    return  # the cluster was closed, or its connection to Ray has ended
                logger.debug("a look at the engines failed, and is repeated", exc_info=True)

    def close(self) -> None:
        """Stop looking after the engines, and wait until the thread that does so has ended."""
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join(STOP_S)
        if self._asking_router is not None:
            self._asking_router.join(ANSWER_S)
        self.client.close()

    # Who gets requests ---------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether anybody gets requests."""
        return any(engine.is_registered for engine in self._engines)

    def register(self, engines: Sequence[EngineHandle | ExternalEngine], timeout_s: float | None = None) -> None:
        """Let engines get requests; those that get them already are left as they are.

        Args:
            engines: The engines.
            timeout_s: Seconds that the router may take for each engine, at most ``add_s``; ``None``: ``add_s``.

        Raises:
            RoostError: The router did not take all of them; the others get requests.
        """
        limit_s = self._add_s if timeout_s is None else min(timeout_s, self._add_s)
        new = [engine for engine in engines if engine.url and not engine.is_registered]
        with ThreadPoolExecutor(16) as pool:
            failures = [error for error in pool.map(self._add, new, repeat(limit_s)) if error is not None]
        self._route()
        if failures:
            raise joined(failures)

    def _add(self, engine: EngineHandle | ExternalEngine, timeout_s: float) -> RoostError | None:
        """Let an engine get requests, and return what went wrong."""
        identity, url = engine.identity, engine.url
        try:
            if self._url:
                self._hub.call("router", "add", url, engine.key, timeout_s)
        except RoostError as error:
            return error
        with self._evicting:
            if engine.is_alive and engine.identity == identity:
                engine.is_registered = True
                return None
        self._remove(url)  # it died meanwhile
        return None

    def _unregister(self, engine: EngineHandle | ExternalEngine) -> None:
        if engine.is_registered:
            engine.is_registered = False
            self._route()
            self._remove(engine.url)

    def _remove(self, url: str) -> None:
        with contextlib.suppress(RoostError):
            self._hub.call("router", "remove", url, REMOVE_S)

    def use_router(self, url: str, key: str) -> None:
        """Use a router that was started again, with its new key: it is told of all engines that get requests.

        Raises:
            RoostError: It did not take all of them; the others get requests.
        """
        with self.changing:
            before = [engine for engine in self.alive if engine.is_registered]
            for engine in self._engines:
                engine.is_registered = False
            with self._routing:
                self._routers += 1
                self._url = url
                self.client.abandon(f"the router at {url} was started again")
                self.client.keys = {url: key}
                self.client.urls = [url]
            self.register(before)

    def _look_at_router(self) -> None:
        """Ask whether the router runs, in a thread of its own: a hub that hangs keeps nobody waiting but that thread."""
        if self._url and (self._asking_router is None or not self._asking_router.is_alive()):
            self._asking_router = threading.Thread(target=self._abandon_dead_router, name="router-watch", daemon=True)
            self._asking_router.start()

    def _abandon_dead_router(self) -> None:
        """Send nothing to a router that has ended: whoever takes its port would see its key, and could answer."""
        number = self._routers
        try:
            for problem in self.router_problem():
                with self._routing:
                    if problem.code in ("E106", "S210") and number == self._routers and self.client.urls:
                        self.client.abandon(problem.message)
        except Exception:  # such as of a connection to Ray that has ended; the next look asks again
            logger.debug("the router could not be asked", exc_info=True)

    def router_problem(self) -> tuple[Finding, ...]:
        """What is wrong with the router, for errors; nothing where it runs."""
        try:
            if self._url:
                self._hub.call("router", "check")
        except RoostError as error:
            return tuple(error.findings)
        return ()

    def _route(self) -> None:
        """Without a router, the client goes to all engines in turn."""
        self.client.names = {engine.url: engine.name for engine in self._engines if isinstance(engine, EngineHandle)}
        if not self._url:
            registered = [engine for engine in self._engines if engine.is_registered]
            self.client.keys.update({engine.url: engine.key for engine in registered})
            self.client.urls = [engine.url for engine in registered]

    # Who is alive --------------------------------------------------------------------------

    @property
    def alive(self) -> list[EngineHandle | ExternalEngine]:
        """Those that run, as far as is known."""
        return [engine for engine in self._engines if engine.is_alive]

    def gone(self) -> list[EngineHandle | ExternalEngine]:
        """Return the engines that do not run, once evictions in progress have ended: their processes are gone."""
        with self._evicting:
            return [engine for engine in self._engines if not engine.is_alive]

    def find_dead(self, timeout_s: float = ANSWER_S) -> list[EngineHandle]:
        """Look which engines are gone; take them out of the router, and return the new ones."""
        deadline_s = time.monotonic() + min(ANSWER_S, timeout_s)
        asked = []
        for engine in self.alive:
            if isinstance(engine, EngineHandle) and not self._closed.is_set():
                ranks = range(engine.first, engine.first + engine.num_members)
                asked.append((engine, engine.identity, engine.group.ask_states(ranks)))
        found: list[_Found] = []
        for engine, identity, states in asked:
            read = engine.group.read_states(states, max(0.0, deadline_s - time.monotonic()))
            if any(state["state"] == "dead" for state in read):
                found.append((engine, identity, "its process ended"))
        return [engine for engine in self._evict_all(found) if isinstance(engine, EngineHandle)]

    def _look(self) -> None:
        """Ask all engines for a sign of life, and evict those that are dead, or silent beyond the limit."""
        self._look_at_router()
        engines = [(engine, engine.identity) for engine in self.alive]
        self.pulses.look([engine for engine, _ in engines])
        found: list[_Found] = []
        for engine, identity in engines:
            if self.pulses.is_dead(engine):
                found.append((engine, identity, "its process ended"))
            elif self.pulses.silent_s(engine) > self.pulses.limit_s:
                limit = f"the limit is {self.pulses.limit_s:g} s (silence_limit_s)"
                found.append((engine, identity, f"{self.pulses.described(engine)}; {limit}"))
        self._evict_all(found)

    def _evict_all(self, found: Sequence[_Found]) -> list[EngineHandle | ExternalEngine]:
        """Evict engines, and return those that were alive until now; the reasons name nodes that are gone."""
        lost = lost_nodes_of([engine for engine, _, _ in found])
        evicted = []
        for engine, identity, reason in found:
            reasons = [reason, *map(str, lost.get(engine.name, ()))]
            if not self._closed.is_set() and self._evict(engine, identity, "; ".join(reasons)):
                evicted.append(engine)
        return evicted

    def _evict(self, engine: EngineHandle | ExternalEngine, identity: tuple[str, int], reason: str) -> bool:
        """End the processes of an engine, and take it out of the router; its requests are then sent to others.

        Returns:
            Whether it was alive until now, in this incarnation.
        """
        with self._evicting:  # all of it: recover() gives the engine another group and another URL
            if not engine.is_alive or engine.identity != identity:
                return False
            engine.is_alive = False
            self._evicted = [*self._evicted[-15:], (time.monotonic(), f"{engine.name} was ended: {reason}")]
            if not reason.startswith("its process"):
                logger.warning("%s is ended, and recover() starts it again: %s", engine.name, reason)
            try:
                if isinstance(engine, EngineHandle):
                    engine.end_members()
            finally:
                self._unregister(engine)
            return True

    def hung(self) -> list[EngineHandle | ExternalEngine]:
        """Engines that have left a question open for longer than it usually takes to answer."""
        return [engine for engine in self.alive if self.pulses.silent_s(engine) >= NAMED_S]

    def troubles(self, since_s: float) -> tuple[str, ...]:
        """Engines that were ended since a moment of the monotonic clock, and those that do not answer, for errors."""
        lines = [text for when_s, text in self._evicted if when_s >= since_s]
        return (*lines, *(f"{engine.name}: {self.pulses.described(engine)}" for engine in self.hung()))

    def find_dead_external(self) -> bool:
        """Looks which engines elsewhere are gone; whether any is."""
        gone = [engine for engine in self.alive if isinstance(engine, ExternalEngine) and engine.health()]
        for engine in gone:
            engine.is_alive = False
            self._unregister(engine)
        return bool(gone)


def joined(errors: Sequence[RoostError]) -> RoostError:
    """Return one error for several engines; one alone is left as it is."""
    return errors[0] if len(errors) == 1 else RolloutError(finding for error in errors for finding in error.findings)
