"""Arrays [rows, columns, C] that are read and written tile by tile: on disk, in host memory, or on an accelerator.

Files are read and written with the system's calls, not mapped into memory: mapped pages count as memory of the process,
and a full disk would end it with a signal instead of an error.
"""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sima_attn._errors import check_known
from sima_attn._files import DiskFullError
from sima_attn._version import __version__
from sima_attn.gigapixel.tiles import Tile

STORES = ("auto", "disk", "memory", "device")
OURS = "sima_attn"  # the attribute of our zarr arrays, with the version that wrote them


class TileArray(Protocol):
    """An array [rows, columns, C] of which tiles are read and written."""

    def read(self, tile: Tile) -> Tensor:
        """The tile [r, c, C], on the CPU or on the device of the array."""

    def write(self, tile: Tile, values: Tensor) -> None:
        """Write a tile [r, c, C]."""


class MemoryArray:
    """A tensor in host memory or on an accelerator."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def read(self, tile: Tile) -> Tensor:
        """A view of the tile."""
        return self.values[tile.slices]

    def write(self, tile: Tile, values: Tensor) -> None:
        """Copy a tile into the tensor."""
        self.values[tile.slices] = values.to(self.values)


class FileArray:
    """Rows in a file, one after the other, after `offset` bytes.

    The file gets its full size at once, so that a full disk shows itself before anything is computed. A file of that
    size is kept as it is: it belongs to a run that goes on.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int], dtype: torch.dtype, offset: int = 0) -> None:
        self.path, self.shape, self.dtype, self.offset = path, shape, dtype, offset
        self.token_bytes = shape[2] * dtype.itemsize
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _reserve(self._file, offset + shape[0] * shape[1] * self.token_bytes)

    def read(self, tile: Tile) -> Tensor:
        """A copy of the tile."""
        values = torch.empty(*tile.shape, self.shape[2], dtype=self.dtype)
        for part, place in self._parts(tile, values):
            if os.preadv(self._file, [part], place) != len(part):
                raise OSError(f"{self.path} was truncated while it was in use; run the command again without it")
        return values

    def write(self, tile: Tile, values: Tensor) -> None:
        """Write a tile to the file."""
        for part, place in self._parts(tile, values.to("cpu", self.dtype).contiguous()):
            written = 0
            while written < len(part):  # the system may write less than it is given, before it says why
                written += os.pwrite(self._file, part[written:], place + written)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _parts(self, tile: Tile, values: Tensor) -> Any:
        """The rows of a tile as memory, each with its place in the file; one part where the tile has whole rows."""
        rows, columns = tile.shape
        memory = values.view(torch.uint8).numpy().reshape(-1).data
        whole = columns == self.shape[1]
        step = len(memory) if whole else columns * self.token_bytes
        for i in range(1 if whole else rows):
            place = (tile.top + i) * self.shape[1] + tile.left
            yield memory[i * step : (i + 1) * step], self.offset + place * self.token_bytes


def _reserve(file: int, size: int) -> None:
    if os.fstat(file).st_size == size:
        return
    os.ftruncate(file, 0)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def npy_array(path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> FileArray:
    """An .npy file, with its header."""
    kind = np.dtype(str(dtype).removeprefix("torch."))
    header = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, fields)
    array = FileArray(path, shape, dtype, offset=header.tell())
    with open(path, "r+b") as file:
        file.write(header.getvalue())
    return array


class ZarrArray:
    """A zarr array with chunks of `side` x `side` tokens: tiles of a multiple of it are written without reading."""

    def __init__(
        self, path: Path, shape: tuple[int, int, int], dtype: torch.dtype, side: int, about: dict[str, Any]
    ) -> None:
        import zarr

        kind = str(dtype).removeprefix("torch.")
        chunks = (min(side, shape[0]), min(side, shape[1]), shape[2])
        self._array: Any
        if path.exists():
            self._array = zarr.open_array(path, mode="r+")
        else:
            self._array = zarr.create_array(
                path, shape=shape, chunks=chunks, dtype=kind, attributes={OURS: __version__, **about}
            )

    def read(self, tile: Tile) -> Tensor:
        """The tile, decoded."""
        return torch.from_numpy(np.ascontiguousarray(self._array[tile.slices]))

    def write(self, tile: Tile, values: Tensor) -> None:
        """Write the chunks of a tile."""
        self._array[tile.slices] = values.float().cpu().numpy().astype(self._array.dtype)


def is_ours(path: Path) -> bool:
    """Whether a folder holds features that were written here, which may be replaced."""
    try:
        return OURS in json.loads((path / "zarr.json").read_text())["attributes"]
    except (OSError, ValueError, KeyError, TypeError):  # of other files
        return False


def choose_store(store: str, needed: int, device: torch.device, folder: Path) -> str:
    """Where `needed` bytes of tokens go: "auto" is the accelerator if they fit into half of its free memory, else disk.

    Raises where the named store, or the disk, has too little space.
    """
    check_known("store", store, STORES)
    if store == "device" and device.type == "cpu":
        raise ValueError("store 'device' is the memory of an accelerator, and the model is on the CPU: use 'memory'")
    if store in ("auto", "device") and device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if 2 * needed <= free:
            return "device"
        if store == "device":
            raise ValueError(_too_little("half of the accelerator's memory", needed, free // 2, "'disk' or 'memory'"))
    if store == "memory":
        available = free_memory()
        if available is not None and needed > available:
            raise ValueError(_too_little("the host's memory", needed, available, "'disk'"))
        return "memory"
    free = shutil.disk_usage(folder).free
    there = sum(path.stat().st_size for path in folder.glob("tokens-*"))  # of a run that goes on
    if needed > free + there:
        raise DiskFullError(_too_little(f"the disk of {folder}", needed, free, "'memory', or another disk"))
    return "disk"


def _too_little(where: str, needed: int, free: int, instead: str) -> str:
    return f"the tokens need {needed / 1e9:.1f} GB, and {where} has {free / 1e9:.1f} GB free; use the store {instead}"


def free_memory() -> int | None:
    """Bytes of host memory that can be used; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
