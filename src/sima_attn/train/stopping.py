"""Stopping a run by SIGINT or SIGTERM: the step in progress is finished and saved first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL = 1.0  # seconds; `timeout` and cluster managers signal a process and its group, one after the other


class RunInterrupted(SystemExit):
    """A signal stopped the run; its checkpoint is written. Unless caught, it exits with 128 + the signal's number."""


class StopSignals:
    """Records the first SIGINT or SIGTERM instead of ending the process; a second one ends it at once.

    A signal that is ignored, as in a background job of a script, stays ignored.

    Attributes:
        received: The first signal, None before it.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.on_first = on_first
        self.received: signal.Signals | None = None
        self.previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.previous[number] = signal.signal(number, self.record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def record(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.received is None:
            self.received, self.received_at = signal.Signals(number), time.monotonic()
            self.on_first()
        elif time.monotonic() - self.received_at > SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
