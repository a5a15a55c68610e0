"""The timer, with a clock that the test turns."""

import pytest

from sima_attn.report.timing import time_interleaved


class Clock:
    """A clock that only the functions under test move on."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def function(self, name, seconds):
        def run():
            self.calls.append(name)
            self.now += seconds

        return run


def test_each_function_gets_its_own_time():
    clock = Clock()
    functions = {"fast": clock.function("fast", 0.001), "slow": clock.function("slow", 0.004)}
    timings = time_interleaved(functions, seconds=1.0, sample_seconds=0.01, clock=clock)
    assert timings["fast"].p50 == pytest.approx(0.001)
    assert timings["slow"].p50 == pytest.approx(0.004)
    assert timings["fast"].samples == timings["slow"].samples >= 5


def test_functions_take_turns_and_are_warmed_up_before_each_sample():
    clock = Clock()
    functions = {"a": clock.function("a", 0.001), "b": clock.function("b", 0.002)}
    time_interleaved(functions, seconds=0.0, sample_seconds=0.004, least_samples=2, clock=clock)
    calibration, rounds = clock.calls[:4], clock.calls[4:]
    assert calibration == ["a", "a", "b", "b"]
    assert rounds == (["a"] * 8 + ["b"] * 4) * 2  # half of each turn is untimed


def test_a_function_longer_than_a_sample_is_not_run_for_nothing():
    clock = Clock()
    time_interleaved({"a": clock.function("a", 1.0)}, seconds=0.0, sample_seconds=0.1, least_samples=3, clock=clock)
    assert len(clock.calls) == 2 + 3


def test_percentiles_are_in_order():
    clock, durations = Clock(), iter(range(1, 1000))

    def growing():
        clock.now += next(durations)

    timing = time_interleaved({"x": growing}, seconds=0, least_samples=10, clock=clock)["x"]
    assert timing.p20 < timing.p50 < timing.p80
    assert timing.samples == 10


def test_waits_for_a_device_count_only_where_they_should():
    clock, pending = Clock(), []

    def enqueue():  # returns after 1 s, and leaves the device 4 s of work
        clock.now += 1
        pending.append(4)

    def wait():
        clock.now += sum(pending)
        pending.clear()

    def time(**hooks):
        return time_interleaved({"x": enqueue}, seconds=0, calls_per_sample=3, clock=clock, **hooks)["x"].p50

    assert time(before_sample=wait) == 1
    assert time(before_sample=wait, after_calls=wait) == 1 + 4


def test_the_number_of_calls_in_a_sample_can_be_fixed():
    clock = Clock()
    time_interleaved({"a": clock.function("a", 0.001)}, seconds=0, calls_per_sample=7, least_samples=2, clock=clock)
    assert len(clock.calls) == 2 + 2 * (7 + 7)


def test_nothing_to_time_is_an_error():
    with pytest.raises(ValueError, match="nothing to time"):
        time_interleaved({})
