"""Weak scaling of models split over the processes of one machine: twice the processes, images with twice the rows.

    torchrun --nproc-per-node=2 benchmarks/weak_scaling.py --out weak_scaling.csv

Logits and gradients are compared with those of one process first. Then the first process alone, with its share of the
rows, and all processes with the whole images take turns, one training step each, so that what else the machine does
slows down both. Processes talk over gloo on the loopback interface.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import sima_attn  # registers the models  # noqa: F401
from sima_attn import parallelize
from sima_attn.report.figures import check_can_plot, figure
from sima_attn.report.rows import cpu_name, read_rows, today, write_rows
from sima_attn.report.tables import TextTable

MODELS = ("sima_deit_tiny_patch16_224", "sima_xcit_tiny_12_p16_224")
BATCH = 2  # with one image, torch's BatchNorm has wrong gradients on the CPU where they arrive channels last
MAX_ERROR = 1e-6  # relative, of gradients in float64; timm resamples position embeddings in float32


@dataclass(frozen=True)
class WeakScalingRow:
    """Training steps of two images on some processes with one thread each.

    `cpu_seconds` is what the first process computed in a step, with the threads of gloo and without waiting: it depends
    less on `load`, the load average of the machine. `error` is that of the gradients.
    """

    model: str
    processes: int
    height: int
    width: int
    p20_seconds: float
    p50_seconds: float
    p80_seconds: float
    cpu_seconds: float
    steps: int
    efficiency: float  # time of one process with its share / time of all with the whole
    cpu_efficiency: float  # the same for cpu_seconds
    error: float
    cores: int
    load: float
    network: str
    device: str
    torch: str
    date: str


def bench_model(name: str, height: int, width: int, steps: int) -> list[WeakScalingRow]:
    """A row for one process, and one for all; every process of the group calls it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = timm.create_model(name)
    images = torch.randn(BATCH, 3, height * world, width)
    mesh = init_device_mesh("cpu", (world,))
    error = gradient_error(alone, parallel(alone.double(), mesh), images.double())
    if error > MAX_ERROR:
        raise RuntimeError(f"the gradients of {name} on {world} processes differ from those of one: {error:.1e}")
    together = parallel(alone.float(), mesh)
    own, everything = list[Times](), list[Times]()
    for _ in range(steps + 1):  # the first step is a warm-up
        if rank == 0:
            own.append(times_of(lambda: step(alone, images[:, :, :height])))
        dist.barrier()
        everything.append(times_of(lambda: step(together, images)))
        dist.barrier()
    if rank != 0:
        return []
    rows = []
    for processes, times in ((1, own[1:]), *([(world, everything[1:])] if world > 1 else [])):
        p20, p50, p80 = (round(quantile([t.wall for t in times], share), 4) for share in (0.2, 0.5, 0.8))
        rows.append(
            WeakScalingRow(
                model=name,
                processes=processes,
                height=height * processes,
                width=width,
                p20_seconds=p20,
                p50_seconds=p50,
                p80_seconds=p80,
                cpu_seconds=round(statistics.median(t.cpu for t in times), 4),
                steps=steps,
                efficiency=median_ratio(own[1:], times, "wall"),
                cpu_efficiency=median_ratio(own[1:], times, "cpu"),
                error=float(f"{error:.1e}"),
                cores=len(os.sched_getaffinity(0)),
                load=round(os.getloadavg()[0], 1),
                network="gloo over loopback",
                device=cpu_name(),
                torch=str(torch.__version__),
                date=today(),
            )
        )
    return rows


def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A copy of the model over the processes, which average their gradients."""
    split = parallelize(copy.deepcopy(model), mesh)
    return DistributedDataParallel(split) if mesh.size() > 1 else split


def step(model: nn.Module, images: Tensor) -> None:
    """Forward and backward pass."""
    model.zero_grad()
    model(images).square().mean().backward()


def gradient_error(alone: nn.Module, together: nn.Module, images: Tensor) -> float:
    """|difference| / |gradient|, over all parameters."""
    step(alone, images)
    step(together, images)
    expected, found = (torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (alone, together))  # type: ignore[union-attr]
    return ((found - expected).norm() / expected.norm()).item()


class Times(NamedTuple):
    """Seconds on the clock, and seconds that the process computed."""

    wall: float
    cpu: float


def times_of(call: Callable[[], None]) -> Times:
    """The times of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def median_ratio(one: list[Times], other: list[Times], which: str) -> float:
    """Median of the wall or CPU times of one list / that of the other."""
    first, second = (statistics.median(getattr(times, which) for times in each) for each in (one, other))
    return round(first / second, 3)


def quantile(times: list[float], share: float) -> float:
    """The time that this share of the calls does not exceed."""
    return sorted(times)[round(share * (len(times) - 1))]


def weak_scaling_table(rows: list[WeakScalingRow]) -> TextTable:
    """Seconds per step, and efficiency against one process."""
    header = ["model", "processes", "image", "p50, s", "CPU, s", "efficiency", "of CPU time", "error of gradients"]
    lines = [
        [
            row.model,
            str(row.processes),
            f"{row.height} x {row.width}",
            f"{row.p50_seconds:.2f}",
            f"{row.cpu_seconds:.2f}",
            f"{row.efficiency:.0%}",
            f"{row.cpu_efficiency:.0%}",
            "-" if row.processes == 1 else f"{row.error:.0e}",
        ]
        for row in rows
    ]
    return TextTable(header, lines)


def plot_weak_scaling(rows: list[WeakScalingRow], path: Path) -> None:
    """Seconds per step by the number of processes; equal bars are perfect weak scaling."""
    names = list(dict.fromkeys(row.model for row in rows))
    with figure(path, figsize=(5, 3)) as (_, axes):
        for offset, processes in enumerate(sorted({row.processes for row in rows})):
            mine = [row for row in rows if row.processes == processes]
            low = [row.p50_seconds - row.p20_seconds for row in mine]
            high = [row.p80_seconds - row.p50_seconds for row in mine]
            places = [names.index(row.model) + 0.4 * offset for row in mine]
            label = f"{processes} process{'es' * (processes > 1)}, {mine[0].height} x {mine[0].width} px"
            heights = [row.p50_seconds for row in mine]
            axes.bar(places, heights, 0.36, yerr=(low, high), capsize=3, label=label)
        axes.set_xticks([i + 0.2 for i in range(len(names))], [name.removesuffix("_224") for name in names], fontsize=8)
        axes.set_ylabel("seconds per training step")
        axes.set_title(f"Rows per process fixed; {rows[0].cores} cores, {rows[0].network}", fontsize=9)
        axes.set_ylim(0, 1.35 * max(row.p80_seconds for row in rows))
        axes.legend(fontsize=8)


def main(arguments: list[str] | None = None) -> None:
    """Measure, write rows and figure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/weak_scaling.csv"), help="CSV file for the rows")
    parser.add_argument("--figure", type=Path, help="PNG file for the figure")
    parser.add_argument("--model", action="append", help=f"repeat for several (default: {', '.join(MODELS)})")
    parser.add_argument("--height", type=int, default=384, help="rows of pixels per process")
    parser.add_argument("--width", type=int, default=384, help="columns of pixels")
    parser.add_argument("--steps", type=int, default=12, help="training steps to time")
    given = parser.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, e.g. torchrun --nproc-per-node=2 benchmarks/weak_scaling.py")
    if given.figure is not None:
        check_can_plot(given.figure)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [row for name in given.model or MODELS for row in bench_model(name, given.height, given.width, given.steps)]
    if dist.get_rank() == 0:
        write_rows(given.out, rows)
        print(f"{rows[0].device}, {rows[0].cores} cores, load {rows[0].load}\n")
        print(f"{weak_scaling_table(rows).markdown()}\n\nRows: {given.out}")
        if given.figure is not None:
            plot_weak_scaling(read_rows(given.out, WeakScalingRow), given.figure)
            print(f"Figure: {given.figure}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
