"""Logs of a run: CSV files, and TensorBoard if it is installed. A resumed run continues both."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sima_attn._files import atomic_write


class CsvLog:
    """A CSV file of rows with the columns of the first row; the first column is `step`.

    A run resumed at step `start` repeats the steps after it, so their rows are removed first.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.path = path
        rows = [row for row in read_log(path) if int(row["step"]) <= start] if path.exists() else []
        self.columns: list[str] | None = None
        if rows:
            self.columns = list(rows[0])
            with atomic_write(path) as temporary, open(temporary, "w", newline="") as file:
                writer = csv.DictWriter(file, self.columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        else:
            path.unlink(missing_ok=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row and flush it."""
        if self.columns is None:
            self.columns = list(row)
            with open(self.path, "w", newline="") as file:
                csv.DictWriter(file, self.columns, lineterminator="\n").writeheader()
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)


def read_log(path: Path) -> list[dict[str, str]]:
    """Rows of a log; an incomplete last line is omitted."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(whole.splitlines()))


class TensorBoard:
    """Scalars for TensorBoard; a no-op if it is not installed."""

    def __init__(self, folder: Path, start: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.writer = None
        else:
            self.writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def add(self, row: Mapping[str, Any], group: str) -> None:
        """Log the values of a row as `group/name`, or as `group/stage/name` in a run of several stages.

        Losses of different stages are not comparable, so each stage has its own charts.
        """
        if self.writer is not None:
            place = f"{group}/{row['stage']}" if "stage" in row else group
            for name, value in row.items():
                if name not in ("step", "epoch", "stage"):
                    self.writer.add_scalar(f"{place}/{name}", value, row["step"])

    def close(self) -> None:
        """Flush and close."""
        if self.writer is not None:
            self.writer.close()
