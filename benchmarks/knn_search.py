"""k-NN search at the size of ImageNet: time and memory of search and vote, with the bank in a file and in memory.

    python benchmarks/knn_search.py --device cuda --out knn_speed.csv

The features are synthetic clusters in half precision: neither time nor memory depends on their values.
"""

import argparse
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn._devices import resolve_device
from sima_attn.probe.knn import nearest, vote_accuracy
from sima_attn.report.rows import provenance_columns, write_rows
from sima_attn.report.tables import TextTable

CLASSES, NOISE = 1000, 1.5  # standard deviation of a feature around its class center; that of the centers is 1
TEMPERATURE = 0.07
CHECKED, MIN_RECALL = 32, 0.99  # queries compared with an exact search; share of its neighbors that must be found


class Size(NamedTuple):
    """Images in the bank, channels per feature, and images to classify."""

    bank: int
    dim: int
    queries: int


SIZES = {"cuda": Size(1_281_167, 384, 50_000), "cpu": Size(20_000, 64, 1_000)}


@dataclass(frozen=True)
class KnnSpeedRow:
    """One search and its vote. `source` is where the bank is: "memory", or "file", read from disk in blocks.

    `recall` is the share of neighbors that a search in double precision finds too. `peak_device_mib` is 0 on the
    CPU. `peak_host_mib` is memory that the search adds to the process, without pages of the file; nan where the system
    does not report it.
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
    size: Size, *, device: str, k: int = 20, bank_block: int = 65536, query_block: int = 4096
) -> list[KnnSpeedRow]:
    """One row with the bank in a file and one with it in memory; an error if the search misses neighbors."""
    generator = torch.Generator(device).manual_seed(0)
    centers = torch.randn(CLASSES, size.dim, device=device, generator=generator)
    labels, queries = sample_features(centers, size.queries, generator)
    rows = []
    with tempfile.TemporaryDirectory(prefix="sima-knn-") as folder:
        path = Path(folder) / "bank.npy"
        bank_labels = write_bank(path, centers, size.bank, bank_block, generator)
        exact = exact_neighbors(queries[:CHECKED], np.load(path, mmap_mode="r"), k, device, bank_block)
        nearest(queries[:1], np.load(path, mmap_mode="r")[:k], k, device=device)  # warm-up
        for source in ("file", "memory"):
            _drop_from_page_cache(path)
            with peak_memory(device) as peak:
                bank = np.load(path, mmap_mode="r" if source == "file" else None)
                start = time.perf_counter()
                cosines, indices = nearest(
                    queries, bank, k, device=device, query_block=query_block, bank_block=bank_block
                )
                votes = {"classes": CLASSES, "k": [k], "temperature": TEMPERATURE, "bank": size.bank}
                voted = vote_accuracy(cosines, bank_labels[indices], labels, **votes)[0]
                seconds = time.perf_counter() - start
            recall = common_share(indices[:CHECKED], exact)
            if recall < MIN_RECALL:
                raise RuntimeError(
                    f"the search found {recall:.1%} of the exact neighbors of {len(exact)} images, but at least "
                    f"{MIN_RECALL:.0%} are required: its result on this device is wrong, so its time is not reported"
                )
            rows.append(
                KnnSpeedRow(
                    source=source,
                    **size._asdict(),
                    k=k,
                    bank_block=bank_block,
                    query_block=query_block,
                    seconds=round(seconds, 6),
                    images_per_second=round(size.queries / seconds, 1),
                    peak_device_mib=round(peak.device, 1),
                    peak_host_mib=round(peak.host, 1),
                    top1=round(voted.top1, 2),
                    recall=round(recall, 4),
                    **provenance_columns(device),
                )
            )
    return rows


def sample_features(centers: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, np.ndarray]:
    """Labels [n] and features [n, D] in half precision: the center of the class plus noise."""
    labels = torch.randint(len(centers), (count,), device=centers.device, generator=generator)
    noise = torch.randn(count, centers.shape[1], device=centers.device, generator=generator)
    return labels.cpu(), (centers[labels] + NOISE * noise).half().cpu().numpy()


def write_bank(path: Path, centers: Tensor, count: int, block: int, generator: torch.Generator) -> Tensor:
    """Write features [m, D] to a file, block by block; returns their labels [m]."""
    values = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(count, centers.shape[1]))
    labels = []
    for start in range(0, count, block):
        some, features = sample_features(centers, min(block, count - start), generator)
        values[start : start + len(features)] = features
        labels.append(some)
    values.flush()
    return torch.cat(labels)


def exact_neighbors(queries: np.ndarray, bank: np.ndarray, k: int, device: str, block: int) -> Tensor:
    """Indices [n, k] of the nearest by cosine in double precision."""
    unit = F.normalize(torch.from_numpy(queries).to(device).double(), dim=1)
    parts = [
        unit @ F.normalize(torch.from_numpy(np.array(bank[start : start + block])).to(device).double(), dim=1).mT
        for start in range(0, len(bank), block)
    ]
    return torch.cat(parts, dim=1).topk(k, dim=1).indices.cpu()


def common_share(found: Tensor, exact: Tensor) -> float:
    """Share of the exact neighbors [n, k] that are among the found ones, in any order."""
    return (found[:, :, None] == exact[:, None, :]).any(1).float().mean().item()


def _drop_from_page_cache(path: Path) -> None:
    """Make the next read of a file come from disk."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass
class Peak:
    """Memory beyond what was there before, in MiB."""

    device: float = 0.0
    host: float = math.nan


@contextmanager
def peak_memory(device: str, interval: float = 0.01) -> Iterator[Peak]:
    """Peak memory of the block, set at its end; a thread samples the host's memory every `interval` seconds."""
    peak, before, ended = Peak(), _anonymous_mib(), threading.Event()
    most = [before]

    def sample() -> None:
        while not ended.wait(interval):
            most.append(max(most.pop(), _anonymous_mib()))

    sampler = threading.Thread(target=sample, daemon=True)
    on_gpu = device == "cuda"
    allocated = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    sampler.start()
    try:
        yield peak
    finally:
        ended.set()
        sampler.join()
        peak.host = max(most[0], _anonymous_mib()) - before
        peak.device = (torch.cuda.max_memory_allocated() - allocated) / 2**20 if on_gpu else 0.0


def _anonymous_mib() -> float:
    """Memory of this process that is not backed by a file."""
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
    return TextTable(header, lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, write rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/knn_speed.csv"), help="CSV file for the rows")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--bank", type=int, help="images in the bank (default: 1281167; CPU 20000)")
    parser.add_argument("--dim", type=int, help="channels per feature (default: 384; CPU 64)")
    parser.add_argument("--queries", type=int, help="images to classify (default: 50000; CPU 1000)")
    given = parser.parse_args(arguments)
    device = resolve_device(given.device)
    size = Size(*(getattr(given, name) or default for name, default in SIZES[device]._asdict().items()))
    rows = bench_knn(size, device=device)
    write_rows(given.out, rows)
    print(f"20-NN and its vote, features in half precision, {rows[0].device}\n\n{knn_speed_table(rows).markdown()}")
    print(f"\nRows: {given.out}")


if __name__ == "__main__":
    main()
