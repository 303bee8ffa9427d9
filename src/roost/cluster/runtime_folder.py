"""The private folder of this user on this machine, for notes, sockets and logs. No other user can write to it.

This module does not import Ray, so that short-lived processes can use it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile

from roost.errors import ClusterError, Finding, Fix

__all__ = ["open_private", "private_folder", "runtime_folder", "temporary_folder"]

_SHARED = "/tmp"  # noqa: S108
_ELSEWHERE = "export XDG_RUNTIME_DIR=… (a directory of this user with mode 0700)"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def runtime_folder() -> str:
    """Return the path of this user's private folder, and create it if it does not exist.

    It is ``$XDG_RUNTIME_DIR/roost`` where that variable names a private directory of this user, else
    ``/tmp/roost-UID``. Several processes may call this at the same time.

    Raises:
        ClusterError: The path exists and is a symbolic link, is no directory, belongs to another user, or is
            accessible to other users; or it cannot be created (R140).
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return private_folder(
        os.path.join(base, "roost") if _is_private_directory(base) else f"{_SHARED}/roost-{os.getuid()}"
    )


def temporary_folder() -> str:
    """Return the path of this user's private folder for large files, and create it where it does not exist.

    It is ``roost-UID`` in the temporary directory: that of ``TMPDIR``, else ``/tmp``.

    Raises:
        ClusterError: As for :func:`runtime_folder`.
    """
    path = os.path.join(tempfile.gettempdir(), f"roost-{os.getuid()}")
    return private_folder(path, "export TMPDIR=… (a directory that this user can write to)")


def private_folder(path: str, elsewhere: str = _ELSEWHERE) -> str:
    """Return the path of a private folder, and create it where it does not exist; see :func:`runtime_folder`.

    Args:
        path: The folder.
        elsewhere: What the user can do to have it in another place.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        message = f"the private folder {path} cannot be created: {error.strerror}"
        fix = Fix("use another place", elsewhere)
        raise ClusterError([Finding("R140", message, fixes=(fix,))]) from error
    found = os.lstat(path)
    reason = _wrong_owner(found) if stat.S_ISDIR(found.st_mode) else f"is {_kind(found.st_mode)}, not a directory"
    fix = Fix("remove it, or have its owner or root remove it", f"rm -rf {path}")
    if not reason and found.st_mode & _OTHERS:
        reason = f"has mode {stat.S_IMODE(found.st_mode):04o}, so other users can access its contents"
        fix = Fix("check its contents, then close it to other users", f"chmod 700 {path}")
    if reason:
        rule = "the folder has files and sockets of jobs, which only its user may access"
        raise ClusterError([Finding("R140", f"the private folder {path} {reason}", rule=rule, fixes=(fix,))])
    return path


def open_private(path: str, flags: int, mode: int = 0o600) -> int:
    """Open a regular file of this user and return its descriptor, which child processes do not inherit.

    Symbolic links are not followed, and a FIFO or a device cannot make this wait. A file that does not exist is
    created if ``flags`` have ``O_CREAT``; add ``O_EXCL`` to refuse an existing file. ``O_TRUNC`` takes effect only
    after the checks.

    Raises:
        ClusterError: The path is not a regular file, has several hard links, or belongs to another user (R141).
        OSError: It cannot be opened for any other reason, as from :func:`os.open`.
    """
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    while True:
        try:
            handle = _open(path, safe, mode)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            continue  # another process has just created it
        except OSError as error:
            # A symbolic link gives ELOOP; a socket, or a FIFO without a reader, ENXIO; a directory EISDIR.
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise _refusal(path, f"is {_kind(os.lstat(path).st_mode)}, not a regular file") from error
            raise
        break
    try:
        found = os.fstat(handle)
        reason = _wrong_owner(found)
        if not stat.S_ISREG(found.st_mode):
            reason = f"is {_kind(found.st_mode)}, not a regular file"
        elif found.st_nlink > 1:
            reason = reason or f"has {found.st_nlink} hard links"
        if reason:
            raise _refusal(path, reason)
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
        os.set_blocking(handle, not flags & os.O_NONBLOCK)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _open(path: str, flags: int, mode: int) -> int:
    """Open an existing file, or create it with ``O_EXCL``, so that a created file is new."""
    if flags & os.O_CREAT and not flags & os.O_EXCL:
        try:
            return os.open(path, flags & ~os.O_CREAT)
        except FileNotFoundError:
            flags |= os.O_EXCL
    return os.open(path, flags, mode)


def _is_private_directory(path: str) -> bool:
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return False
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _OTHERS
    return is_private and os.path.isabs(path)


def _wrong_owner(found: os.stat_result) -> str:
    """Return what is wrong with the owner; empty if it is this user."""
    return "" if found.st_uid == os.getuid() else f"belongs to user {found.st_uid}, not to user {os.getuid()}"


def _refusal(path: str, reason: str) -> ClusterError:
    rule = "only regular files of this user are opened here, so that no other user decides what is read or written"
    fix = Fix("see its owner, then remove it", f"ls -ld {path}")
    return ClusterError([Finding("R141", f"{path} {reason}", rule=rule, fixes=(fix,))])


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISREG, "a regular file"),
    )
    return next((text for is_kind, text in kinds if is_kind(mode)), "a device")
