"""What a run shows while it goes: one rich bar with throughput and time left, and a line an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RunProgress:
    """A bar on stderr. A process other than the first one shows nothing."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, line: str) -> None:
        """A line above the bar."""
        self.console.print(escape(line), highlight=False, soft_wrap=True)

    def counter(self, what: str) -> Callable[[int, int], None]:
        """A function (done, total) that moves a bar of its own, which goes when it is full."""
        task = self.bar.add_task(what, total=None, facts="")

        def move(done: int, total: int) -> None:
            self.bar.update(task, completed=done, total=total)
            if done >= total:
                self.bar.remove_task(task)

        return move

    def start(self, done: int, total: int) -> None:
        """Begin the bar of the steps."""
        self.task = self.bar.add_task("training", completed=done, total=total, facts="")

    def step(self, done: int, epoch: float, loss: float, images_per_second: float) -> None:
        """Move the bar."""
        facts = f"loss {loss:.3f}, {images_per_second:,.0f} images/s"
        self.bar.update(self.task, completed=done, description=f"epoch {epoch:.1f}", facts=facts)

    def show_stopping(self) -> None:
        """Say in the bar that a signal was received; nothing is printed, so that a signal handler may call it."""
        if self.task is not None:
            self.bar.update(self.task, description="stopping after this step (again: at once)")

    def evaluated(self, epoch: float, metrics: Mapping[str, float]) -> None:
        """A line with the numbers of an evaluation."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "images")
        if numbers:
            self.say(f"epoch {epoch:g}: {numbers}")
