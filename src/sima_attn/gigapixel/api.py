"""`features`: an image of any size -> the final tokens of a model, on disk.

While it runs, a folder `OUT.work` beside the output holds the tokens, the features so far and a record of the progress.
The output appears when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sima_attn._errors import check_installed
from sima_attn._files import DiskFullError, atomic_write, disk_full_reason, lock
from sima_attn._version import __version__
from sima_attn.gigapixel.network import Network, network_of
from sima_attn.gigapixel.sources import AnySource, open_source
from sima_attn.gigapixel.stores import FileArray, MemoryArray, TileArray, ZarrArray, choose_store, npy_array
from sima_attn.gigapixel.sweeps import Progress, Sweeps
from sima_attn.gigapixel.tiles import Tile
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.nn.token_ref import trained_at

DTYPES = ("float32", "float16")
SUFFIXES = (".zarr", ".npy")
SIDE = {"cpu": 64, "cuda": 256}  # of a tile in tokens: 25 MB of a DeiT-S's hidden layer, and 200 MB in bf16
CHUNK = 64  # side of a chunk of zarr in tokens
CHECKED_SIDE = 3  # tokens, of the image that is compared with the model run at once
LARGEST_ERROR = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}

OnStep = Callable[[str, int, int], object]  # (what is done, steps done, all steps)


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
        store: Where the tokens were: "disk", "memory" or "device".
        store_bytes: Of the tokens there.
        sweeps: How often all tiles were read.
        resumed_at: Tiles that an interrupted run had done, of all sweeps together.
        tiles: Of all sweeps together.
        seconds: Of this run, the decoding of the image included.
        pictures: Files that were written beside.
    """

    path: Path | None
    features: Tensor | None
    shape: tuple[int, int, int]
    prefix: Tensor
    logits: Tensor | None
    height: int
    width: int
    store: str
    store_bytes: int
    sweeps: int
    resumed_at: int
    tiles: int
    seconds: float
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
    """The final tokens of a SimA ViT or XCiT for an image of any size: those of the model run at once.

    Memory is bounded by the tile. The same call goes on with an interrupted run, where its tokens are on disk.

    Args:
        model: A SimA model of the DeiT or XCiT family, or a converted model of timm; on its device, in its dtype.
        image: A file (TIFF, .npy, or what Pillow reads), a folder of zarr, or an array [height, width, 3].
        out: FILE.zarr or FILE.npy for the features [rows, columns, C]. Without it they are returned.
        preprocessing: Its mean and std are used; by default those of the model's timm configuration.
        dtype: Of the features: "float32" or "float16".
        tile: Side of a tile in tokens. Memory grows with its square.
        store: Where the tokens are between the blocks: "disk", "memory", "device" (that of the model), or "auto": the
            accelerator if they fit into half of its free memory, else disk.
        token_ref: "train" multiplies each attention by N / N of the training size, see `sima_attention`; None leaves
            the model as it is.
        pictures: A folder for the heat maps of q and k in the last attention and the features as colours.
        on_step: Called with what is done, the steps done and all steps.

    Raises:
        ValueError: The image cannot be read, or the model cannot run tile by tile.
        DiskFullError: The disk is full. What was computed is kept for the next call.
    """
    began = time.monotonic()
    target = None if out is None else Path(out)
    _check_options(target, dtype, tile, token_ref)
    model = getattr(model, "_orig_mod", model)
    how = preprocessing or Preprocessing.of_model(model)
    if how is None:
        raise ValueError(f"{type(model).__name__} has no timm configuration: give preprocessing, for mean and std")
    network = network_of(model)
    side = tile or SIDE.get(network.device.type, SIDE["cpu"])
    scaled = trained_at(model, how.size) if token_ref else nullcontext()
    with torch.inference_mode(), eval_mode(model), scaled, _work_folder(target) as work, ExitStack() as stack:
        check_network(network_of(model))
        network = network_of(model)  # its sums have the token_ref of now
        identity = _identity(model, image, how, dtype, side)
        saved = _saved_progress(work, identity)

        def on_band(done: int, total: int) -> None:
            on_step("decoding the image", done, total)

        source = stack.enter_context(open_source(image, work, on_band))
        grid = network.grid(*source.size)
        shape = (*grid, network.width)
        needed = 2 * grid[0] * grid[1] * network.width * network.dtype.itemsize
        kind = choose_store(store, needed, network.device, work)
        arrays = _arrays(kind, work, shape, network, stack)
        result = _output(target, work, shape, getattr(torch, dtype), side, identity, stack, arrays)

        def save(progress: Progress) -> None:
            if kind == "disk" and target is not None:
                with atomic_write(work / "progress.pt") as temporary:
                    torch.save({"identity": identity, **progress.to_dict()}, temporary)

        sweeps = Sweeps(network, source.size, _reader(source, how, network.device), side, arrays, result, save)
        if saved is not None and kind == "disk":
            sweeps.progress.update(saved, sweeps)
        count = len(sweeps.tiles)
        start = sweeps.progress.sweep * count + sweeps.progress.tile

        def on_tile(done: int, total: int) -> None:
            sweep, place = divmod(min(done, total - 1), count)
            on_step(f"block {sweep} of {sweeps.last}, tile {place + 1} of {count}", done, total)

        prefix, mean = sweeps.run(on_tile)
        written: list[Path] = []
        if pictures is not None:
            from sima_attn.gigapixel.pictures import write_pictures

            name = Path(image).stem if isinstance(image, str | Path) else "image"
            written = write_pictures(
                Path(pictures), name, source, sweeps, side, lambda done, total: on_step("pictures", done, total)
            )
        done = FeatureGrid(
            path=target,
            features=result.values if isinstance(result, MemoryArray) else None,
            shape=shape,
            prefix=prefix[0].clone(),
            logits=network.logits(prefix, mean),
            height=source.size[0],
            width=source.size[1],
            store=kind,
            store_bytes=needed,
            sweeps=sweeps.last + 1,
            resumed_at=start,
            tiles=(sweeps.last + 1) * count,
            seconds=0.0,
            pictures=tuple(written),
        )
        if target is not None:
            _put_in_place(work / target.name, target, work)
    return replace(done, seconds=time.monotonic() - began)


def _check_options(target: Path | None, dtype: str, tile: int | None, token_ref: str | None) -> None:
    if target is not None and target.suffix not in SUFFIXES:
        raise ValueError(f"the features go to a {' or '.join(SUFFIXES)} file, got {target}")
    if target is not None and target.suffix == ".zarr":
        check_installed("a zarr array", "zarr", extra="gigapixel")
        if target.exists() and not (target / "zarr.json").is_file():
            raise ValueError(f"{target} exists and is no zarr array; use another name")
    if target is not None and target.suffix == ".npy" and target.is_dir():
        raise ValueError(f"{target} is a folder; give the name of a file")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
    if tile is not None and tile < 1:
        raise ValueError(f"tile must be 1 token or more, got {tile}")
    if token_ref not in (None, "train"):
        raise ValueError(f"token_ref must be None or 'train', got {token_ref!r}")


def check_network(network: Network) -> None:
    """Raise unless the tiles of a small image give what the model gives for all of it: any part may be foreign."""
    model: Any = network.model
    height = width = CHECKED_SIDE * network.patch
    embedding = model.patch_embed
    if not getattr(model, "dynamic_img_size", True) and embedding.img_size is not None:
        height, width = embedding.img_size
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, height, width, generator=generator).to(network.device, network.dtype)
    shape = (*network.grid(height, width), network.width)
    arrays = [MemoryArray(shape, network.dtype, network.device) for _ in range(3)]
    side = -(-max(shape[:2]) // 2)
    sweeps = Sweeps(
        network, (height, width), lambda tile: image[:, :, *tile.slices], side, (arrays[0], arrays[1]), arrays[2]
    )
    prefix, _ = sweeps.run()
    tiled = torch.cat([prefix, arrays[2].values.flatten(0, 1)[None]], dim=1).double()
    at_once = model.forward_features(image).double()
    same = tiled.shape == at_once.shape
    error = ((tiled - at_once).norm() / at_once.norm()).item() if same else float("nan")
    if not error <= LARGEST_ERROR[network.dtype]:
        raise ValueError(
            f"{type(model).__name__} gives other features tile by tile than at once (relative difference {error:.1e} "
            f"on an image of {height} x {width} pixels): a part of it depends on several tokens, or is unstable"
        )


def _reader(source: AnySource, how: Preprocessing, device: torch.device) -> Callable[[Tile], Tensor]:
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (how.mean, how.std))
    white = torch.tensor(255.0, device=device)  # a tensor, because CUDA multiplies by the reciprocal of a number

    def read(tile: Tile) -> Tensor:
        pixels = torch.from_numpy(np.array(source.read(tile))).to(device).permute(2, 0, 1)[None]
        return (pixels.float() / white - mean) / std

    return read


def _arrays(
    kind: str, work: Path, shape: tuple[int, int, int], network: Network, stack: ExitStack
) -> tuple[TileArray, TileArray]:
    """The two arrays of the tokens."""
    if kind != "disk":
        device = network.device if kind == "device" else "cpu"
        return MemoryArray(shape, network.dtype, device), MemoryArray(shape, network.dtype, device)
    first, second = (FileArray(work / f"tokens-{i}", shape, network.dtype) for i in range(2))
    stack.callback(first.close)
    stack.callback(second.close)
    return first, second


def _output(
    target: Path | None,
    work: Path,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    side: int,
    identity: dict[str, Any],
    stack: ExitStack,
    arrays: tuple[TileArray, TileArray],
) -> TileArray:
    """Where the features go until they are whole."""
    if target is None:
        first = arrays[0]
        return MemoryArray(shape, dtype, first.values.device if isinstance(first, MemoryArray) else "cpu")
    if target.suffix == ".npy":
        array = npy_array(work / target.name, shape, dtype)
        stack.callback(array.close)
        return array
    chunk = CHUNK if side % CHUNK == 0 else side
    return ZarrArray(work / target.name, shape, dtype, chunk, {"sima_attn": __version__, **identity})


@contextmanager
def _work_folder(target: Path | None) -> Iterator[Path]:
    """The folder of a run, locked; removed when the run is done, kept when it is interrupted."""
    if target is None:
        with tempfile.TemporaryDirectory(prefix="sima-features-") as folder:
            yield Path(folder)
        return
    work = target.with_name(f"{target.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    handle = os.open(work / "lock", os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        if not lock(handle, wait=False):
            raise ValueError(f"another process writes {target}; wait for it, or use another name")
        yield work
        shutil.rmtree(work)
    except Exception as error:
        reason = disk_full_reason(error)
        if not (work / "progress.pt").exists():
            shutil.rmtree(work)
        if reason is None or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(
            f"{target} cannot be written: {reason}; free some space and run the same command again, which goes on "
            f"with what is in {work}"
        ) from error
    finally:
        os.close(handle)


def _saved_progress(work: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The record of an interrupted run with the same model, image and options; whatever else is there is removed."""
    file = work / "progress.pt"
    if file.exists():
        saved = torch.load(file, weights_only=True)
        if saved["identity"] == identity:
            return saved
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
    return None


def _identity(model: nn.Module, image: Any, how: Preprocessing, dtype: str, side: int) -> dict[str, Any]:
    """What two runs must have in common for one to go on with the other."""
    weights = hashlib.sha256(repr(model).encode())
    for name, tensor in model.state_dict().items():
        weights.update(name.encode())
        weights.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return {
        "model": type(model).__name__,
        "weights": weights.hexdigest(),
        "image": _image_identity(image),
        "preprocessing": how.to_json(),
        "dtype": dtype,
        "tile": side,
        # The pages of a file that the system had not yet written are lost when the machine stops, not with a process.
        "started": _boot_id(),
    }


def _image_identity(image: Any) -> str:
    if isinstance(image, np.ndarray):
        return str(uuid.uuid4())  # an array has no name by which another process could know it
    path = Path(image)
    if not path.exists():
        return str(path)
    about = path.stat()
    return json.dumps([str(path.resolve()), about.st_size, about.st_mtime_ns])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _put_in_place(made: Path, target: Path, work: Path) -> None:
    """Rename what was made; an earlier zarr array of that name is removed."""
    if target.is_dir():
        target.rename(work / "before")
    made.rename(target)
