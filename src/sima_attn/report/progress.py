"""Progress output of a run: a bar with throughput and remaining time, and one line per evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RunProgress:
    """A progress bar on stderr; only the first process shows one."""

    def __init__(self, shown: bool = True) -> None:
        self.console = Console(stderr=True, quiet=not shown)
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not shown,
            transient=True,
        )
        self.task: Any = None

    def __enter__(self) -> RunProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(escape(line), highlight=False, soft_wrap=True)

    def counter(self, what: str) -> Callable[[int, int], None]:
        """A function (done, total) that updates a separate bar, which is removed when it is full."""
        task = self.bar.add_task(what, total=None, facts="")

        def move(done: int, total: int) -> None:
            self.bar.update(task, completed=done, total=total)
            if done >= total:
                self.bar.remove_task(task)

        return move

    def start(self, done: int, total: int) -> None:
        """Start the bar of the training steps."""
        self.task = self.bar.add_task("training", completed=done, total=total, facts="")

    def step(self, done: int, epoch: float, loss: float, images_per_second: float, stage: str = "") -> None:
        """Update the bar; `stage` is shown in a run of several."""
        facts = f"loss {loss:.3f}, {images_per_second:,.0f} images/s"
        place = f"{stage}, epoch {epoch:.1f}" if stage else f"epoch {epoch:.1f}"
        self.bar.update(self.task, completed=done, description=place, facts=facts)

    def show_stopping(self) -> None:
        """Show in the bar that a signal was received; safe in a signal handler, since nothing is printed."""
        if self.task is not None:
            self.bar.update(self.task, description="stopping after this step (press again to stop at once)")

    def evaluated(self, epoch: float, metrics: Mapping[str, float], stage: str = "") -> None:
        """Print the metrics of an evaluation; `stage` is shown in a run of several."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "images")
        if numbers:
            self.say(f"{f'{stage}, ' if stage else ''}epoch {epoch:g}: {numbers}")
