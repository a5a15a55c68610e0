"""Stop a run on SIGINT or SIGTERM, after the step in progress is finished and saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL = 1.0  # seconds; `timeout` and cluster managers signal a process and then its group


class RunInterrupted(SystemExit):
    """A signal stopped the run. Unless caught, the process exits with 128 + the signal's number."""


class StopSignals:
    """Context in which the first SIGINT or SIGTERM is recorded and the second one ends the process.

    A signal that is ignored, as in a background job of a script, stays ignored.

    Attributes:
        on_first: Called by the handler of the first signal.
        received: The first signal, None before it.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.on_first = on_first
        self.received: signal.Signals | None = None
        self.previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.previous[number] = signal.signal(number, self.record)
        return self

    def __exit__(self, *error: object) -> None:
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
