"""The folder that versions are written to: the user's, or one of our own that is removed even after a crash."""

from __future__ import annotations

from roost.cluster.private_folder import PrivateFolder

__all__ = ["WeightsFolder"]


class WeightsFolder:
    """Where versions of the weights are written.

    Args:
        given: A folder that the user chose. It is never removed. ``None``: a private folder is made on first use.
    """

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._own = PrivateFolder("weights")

    def path(self) -> str:
        """Return the folder's path; make the folder where this is the first call.

        Raises:
            ClusterError: The private runtime folder cannot be used (R140).
        """
        return self._own.path() if self._given is None else self._given

    def close(self) -> None:
        """Remove the folder where it is our own. Safe to call twice."""
        self._own.close()
