"""The folder of weight versions: one that the user chose, or a private one that is removed even after a crash."""

from __future__ import annotations

import os

from roost.cluster.private_folder import PrivateFolder
from roost.errors import Finding, Fix, RolloutError

__all__ = ["WeightsFolder"]


class WeightsFolder:
    """The folder to which versions of the weights are written.

    Args:
        given: A folder that the user chose. It is created if it does not exist, and never removed. ``None``: a private
            folder in the temporary directory is created on first use.
    """

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._own = PrivateFolder("weights", is_large=True)

    def path(self) -> str:
        """Return the folder's path; the first call creates the folder.

        Raises:
            ClusterError: The private folder cannot be used (R140).
            RolloutError: The folder that the user chose cannot be created (S206).
        """
        if self._given is None:
            return self._own.path()
        try:
            os.makedirs(self._given, exist_ok=True)
        except OSError as error:
            message = f"the folder for weights, {self._given}, cannot be created on this node: {error.strerror}"
            fix = Fix("use a folder that this process can write to", "RolloutManager(…, weights_folder=…)")
            raise RolloutError([Finding("S206", message, fixes=(fix,))]) from error
        return self._given

    def close(self) -> None:
        """Remove the folder if it is the private one. Idempotent."""
        self._own.close()
