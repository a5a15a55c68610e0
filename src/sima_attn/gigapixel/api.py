"""`features`: an image of any size -> the final tokens of a model, on disk."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sima_attn._errors import check_installed, check_known
from sima_attn.gigapixel.network import Network, network_of
from sima_attn.gigapixel.sources import Source, open_source
from sima_attn.gigapixel.stores import FileArray, MemoryArray, TileArray, ZarrArray, choose_store, is_ours, npy_array
from sima_attn.gigapixel.sweeps import Sweeps
from sima_attn.gigapixel.tiles import Tile
from sima_attn.gigapixel.work import WorkFolder, identity_of, work_folder
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.nn.grid import on_grid
from sima_attn.nn.token_ref import trained_at

DTYPES = {"float32": torch.float32, "float16": torch.float16}
ZARR, NPY = ".zarr", ".npy"
SIDE = {"cpu": 64, "cuda": 256}  # of a tile in tokens: 25 MB of a DeiT-S's hidden layer, and 200 MB in bf16
CHUNK = 64  # side of a chunk of zarr in tokens
CHECKED_SIDE = 3  # tokens, of the image that is compared with the model run at once
LARGEST_ERROR = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}

OnStep = Callable[[str, int, int], object]  # (what is done, steps done, all steps)
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class FeatureGrid:
    """The features of an image, and how they were computed.

    Attributes:
        path: The file or folder that was written; None where the features are in memory.
        features: [rows, columns, C], where they are in memory.
        shape: Rows, columns and C.
        prefix: The final class token and registers [P, C].
        logits: Of the classes [K]; None without a classifier, or with a pooling that is no sum over tokens.
        height, width: Of the image in pixels.
        patch: Side of a patch in pixels.
        store: Where the tokens were: "disk", "memory" or "device".
        store_bytes: Of the tokens there.
        sweeps: How often all tiles were read.
        tiles: Of all sweeps together.
        resumed_at: Those that an interrupted run had done.
        seconds: Of this run, the decoding of the image included.
        peak_bytes: The most memory that the process has had so far.
        pictures: Files that were written beside.
    """

    path: Path | None
    features: Tensor | None
    shape: Shape
    prefix: Tensor
    logits: Tensor | None
    height: int
    width: int
    patch: int
    store: str
    store_bytes: int
    sweeps: int
    tiles: int
    resumed_at: int
    seconds: float
    peak_bytes: int
    pictures: tuple[Path, ...] = ()


def features(
    model: nn.Module,
    image: str | Path | np.ndarray,
    out: str | Path | None = None,
    *,
    preprocessing: Preprocessing | None = None,
    dtype: str = "float32",
    tile: int | None = None,
    store: str = "auto",
    token_ref: str | None = None,
    pictures: str | Path | None = None,
    on_step: OnStep = lambda what, done, total: None,
) -> FeatureGrid:
    """The final tokens of a ViT or XCiT for an image of any size: those of the model run at once.

    Memory is bounded by the tile. The same call goes on with an interrupted run whose tokens are on disk.

    Args:
        model: Of the DeiT or XCiT family with the attention sima, sima_local, relu2 or a variant of them, or a model
            of timm converted to one of these; on its device, in its dtype.
        image: A file (TIFF, .npy, or what Pillow reads), a folder of zarr, or an array [height, width, 3].
        out: FILE.zarr or FILE.npy for the features [rows, columns, C]. Without it they are returned.
        preprocessing: Its mean and std are used; by default those of the model's timm configuration.
        dtype: Of the features: "float32" or "float16".
        tile: Side of a tile in tokens; by default 64, on a GPU 256. Memory grows with its square.
        store: Where the tokens are between the blocks: "disk", "memory", "device" (that of the model), or "auto": the
            GPU if they fit into half of its free memory, else disk.
        token_ref: "train" multiplies each attention by N / N of the training size, see `sima_attention`; None leaves
            the model as it is.
        pictures: A folder for the heat maps of q and k in the last attention and the features as colors.
        on_step: Called with what is done, the steps done and all steps.

    Raises:
        ValueError: The image cannot be read, or the model cannot run tile by tile.
        DiskFullError: The disk is full. What was computed is kept for the next call.
    """
    began = time.monotonic()
    target = None if out is None else Path(out)
    _check_image(image, target)
    _check_options(target, dtype, tile, token_ref)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a module, such as sima_attn.load(FOLDER) returns, got {model!r}")
    model = getattr(model, "_orig_mod", model)  # the module inside torch.compile
    how = preprocessing or Preprocessing.of_model(model)
    if how is None:
        raise ValueError(f"{type(model).__name__} has no timm configuration: give preprocessing, for mean and std")
    network = network_of(model)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(eval_mode(model))
        stack.enter_context(trained_at(model, how.size) if token_ref else nullcontext())
        check_network(network)
        work = stack.enter_context(work_folder(target))
        side = tile or SIDE.get(network.device.type, SIDE["cpu"])
        saved = None if target is None else work.open(identity_of(model, image, how, dtype=dtype, tile=side))
        source = stack.enter_context(
            open_source(image, work.path, lambda done, total: on_step("decoding the image", done, total))
        )
        grid = network.grid(*source.size)
        shape = (*grid, network.width)
        store_bytes = 2 * grid[0] * grid[1] * network.width * network.dtype.itemsize
        kind = choose_store(store, store_bytes, network.device, work.path)
        arrays = _token_arrays(kind, work, shape, network, stack)
        result = _feature_array(work, shape, DTYPES[dtype], side, kind, network, stack)
        save = work.save if kind == "disk" and target is not None else None
        sweeps = Sweeps(network, source.size, _reader(source, how, network.device), side, arrays, result, save)
        if saved is not None and save is not None:
            sweeps.progress.update(saved, sweeps)
        resumed_at = sweeps.progress.sweep * len(sweeps.tiles) + sweeps.progress.tile
        prefix, mean = sweeps.run(lambda done, total: on_step(_place(sweeps, min(done, total - 1)), done, total))
        written: list[Path] = []
        if pictures is not None:
            from sima_attn.gigapixel.pictures import write_pictures

            name = Path(image).stem if isinstance(image, str | Path) else "image"
            written = write_pictures(
                Path(pictures), name, source, sweeps, side, lambda done, total: on_step("drawing", done, total)
            )
        grid_of_features = FeatureGrid(
            path=target,
            features=result.values if isinstance(result, MemoryArray) else None,
            shape=shape,
            prefix=prefix[0].clone(),
            logits=network.logits(prefix, mean),
            height=source.size[0],
            width=source.size[1],
            patch=network.patch,
            store=kind,
            store_bytes=store_bytes,
            sweeps=sweeps.last + 1,
            tiles=(sweeps.last + 1) * len(sweeps.tiles),
            resumed_at=resumed_at,
            seconds=0.0,
            peak_bytes=peak_memory(),
            pictures=tuple(written),
        )
        if target is not None:
            work.put_in_place(work.path / target.name)
        if network.device.type == "cuda":
            torch.cuda.synchronize(network.device)  # for the time below
    return replace(grid_of_features, seconds=time.monotonic() - began)


def _check_options(target: Path | None, dtype: str, tile: int | None, token_ref: str | None) -> None:
    check_installed("reading images", "PIL", extra="gigapixel")
    check_known("dtype of the features", dtype, DTYPES)
    if tile is not None and tile < 1:
        raise ValueError(f"tile must be 1 token or more, got {tile}")
    if token_ref not in (None, "train"):
        raise ValueError(f"token_ref must be None or 'train', got {token_ref!r}")
    if target is None:
        return
    if target.suffix not in (ZARR, NPY):
        raise ValueError(f"the features go to a {ZARR} or {NPY} file, got {target}")
    if target.suffix == ZARR:
        check_installed("a zarr array", "zarr", extra="gigapixel")
        if target.exists() and not is_ours(target):
            raise ValueError(f"{target} exists, and `sima features` has not written it; use another name")
    elif target.is_dir():
        raise ValueError(f"{target} is a folder; give the name of a file")


def _check_image(image: Any, target: Path | None) -> None:
    if isinstance(image, np.ndarray):
        return
    if not isinstance(image, str | Path):
        raise TypeError(f"image must be a path or a NumPy array [height, width, 3], got {type(image).__name__}")
    path = Path(image).resolve()
    if target is not None and target.resolve() in (path, *path.parents):
        raise ValueError(f"features in {target} would overwrite the image {image}; use another name")


def check_network(network: Network) -> None:
    """Raise unless the tiles of a small image give what the model gives for all of it: any part may be foreign."""
    model: Any = network.model
    height = width = CHECKED_SIDE * network.patch
    if not getattr(model, "dynamic_img_size", True):  # of timm's vision transformers
        height, width = model.patch_embed.img_size
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, height, width, generator=generator).to(network.device, network.dtype)
    shape = (*network.grid(height, width), network.width)
    first, second, result = (MemoryArray(shape, network.dtype, network.device) for _ in range(3))
    side = -(-max(shape[:2]) // 2)
    sweeps = Sweeps(network, (height, width), lambda t: image[:, :, *t.slices], side, (first, second), result)
    prefix, _ = sweeps.run()
    tiled = torch.cat([prefix, result.values.flatten(0, 1)[None]], dim=1).double()
    with on_grid(model, shape[:2]):
        at_once = model.forward_features(image).double()
    error = ((tiled - at_once).norm() / at_once.norm()).item()
    if not error <= LARGEST_ERROR[network.dtype]:
        raise ValueError(
            f"{type(model).__name__} gives other features tile by tile than at once (relative difference {error:.1e} "
            f"on an image of {height} x {width} pixels): a part of it depends on several tokens, or is unstable"
        )


def _place(sweeps: Sweeps, done: int) -> str:
    """The tile that is under way after so many tiles of all sweeps."""
    sweep, tile = divmod(done, len(sweeps.tiles))
    part = f"block {sweep} of {sweeps.last}" if sweep else "embedding"
    return f"{part}, tile {tile + 1} of {len(sweeps.tiles)}"


def _reader(source: Source, how: Preprocessing, device: torch.device) -> Callable[[Tile], Tensor]:
    """A function: a rectangle in pixels -> its normalized pixels [1, 3, height, width]."""
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (how.mean, how.std))
    white = torch.tensor(255.0, device=device)  # a tensor, because CUDA multiplies by the reciprocal of a number

    def read(tile: Tile) -> Tensor:
        pixels = np.require(source.read(tile), requirements="W")  # a copy of what torch must not write to
        image = torch.from_numpy(pixels).to(device).permute(2, 0, 1)[None].float()
        return (image / white - mean) / std

    return read


def _token_arrays(
    kind: str, work: WorkFolder, shape: Shape, network: Network, stack: ExitStack
) -> tuple[TileArray, TileArray]:
    """The two arrays of the tokens between the blocks."""
    if kind != "disk":
        device = network.device if kind == "device" else "cpu"
        return MemoryArray(shape, network.dtype, device), MemoryArray(shape, network.dtype, device)
    first, second = (FileArray(work.path / f"tokens-{i}", shape, network.dtype) for i in range(2))
    stack.callback(first.close)
    stack.callback(second.close)
    return first, second


def _feature_array(
    work: WorkFolder, shape: Shape, dtype: torch.dtype, side: int, kind: str, network: Network, stack: ExitStack
) -> TileArray:
    """Where the features go until they are whole."""
    if work.target is None:
        return MemoryArray(shape, dtype, network.device if kind == "device" else "cpu")
    path = work.path / work.target.name
    if work.target.suffix == NPY:
        array = npy_array(path, shape, dtype)
        stack.callback(array.close)
        return array
    about = {"model": type(network.model).__name__, "patch": network.patch}
    return ZarrArray(path, shape, dtype, CHUNK if side % CHUNK == 0 else side, about)


def peak_memory() -> int:
    """The most memory in bytes that this process has had resident."""
    with suppress(OSError, StopIteration):  # not getrusage, which counts the process that started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
