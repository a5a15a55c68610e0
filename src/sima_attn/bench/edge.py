"""Whole models as ONNX files on this processor: each twin against SimA, in all runtimes, in float32 and int8.

Images are random, and so are weights that do not come with the package: neither time nor memory depends on them. For
accuracy see `sima quantize`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sima_attn._errors import check_known
from sima_attn._files import atomic_write
from sima_attn.auditing.model import audit
from sima_attn.export import runtimes
from sima_attn.export.runtimes import Session, open_model
from sima_attn.report.rows import provenance_columns
from sima_attn.report.tables import TextTable
from sima_attn.report.timing import time_interleaved

FP32, INT8 = "fp32", "int8"
LARGEST_ERROR = 1e-3  # between runtimes in float32, relative to the largest logit
CALIBRATION_IMAGES = 4  # random: the ranges affect accuracy, not speed


class Variant(NamedTuple):
    """A model of a family: its name in rows and files, and its timm name and options."""

    called: str
    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A model and its SimA twins, with GELU and with ReLU."""

    twin: str  # name of the model that they are compared with
    attention: str  # of the twin
    sima: str  # name of the model with SimA; the one with ReLU has the suffix `_relu`
    patch: int = 16
    sizes: tuple[int, ...] = (224, 512)
    takes_img_size: bool = False
    twin_options: dict[str, Any] = field(default_factory=dict)  # if the name of the twin is not enough
    weights: bool = False  # those of the ReLU model come with the package

    @property
    def variants(self) -> dict[str, Variant]:
        """Variant -> model."""
        relu = f"{self.sima}_relu"
        twin = f"{self.twin}_{self.attention}" if self.twin == self.sima else self.twin
        return {
            self.attention: Variant(twin, self.twin, self.twin_options),
            "sima": Variant(self.sima, self.sima, {}),
            "sima + relu": Variant(relu, relu, {"pretrained": True} if self.weights else {}),
        }

    def goal(self, variant: str, precision: str, pixels: int) -> float:
        """Target of the speedup over the float32 twin, 0 for none."""
        if variant == self.attention:
            return 0.0
        if precision == INT8:
            has_goal = self.attention == "softmax" and variant == "sima + relu" and pixels == 224
            return 2.5 if has_goal else 0.0
        if self.attention != "softmax":
            return 1.0
        many_tokens = pixels >= 32 * self.patch
        return 1.4 if many_tokens else 1.08 if variant == "sima + relu" else 1.05


FAMILIES = {
    "xcit_mini": Family(
        "sima_xcit_mini_p4_64",
        "softmax",
        "sima_xcit_mini_p4_64",
        patch=4,
        sizes=(64, 128),  # as many tokens as the others at 256 and 512 px
        twin_options={"attention": "softmax"},
        weights=True,
    ),
    "deit_tiny": Family("deit_tiny_patch16_224", "softmax", "sima_deit_tiny_patch16_224", takes_img_size=True),
    "deit_small": Family("deit_small_patch16_224", "softmax", "sima_deit_small_patch16_224", takes_img_size=True),
    "xcit_tiny": Family("xcit_tiny_12_p16_224", "xca", "sima_xcit_tiny_12_p16_224"),
}


@dataclass(frozen=True)
class EdgeRow:
    """One file in one runtime, one image at a time.

    `speedup` is relative to the float32 twin in the same runtime, `speedup_same_precision` to the twin in the same
    precision. `error` is the largest difference from ONNX Runtime in float32, relative to the largest logit; in int8,
    with random weights, it means little. `peak_mib` is measured with one thread. `load` is the load average of the
    machine when the measurement began.
    """

    family: str
    model: str
    variant: str
    precision: str
    runtime: str
    runtime_version: str
    pixels: int
    threads: int
    speedup: float
    speedup_same_precision: float
    goal: float
    p20_ms: float
    p50_ms: float
    p80_ms: float
    samples: int
    peak_mib: float
    file_mib: float
    exp_like_nodes: int
    error: float
    load: float
    device: str
    date: str


class _Form(NamedTuple):
    variant: str
    precision: str
    runtime: str


def bench_edge(
    folder: Path,
    *,
    families: Sequence[str] = tuple(FAMILIES),
    sizes: Sequence[int] | None = None,
    threads: Sequence[int] = (1, 2),
    precisions: Sequence[str] = (FP32, INT8),
    wanted_runtimes: Sequence[str] | None = None,
    seconds: float = 20.0,
    on_step: Callable[[str], object] = lambda what: None,
    **model_options,
) -> Generator[list[EdgeRow]]:
    """The rows of each family, size and thread count: files are exported, compared, then timed in turns.

    Files that are in `folder` are reused. By default a family is measured at its own sizes, in all runtimes that are
    installed. `on_step` is called with a description before each part, and `model_options` are passed to timm.
    """
    for precision in precisions:
        check_known("precision", precision, (FP32, INT8))
    chosen = list(wanted_runtimes or runtimes.installed_runtimes())
    for runtime in chosen:
        runtimes.check_runtime(runtime)
    for name in families:
        check_known("family", name, FAMILIES)
        if sizes and min(sizes) < FAMILIES[name].patch:
            raise ValueError(f"{name} takes images of {FAMILIES[name].patch} px or more, got {min(sizes)} px")
    if FP32 not in precisions:
        precisions = (FP32, *precisions)  # the baseline
    for name in families:
        for pixels in sizes or FAMILIES[name].sizes:
            files = _make_files(folder, name, pixels, precisions, on_step, model_options)
            on_step(f"memory of {name}, {pixels} px")
            peaks = {(path, runtime): peak_mib(path, runtime) for path in files.values() for runtime in chosen}
            for count in threads:
                on_step(f"{name}, {pixels} px, {count} thread{'s' * (count > 1)}")
                yield _bench_group(name, pixels, count, files, peaks, chosen, seconds)


def is_busy() -> bool:
    """Whether other processes would affect the measurement."""
    return os.getloadavg()[0] > 0.5


def _make_files(
    folder: Path,
    family: str,
    pixels: int,
    precisions: Sequence[str],
    on_step: Callable[[str], object],
    model_options: dict,
) -> dict[tuple[str, str], Path]:
    """(variant, precision) -> file."""
    import onnx
    import timm
    import torch

    from sima_attn.export.int8_graph import quantized_graph
    from sima_attn.export.onnx import export_onnx

    files = {}
    for variant, (called, name, own_options) in FAMILIES[family].variants.items():
        fp32 = folder / f"{called}_{pixels}px.onnx"
        if not fp32.exists():
            on_step(f"exporting {called}, {pixels} px")
            torch.manual_seed(0)
            size: dict[str, Any] = {"img_size": pixels} if FAMILIES[family].takes_img_size else {}
            model = timm.create_model(name, **{**own_options, **size, **model_options})
            export_onnx(model, fp32, input_size=pixels, name=called)
        files[variant, FP32] = fp32
        if INT8 in precisions:
            int8 = fp32.with_suffix(".int8.onnx")
            if not int8.exists():
                on_step(f"quantizing {called}, {pixels} px")
                batches = (_images(pixels, seed) for seed in range(CALIBRATION_IMAGES))
                with atomic_write(int8) as temporary:
                    onnx.save(quantized_graph(fp32, batches), temporary)
            files[variant, INT8] = int8
    return files


def _images(pixels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 3, pixels, pixels), dtype=np.float32)


def _bench_group(
    family: str,
    pixels: int,
    threads: int,
    files: dict[tuple[str, str], Path],
    peaks: dict[tuple[Path, str], float],
    wanted_runtimes: Sequence[str],
    seconds: float,
) -> list[EdgeRow]:
    load = os.getloadavg()[0]
    images = _images(pixels)
    sessions: dict[_Form, Session] = {
        _Form(variant, precision, runtime): open_model(path, runtime, threads)
        for (variant, precision), path in files.items()
        for runtime in wanted_runtimes
    }
    errors = _check(sessions, files, images)
    timings = time_interleaved(
        {str(form): (lambda session=session: session(images)) for form, session in sessions.items()},  # type: ignore[misc]
        seconds=seconds,
        sample_seconds=0.0,  # one call of a model is long enough
        least_samples=3,
    )
    found = FAMILIES[family]
    exps = {path: len(audit(path).calls) for path in files.values()}
    machine = provenance_columns("cpu")
    del machine["torch"]  # the files run without it
    rows = []
    for form in sessions:
        path, timing = files[form.variant, form.precision], timings[str(form)]
        twin, same = (timings[str(_Form(found.attention, p, form.runtime))].p50 for p in (FP32, form.precision))
        rows.append(
            EdgeRow(
                family=family,
                model=found.variants[form.variant].called,
                variant=form.variant,
                precision=form.precision,
                runtime=form.runtime,
                runtime_version=version(form.runtime),
                pixels=pixels,
                threads=threads,
                speedup=round(twin / timing.p50, 3),
                speedup_same_precision=round(same / timing.p50, 3),
                goal=found.goal(form.variant, form.precision, pixels),
                **timing.columns("ms", 3),
                peak_mib=round(peaks[path, form.runtime], 1),
                file_mib=round(path.stat().st_size / 2**20, 2),
                exp_like_nodes=exps[path],
                error=float(f"{errors[form]:.2e}"),
                load=round(load, 2),
                **machine,
            )
        )
    return rows


def _check(
    sessions: dict[_Form, Session], files: dict[tuple[str, str], Path], images: np.ndarray
) -> dict[_Form, float]:
    """Errors against ONNX Runtime in float32; raises if another runtime disagrees in float32."""
    truths = {variant: open_model(path)(images) for (variant, precision), path in files.items() if precision == FP32}
    errors = {}
    for form, session in sessions.items():
        truth = truths[form.variant]
        error = float(np.abs(session(images) - truth).max() / np.abs(truth).max())
        if form.precision == FP32 and not error <= LARGEST_ERROR:
            raise RuntimeError(f"{form.variant} in {form.runtime} is off by {error:.1e} from ONNX Runtime")
        errors[form] = error
    return errors


# Run in a process without torch, whose memory would hide that of a small model.
_PEAK = """
import pathlib, resource, runpy, sys
import numpy as np
def peak():
    # On Linux ru_maxrss is inherited from the parent process; VmHWM is that of this process alone, in KiB.
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
runtimes_file, path, runtime = sys.argv[1:]
open_model = runpy.run_path(runtimes_file)["open_model"]
if runtime == "openvino":
    import onnx, openvino
else:
    import onnxruntime
before = peak()
session = open_model(path, runtime, threads=1)
images = np.zeros(session.input_shape, dtype=np.float32)
for _ in range(2):
    session(images)
print(peak() - before)
"""


def peak_mib(path: Path, runtime: str) -> float:
    """Peak memory that loading and running a file adds to a process with only the runtime."""
    arguments = [runtimes.__file__, str(path), runtime]
    done = subprocess.run([sys.executable, "-c", _PEAK, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the memory of {path.name} in {runtime} could not be measured:\n{done.stderr[-500:]}")
    return int(done.stdout) / 2**20


def edge_table(rows: Sequence[EdgeRow], threads: int) -> TextTable:
    """Milliseconds, speed relative to the twin, memory and size of each file, for one number of threads."""
    header = ["model", "px", "runtime", "type", "ms", "speed", "goal", "same type", "peak MiB", "MiB", "exp"]
    lines = []
    mine = [row for row in rows if row.threads == threads]
    for row in mine:
        what = [f"{row.family} {row.variant}", str(row.pixels), row.runtime, row.precision]
        goal = f"{row.goal:.2f}x" if row.goal else "-"
        speed = [f"{row.p50_ms:.2f}", f"{row.speedup:.2f}x", goal, f"{row.speedup_same_precision:.2f}x"]
        lines.append([*what, *speed, f"{row.peak_mib:.0f}", f"{row.file_mib:.1f}", str(row.exp_like_nodes)])
    return TextTable(header, lines, bold={i for i, row in enumerate(mine) if row.variant.startswith("sima")})


def edge_summary(rows: Sequence[EdgeRow]) -> TextTable:
    """Speed relative to the float32 baseline, one line per model, size, runtime and number of threads."""
    found: dict[tuple[str, int, str, int], dict[tuple[str, str], EdgeRow]] = {}
    for row in rows:
        kind = row.variant if row.variant.startswith("sima") else "baseline"
        found.setdefault((row.family, row.pixels, row.runtime, row.threads), {})[kind, row.precision] = row
    columns = {
        "SimA": ("sima", FP32),
        "SimA + ReLU": ("sima + relu", FP32),
        "baseline, int8": ("baseline", INT8),
        "SimA, int8": ("sima", INT8),
        "SimA + ReLU, int8": ("sima + relu", INT8),
    }
    lines = []
    for (family, pixels, runtime, threads), mine in found.items():
        baseline = mine["baseline", FP32]
        speeds = [f"{mine[key].speedup:.2f}x" if key in mine else "-" for key in columns.values()]
        what = [f"{family}, {baseline.variant}", str(pixels), runtime, str(threads)]
        lines.append([*what, f"{baseline.p50_ms:.1f}", *speeds])
    return TextTable(["model, its baseline", "px", "runtime", "threads", "baseline, ms", *columns], lines)
