"""k-NN at the size of ImageNet: time and memory of the search and the vote, the bank in memory and in a file.

The features are synthetic, clusters in half precision: neither the time nor the memory depends on what they are of.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn.probe.knn import nearest, vote_accuracy
from sima_attn.report.rows import processor_name, today
from sima_attn.report.tables import TextTable

CLASSES, NOISE = 1000, 1.5  # deviation of a feature about the centre of its class, whose own is 1
TEMPERATURE = 0.07
CHECKED, LEAST_RECALL = 32, 0.99  # queries that an exact search is made for; neighbours it must have in common


class Size(NamedTuple):
    """Images in the bank, their channels, and images to classify."""

    bank: int
    dim: int
    queries: int


SIZES = {"cuda": Size(1_281_167, 384, 50_000), "cpu": Size(20_000, 64, 1_000)}


@dataclass(frozen=True)
class KnnSpeedRow:
    """One search with its vote. `source` is where the bank is: "memory", or "file", read from disk in blocks.

    `recall` is the share of neighbours that a search in double precision finds too. `peak_device_mib` is 0 on the
    CPU; `peak_host_mib` is memory of the process beyond what it had before, without pages of the file, and nan where
    the system does not tell.
    """

    source: str
    bank: int
    dim: int
    queries: int
    k: int
    bank_block: int
    query_block: int
    seconds: float
    images_per_second: float
    peak_device_mib: float
    peak_host_mib: float
    top1: float
    recall: float
    device: str
    torch: str
    date: str


def bench_knn(
    size: Size,
    *,
    device: str,
    k: int = 20,
    bank_block: int = 65536,
    query_block: int = 4096,
    folder: Path | None = None,
    on_step: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[KnnSpeedRow]:
    """A row with the bank in memory and one with it in a file; an error where the search misses neighbours.

    Args:
        folder: Where the bank is written for the time of the benchmark; by default where the system has such files.
    """
    if min(size) < 1 or not 1 <= k <= size.bank:
        raise ValueError(f"bank, dim and queries must be at least 1 and k at most the bank, got {size} and k={k}")
    generator = torch.Generator(device).manual_seed(0)
    centres = torch.randn(CLASSES, size.dim, device=device, generator=generator)
    labels, queries = draw(centres, size.queries, generator)
    rows = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="sima-knn-") as temporary:
        path = Path(temporary) / "bank.npy"
        bank_labels = write_bank(path, centres, size.bank, bank_block, generator, named(on_step, "making the bank"))
        exact = exact_neighbours(queries[:CHECKED], np.load(path, mmap_mode="r"), k, device, bank_block)
        nearest(queries[:1], np.load(path, mmap_mode="r")[:k], k, device=device)  # loads what a first call loads
        for source in ("file", "memory"):
            _forget(path)
            step = named(on_step, f"bank in {'a file' if source == 'file' else 'memory'}")
            with peak_memory(device) as peak:
                bank = np.load(path, mmap_mode="r" if source == "file" else None)
                start = time.perf_counter()
                cosines, indices = nearest(
                    queries, bank, k, device=device, query_block=query_block, bank_block=bank_block, on_step=step
                )
                voted = vote_accuracy(
                    cosines,
                    bank_labels[indices],
                    labels,
                    classes=CLASSES,
                    k=[k],
                    temperature=TEMPERATURE,
                    bank=size.bank,
                )[0]
                seconds = time.perf_counter() - start
            recall = common_share(indices[:CHECKED], exact)
            if recall < LEAST_RECALL:
                raise ValueError(
                    f"the search found {recall:.1%} of the exact neighbours of {len(exact)} images, {LEAST_RECALL:.0%} "
                    "are needed: it is wrong on this device, and so would be its time"
                )
            rows.append(
                KnnSpeedRow(
                    source=source,
                    bank=size.bank,
                    dim=size.dim,
                    queries=size.queries,
                    k=k,
                    bank_block=bank_block,
                    query_block=query_block,
                    seconds=round(seconds, 6),
                    images_per_second=round(size.queries / seconds, 1),
                    peak_device_mib=round(peak.device, 1),
                    peak_host_mib=round(peak.host, 1),
                    top1=round(voted.top1, 2),
                    recall=round(recall, 4),
                    device=processor_name(device),
                    torch=torch.__version__,
                    date=today(),
                )
            )
    return rows


def named(on_step: Callable[[str, int, int], None], what: str) -> Callable[[int, int], None]:
    """`on_step` under a name."""
    return lambda done, total: on_step(what, done, total)


def draw(centres: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, np.ndarray]:
    """Labels [n] and features [n, D] in half precision: the centre of the class and noise."""
    labels = torch.randint(len(centres), (count,), device=centres.device, generator=generator)
    noise = torch.randn(count, centres.shape[1], device=centres.device, generator=generator)
    return labels.cpu(), (centres[labels] + NOISE * noise).half().cpu().numpy()


def write_bank(
    path: Path,
    centres: Tensor,
    count: int,
    block: int,
    generator: torch.Generator,
    on_step: Callable[[int, int], None],
) -> Tensor:
    """Features [m, D] in a file, written block by block; their labels [m] come back."""
    values = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(count, centres.shape[1]))
    labels = []
    for start in range(0, count, block):
        some, features = draw(centres, min(block, count - start), generator)
        values[start : start + len(features)] = features
        labels.append(some)
        on_step(start + len(features), count)
    values.flush()
    return torch.cat(labels)


def exact_neighbours(queries: np.ndarray, bank: np.ndarray, k: int, device: str, block: int) -> Tensor:
    """Indices [n, k] of the nearest by cosines in double precision, all of them side by side."""
    unit = F.normalize(torch.from_numpy(queries).to(device).double(), dim=1)
    parts = [
        unit @ F.normalize(torch.from_numpy(np.array(bank[start : start + block])).to(device).double(), dim=1).mT
        for start in range(0, len(bank), block)
    ]
    return torch.cat(parts, dim=1).topk(k, dim=1).indices.cpu()


def common_share(found: Tensor, exact: Tensor) -> float:
    """Share of the exact neighbours [n, k] that are among the found ones, in any order."""
    return (found[:, :, None] == exact[:, None, :]).any(1).float().mean().item()


def _forget(path: Path) -> None:
    """Let the system drop the pages of a file that it keeps in memory, so that they are read from disk again."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass
class Peak:
    """MiB beyond what there was before."""

    device: float = 0.0
    host: float = math.nan


@contextmanager
def peak_memory(device: str, every: float = 0.01) -> Iterator[Peak]:
    """The most memory that the block needs, filled in when it ends; a thread looks at the host's every `every` s."""
    peak, before, ended = Peak(), _anonymous_mib(), threading.Event()
    most = [before]

    def look() -> None:
        while not ended.wait(every):
            most.append(max(most.pop(), _anonymous_mib()))

    watcher = threading.Thread(target=look, daemon=True)
    on_gpu = device == "cuda"
    allocated = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
        peak.host = max(most[0], _anonymous_mib()) - before
        peak.device = (torch.cuda.max_memory_allocated() - allocated) / 2**20 if on_gpu else 0.0


def _anonymous_mib() -> float:
    """Memory of this process that no file stands behind."""
    try:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return math.nan


def knn_speed_table(rows: list[KnnSpeedRow]) -> TextTable:
    """Time and memory with the bank in a file and in memory."""
    header = ["bank in", "bank", "dim", "images", "seconds", "images/s", "device MiB", "host MiB", "recall"]
    lines = [
        [
            row.source,
            f"{row.bank:,}",
            str(row.dim),
            f"{row.queries:,}",
            f"{row.seconds:.2f}",
            f"{row.images_per_second:,.0f}",
            f"{row.peak_device_mib:,.0f}",
            f"{row.peak_host_mib:,.0f}",
            f"{row.recall:.4f}",
        ]
        for row in rows
    ]
    return TextTable(header, lines, bold=set())
