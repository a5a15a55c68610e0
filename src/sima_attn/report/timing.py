"""Times functions against each other in one run, so that their ratio means something on a busy machine."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Function = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the 20th, 50th and 80th percentile over `samples` samples."""

    p20: float
    p50: float
    p80: float
    samples: int


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
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time every function, in rounds, until each has had its share of `seconds`.

    In a round each function is called as often as fills `sample_seconds`, or `calls_per_sample` times, twice:
    once untimed, then timed; the mean of the timed calls is one sample. The untimed calls bring the inputs back
    into the cache, where in a network the projection leaves q, k and v; a function that takes longer than a whole
    sample has no use for that. Slow drifts of the machine hit all functions alike.

    `before_sample` runs before the clock starts, `after_calls` before it stops: on a GPU, where a call only
    enqueues work, they wait for the device.
    """
    if not functions:
        raise ValueError("there is nothing to time: give at least one function")
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
        on_round()
    return {name: percentiles(times) for name, times in samples.items()}


def percentiles(times: list[float]) -> Timing:
    """The percentiles of a `Timing`."""
    p20, p50, p80 = np.percentile(times, [20, 50, 80])
    return Timing(float(p20), float(p50), float(p80), len(times))
