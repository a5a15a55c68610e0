"""Timing of functions in turns, in one run, so that their ratio is meaningful on a busy machine."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Function = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the 20th, 50th and 80th percentile over `samples` samples."""

    p20: float
    p50: float
    p80: float
    samples: int

    def columns(self, unit: Literal["ms", "us"], digits: int) -> dict[str, Any]:
        """The columns of a row: p20_ms, p50_ms, p80_ms (or _us) and samples."""
        scale = {"ms": 1e3, "us": 1e6}[unit]
        percentiles = {"p20": self.p20, "p50": self.p50, "p80": self.p80}
        return {f"{name}_{unit}": round(x * scale, digits) for name, x in percentiles.items()} | {
            "samples": self.samples
        }


def time_interleaved(
    functions: Mapping[str, Function],
    *,
    seconds: float = 2.0,
    sample_seconds: float = 0.02,
    least_samples: int = 5,
    calls_per_sample: int | None = None,
    before_sample: Callable[[], object] = lambda: None,
    after_calls: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time all functions in rounds, for `seconds` in total, so that slow drifts of the machine affect all alike.

    In a round each function is called as often as fits `sample_seconds`, or `calls_per_sample` times: first untimed,
    then timed. The mean of the timed calls is one sample. The untimed calls bring the inputs back into the cache,
    where in a network the projection leaves q, k and v; they are omitted for a function that takes longer than a
    sample.

    `before_sample` runs before the clock starts, `after_calls` before it stops: on a GPU, where a call only enqueues
    work, they wait for the device.
    """
    if not functions:
        raise ValueError("nothing to time: pass at least one function")
    calls: dict[str, int] = {}
    untimed: dict[str, int] = {}
    for name, function in functions.items():
        function()
        before_sample()
        start = clock()
        function()
        after_calls()
        once = max(clock() - start, 1e-9)
        calls[name] = calls_per_sample or max(1, round(sample_seconds / once))
        untimed[name] = calls[name] if once < sample_seconds else 0

    samples: dict[str, list[float]] = {name: [] for name in functions}
    begin, rounds = clock(), 0
    while rounds < least_samples or clock() - begin < seconds:
        for name, function in functions.items():
            for _ in range(untimed[name]):
                function()
            before_sample()
            start = clock()
            for _ in range(calls[name]):
                function()
            after_calls()
            samples[name].append((clock() - start) / calls[name])
        rounds += 1
    return {name: percentiles(times) for name, times in samples.items()}


def percentiles(times: list[float]) -> Timing:
    """The percentiles of a `Timing`."""
    p20, p50, p80 = np.percentile(times, [20, 50, 80])
    return Timing(float(p20), float(p50), float(p80), len(times))
