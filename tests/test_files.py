"""Files are written whole or not at all, with the permissions of any new file; nothing is left of killed writers."""

import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from full_disk import no_file_above
from sima_attn import _files
from sima_attn._files import PREFIX, DiskFullError, atomic_write, disk_full_reason, remove_leftovers


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def umask():
    """Sets the umask of this process; it is what it was after the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002, 0o000])
def test_a_file_has_the_permissions_of_any_new_file(tmp_path, umask, mask):
    umask(mask)
    with atomic_write(tmp_path / "new" / "atomic") as temporary:
        temporary.write_text("x")
    with atomic_write(tmp_path / "new" / "tensors") as temporary:
        save_file({"x": torch.zeros(1)}, temporary)
    (tmp_path / "plain").write_text("x")
    for path in (tmp_path / "new").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o666 & ~mask


def test_the_umask_of_other_threads_stays_as_it_is(tmp_path, umask, monkeypatch):
    """It belongs to the process: changing it even for a moment would change the files of other threads."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
    with atomic_write(tmp_path / "file") as temporary:
        temporary.write_text("x")


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "file").write_text("before")

    def write():
        with atomic_write(tmp_path / "file") as temporary:
            temporary.write_text("half of")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_threads_that_write_one_file_leave_one_of_their_texts(tmp_path):
    def write(text):
        with atomic_write(tmp_path / "file") as temporary:
            temporary.write_text(text * 1000)
            remove_leftovers(tmp_path)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() in {letter * 1000 for letter in "abcd"}


WRITER = """
import sys
from pathlib import Path
from sima_attn._files import atomic_write
with atomic_write(Path(sys.argv[1])) as temporary:
    temporary.write_text("half of")
    with open(temporary, "a"):  # another handle of the same process, closed again
        pass
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_stays(tmp_path):
    others = [".hidden", "file.tmp", ".file.abcd1234", "sima-tmp-1-file"]
    for name in others:
        (tmp_path / name).write_text("not ours")
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "writing\n"
        before = names(tmp_path)
        assert len(before) == len(others) + 1
        remove_leftovers(tmp_path)
        assert names(tmp_path) == before
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert names(tmp_path) == before
    with atomic_write(tmp_path / "other") as temporary:  # the next start: the first file this process writes here
        temporary.write_text("x")
    assert names(tmp_path) == sorted([*others, "other"])


def test_a_folder_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, created = _files.lock, []

    def lock_too_late(handle, *, wait):
        if not created:
            created.append(next(tmp_path.glob(f"{PREFIX}*")))
            shutil.rmtree(created[0])
        return lock(handle, wait=wait)

    monkeypatch.setattr(_files, "lock", lock_too_late)
    with atomic_write(tmp_path / "file") as temporary:
        temporary.write_text("x")
    assert created
    assert names(tmp_path) == ["file"]


@pytest.fixture(params=["folder", "pipe", "socket"])
def not_a_file(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = tmp_path / "target"
    if request.param == "folder":
        path.mkdir()
    elif request.param == "pipe":
        os.mkfifo(path)
    else:
        socket.socket(socket.AF_UNIX).bind("target")
    return path


def test_only_files_are_overwritten(not_a_file):
    before = not_a_file.stat()
    with (
        pytest.raises((ValueError, OSError), match=r"target is a .*; give the name"),
        atomic_write(not_a_file),
    ):
        pytest.fail("the block must not run")
    assert not_a_file.stat() == before


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "folder").write_text("mine")
    with (
        pytest.raises(OSError, match="folder is a file; give the name of a folder"),
        atomic_write(tmp_path / "folder/x"),
    ):
        pytest.fail("the block must not run")


def save_through_file(temporary):
    with open(temporary, "wb") as file:
        torch.save({"x": torch.zeros(100_000)}, file)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda temporary: temporary.write_bytes(bytes(100_000)), id="bytes"),
        pytest.param(save_through_file, id="torch"),
        pytest.param(lambda temporary: save_file({"x": torch.zeros(100_000)}, temporary), id="safetensors"),
        pytest.param(lambda temporary: Image.effect_noise((400, 400), 90).save(temporary, format="png"), id="picture"),
    ],
)
def test_a_file_that_does_not_fit_is_named_whatever_library_writes_it(tmp_path, write):
    path = tmp_path / "file"
    path.write_text("before")

    def write_it():
        with no_file_above(50_000), atomic_write(path) as temporary:
            write(temporary)

    with pytest.raises(DiskFullError) as raised:
        write_it()
    assert str(raised.value) == f"{path} cannot be written: {os.strerror(errno.EFBIG)}; free some space and try again"
    assert names(tmp_path) == ["file"]
    assert path.read_text() == "before"


def test_a_full_disk_is_told_from_other_errors(tmp_path):
    assert disk_full_reason(OSError(errno.ENOSPC, "")) == os.strerror(errno.ENOSPC)
    assert disk_full_reason(RuntimeError("I/O error: (os error 28)")) == os.strerror(28)
    assert disk_full_reason(PermissionError(errno.EACCES, "no")) is None
    assert disk_full_reason(RuntimeError("(os error 13)")) is None
    with pytest.raises(PermissionError, match="no") as raised, atomic_write(tmp_path / "file"):
        raise PermissionError(errno.EACCES, "no")
    assert not isinstance(raised.value, DiskFullError)
