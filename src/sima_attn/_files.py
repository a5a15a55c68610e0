"""Atomic file writes, and what to do about a full disk."""

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PREFIX = ".sima-tmp-"  # of temporary folders; leftovers are found by it
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(OSError):
    """The disk, the quota or the file size limit of the process is exceeded."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, and rename it to `path` if no error is raised.

    The file has the permissions of any new file: the umask applies. Leftovers of killed processes in the same folder
    are removed when this process first writes there.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a device, pipe or socket; give the name of a file")
    if path.parent.is_file():
        raise NotADirectoryError(f"{path} cannot be written: {path.parent} is a file; give the name of a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers_once(path.parent.resolve())
        with _temporary_folder(path.parent) as (folder, mode):
            temporary = folder / path.name
            yield temporary
            temporary.chmod(mode)  # safetensors ignores the umask
            os.replace(temporary, path)
    except Exception as error:
        reason = disk_full_reason(error)
        if reason is None or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(f"{path} cannot be written: {reason}; free some space and try again") from error


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[tuple[Path, int]]:
    """A new folder, locked while it is used and then removed, and the permissions of a new file.

    A folder, because libraries may replace the file they are given, or write further files next to it.
    """
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX))
        handle = os.open(folder / _LOCK, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # the system applies the umask
        lock(handle, wait=True)
        if folder.exists():
            break
        os.close(handle)  # another process removed the folder before it was locked
    try:
        yield folder, stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of killed processes; folders in use are locked and stay."""
    for left in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it may belong to another user, or be removed already
            handle = os.open(left / _LOCK, os.O_WRONLY)
            try:
                if lock(handle, wait=False):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)


_remove_leftovers_once = cache(remove_leftovers)


def lock(handle: int, *, wait: bool) -> bool:
    """Lock an open file and return whether that succeeded; the system releases the lock when the process ends.

    Not lockf, whose lock is released as soon as this process closes any handle of the file.
    """
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another process, or a network disk without locks
        return False
    return True


def disk_full_reason(error: BaseException | None) -> str | None:
    """The system's message if an error or one of its causes is a full disk, otherwise None.

    torch raises its own error after the system's; safetensors only has the error number in its message.
    """
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found:
            number = int(found[1])
        if number in _FULL:
            return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None
