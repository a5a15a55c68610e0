"""Files that are written whole or not at all."""

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

PREFIX = ".sima-tmp-"  # of temporary folders; nothing else has it, so that leftovers can be removed
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(OSError):
    """A file that does not fit on its disk, into its quota or under the size limit of the process."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A path of the same name in a temporary folder; the file written there takes its place if no error is raised.

    The file has the permissions of any new file: the umask applies. What killed processes have left beside it is
    removed when this process first writes there.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a device, pipe or socket; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers_once(path.parent.resolve())
        with _temporary_folder(path.parent) as (folder, mode):
            temporary = folder / path.name
            yield temporary
            temporary.chmod(mode)  # safetensors gives its files others
            os.replace(temporary, path)
    except Exception as error:
        reason = disk_full_reason(error)
        if reason is None or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(f"{path} cannot be written: {reason}; free some space and try again") from error


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[tuple[Path, int]]:
    """A new folder, locked as long as it is used and then removed, and the permissions of a new file.

    A folder, because libraries may replace the file that they are given, or put files of their own beside it.
    """
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX))
        handle = os.open(folder / _LOCK, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # the system applies the umask
        _lock(handle, wait=True)
        if folder.exists():
            break
        os.close(handle)  # another process removed it in the moment before it was locked
    try:
        yield folder, stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of killed processes; one that is still written to is locked and stays."""
    for left in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it may belong to another user, or be gone
            handle = os.open(left / _LOCK, os.O_WRONLY)
            try:
                if _lock(handle, wait=False):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)


_remove_leftovers_once = cache(remove_leftovers)


def _lock(handle: int, *, wait: bool) -> bool:
    """Whether the lock of an open file is now ours; the system releases it when a process ends, however it ends.

    Not lockf: its lock is lost as soon as this process closes the file anywhere.
    """
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another process, or a network disk without locks
        return False
    return True


def disk_full_reason(error: BaseException | None) -> str | None:
    """What the system says of a full disk, None if the error, and those that caused it, have another reason.

    torch raises an error of its own after the system's; safetensors has no more than the system's number in its text.
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
