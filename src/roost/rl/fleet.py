"""The engines of a rollout: which of them are alive, and which get requests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from roost.errors import ClusterError, RoostError
from roost.rl.client import EngineClient
from roost.rl.handles import EngineHandle, ExternalEngine
from roost.rl.hub import HubLink

__all__ = ["Fleet"]

IN_FLIGHT = 2048
"""Requests in flight of one call, each for one sample. Engines queue those for which they have no memory."""
WATCH_S = 1.0
ANSWER_S = 2.0
"""How long an engine's worker may take to say what it does; one that is silent is not dead."""
STOP_S = 60.0
"""Seconds to wait for the end of the thread: it calls Ray, and must not do so after the cluster is closed."""


class Fleet:
    """Engines, of which some may be gone.

    Args:
        name: Of the rollout.
        engines: All of them; those that come later are added to this list.
        hub: Calls the hub, where their router is.
        url: Of the router; empty: there is none.
        key: Of the router.

    Attributes:
        client: Sends requests to the router, or to all engines that get requests in turn.
        changing: Held while engines come and go.
    """

    def __init__(
        self, name: str, engines: list[EngineHandle | ExternalEngine], hub: HubLink, url: str, key: str
    ) -> None:
        self.client = EngineClient(url, concurrency=IN_FLIGHT, key=key)
        self.changing = threading.RLock()
        self._engines = engines
        self._hub = hub
        self._url = url
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)

    def watch(self) -> None:
        """Looks after engines in the background from now on: requests do not go to the dead for long."""
        self._watcher.start()

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            try:
                self.find_dead()
            except Exception as error:
                if isinstance(error, ClusterError) and "R115" in error.codes:
                    return  # the cluster was closed, or its connection to Ray has ended

    def close(self) -> None:
        """Stop looking after the engines, and wait until the thread that does so has ended."""
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join(STOP_S)
        self.client.close()

    # Who gets requests ---------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether anybody gets requests."""
        return any(engine.is_registered for engine in self._engines)

    def register(self, engines: Sequence[EngineHandle | ExternalEngine]) -> None:
        """Lets engines get requests."""
        new = [engine for engine in engines if engine.url and not engine.is_registered]
        if self._url and new:
            with ThreadPoolExecutor(min(16, len(new))) as pool:
                list(pool.map(lambda engine: self._hub.call("router", "add", engine.url, engine.key), new))
        for engine in new:
            engine.is_registered = True
        self._route()

    def _unregister(self, engine: EngineHandle | ExternalEngine) -> None:
        if engine.is_registered:
            engine.is_registered = False
            self._route()
            with contextlib.suppress(RoostError):
                self._hub.call("router", "remove", engine.url)

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

    def find_dead(self) -> list[EngineHandle]:
        """Looks which engines are gone; takes them out of the router, and returns the new ones."""
        found = []
        with self.changing:
            for engine in self.alive:
                if isinstance(engine, ExternalEngine) or self._closed.is_set():
                    continue
                ranks = range(engine.first, engine.first + engine.num_members)
                if any(state["state"] == "dead" for state in engine.group.states(ranks, timeout=ANSWER_S)):
                    engine.is_alive = False
                    found.append(engine)
            for engine in found:
                self._unregister(engine)
                engine.end_members()
        return found

    def find_dead_external(self) -> bool:
        """Looks which engines elsewhere are gone; whether any is."""
        gone = [engine for engine in self.alive if isinstance(engine, ExternalEngine) and engine.health()]
        for engine in gone:
            engine.is_alive = False
            self._unregister(engine)
        return bool(gone)
