"""Rows: what a benchmark measured, one flat dataclass per row, kept as CSV. Tables and figures read nothing else."""

import csv
import datetime
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from sima_attn._files import atomic_write

RowType = TypeVar("RowType")

_PARSE: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": {"True": True, "False": False}.__getitem__,
}


def write_rows(path: Path, rows: Sequence[object]) -> None:
    """Write rows of one dataclass to a CSV file, whole or not at all."""
    if not rows:
        raise ValueError(f"there are no rows to write to {path}")
    with atomic_write(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")  # type: ignore[arg-type]
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)  # type: ignore[call-overload]


def read_rows(path: Path, row_type: type[RowType]) -> list[RowType]:
    """The rows of a CSV file that `write_rows` wrote."""
    columns = {field.name: str(getattr(field.type, "__name__", field.type)) for field in fields(row_type)}  # type: ignore[arg-type]
    with open(path, newline="", errors="replace") as file:
        reader = csv.DictReader(file.readlines())
    if list(reader.fieldnames or []) != list(columns):
        raise ValueError(
            f"{path} has the columns {reader.fieldnames}, but {row_type.__name__} has {list(columns)}: another version "
            "wrote the file; run the benchmark again"
        )
    rows = []
    for record in reader:
        try:
            rows.append(row_type(**{name: _PARSE[columns[name]](text) for name, text in record.items()}))
        except (KeyError, TypeError, ValueError):  # too many values, too few, or one of the wrong type
            raise ValueError(
                f"line {reader.line_num} of {path} is not a row of {row_type.__name__}: the file was truncated or "
                "edited; run the benchmark again"
            ) from None
    return rows


def merge_rows(old: Sequence[RowType], new: Sequence[RowType]) -> list[RowType]:
    """The rows of both, one per `key`: a new row replaces the old one."""
    return list({row.key: row for row in (*old, *new)}.values())  # type: ignore[attr-defined]


def cpu_name() -> str:
    """The processor's name, as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def processor_name(device: str) -> str:
    """The processor behind "cpu" or "cuda"."""
    if device == "cpu":
        return cpu_name()
    import torch

    return torch.cuda.get_device_name()


def today() -> str:
    """The date in the format of the rows."""
    return datetime.date.today().isoformat()


def provenance_columns(device: str) -> dict[str, Any]:
    """The columns of a row that say where it was measured: the processor behind `device`, torch's version, the date."""
    import torch

    return {"device": processor_name(device), "torch": str(torch.__version__), "date": today()}
