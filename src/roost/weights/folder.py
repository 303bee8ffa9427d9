"""The folder that versions are written to: the user's, or one of our own that is removed even after a crash."""

from __future__ import annotations

import os

from roost.cluster.private_folder import PrivateFolder
from roost.errors import Finding, Fix, RolloutError

__all__ = ["WeightsFolder"]


class WeightsFolder:
    """Where versions of the weights are written.

    Args:
        given: A folder that the user chose. It is made where it does not exist, and never removed. ``None``: a private
            folder in the temporary directory is made on first use.
    """

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._own = PrivateFolder("weights", is_large=True)

    def path(self) -> str:
        """Return the folder's path; make the folder where this is the first call.

        Raises:
            ClusterError: The private folder cannot be used (R140).
            RolloutError: The folder that the user chose cannot be made (S206).
        """
        if self._given is None:
            return self._own.path()
        try:
            os.makedirs(self._given, exist_ok=True)
        except OSError as error:
            message = f"the folder for weights, {self._given}, cannot be made on this node: {error.strerror}"
            fix = Fix("a folder that this process can write to", "RolloutManager(…, weights_folder=…)")
            raise RolloutError([Finding("S206", message, fixes=(fix,))]) from error
        return self._given

    def close(self) -> None:
        """Remove the folder where it is our own. Safe to call twice."""
        self._own.close()
