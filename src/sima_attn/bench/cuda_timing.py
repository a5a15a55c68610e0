"""Times functions against each other on a CUDA device: captured as graphs, replayed in turns, clocked on the device."""

from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from sima_attn.bench.timing import Timing, percentiles

Function = Callable[[], object]
SAMPLE_SECONDS = 1e-3  # a graph repeats its function until it runs about this long
MOST_CALLS = 200


def check_cuda() -> None:
    """Say what is missing before anything is built."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA device, and torch sees none here; `sima bench cpu` needs none")


def time_graphs(
    functions: Mapping[str, Function], *, seconds: float = 1.0, least_samples: int = 15
) -> dict[str, Timing]:
    """Time every function, in rounds, until each has had its share of `seconds`.

    A graph holds no launch gaps of Python: what is timed is what the chip does. All functions take turns, so slow
    drifts of the machine hit all alike. The inputs stay where they are, as for one layer called again and again.
    """
    check_cuda()
    graphs = {name: _capture(function) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    spent, rounds = 0.0, 0
    while rounds < least_samples or spent < seconds * len(functions):
        for name, (graph, calls) in graphs.items():
            took = _seconds(graph.replay)
            samples[name].append(took / calls)
            spent += took
        rounds += 1
    return {name: percentiles(times) for name, times in samples.items()}


def time_calls(function: Function, *, seconds: float = 0.1) -> float:
    """Seconds of a call from Python among many in a row: what a loop gets that replays no graphs."""
    for _ in range(10):  # compile, tune, allocate
        function()
    torch.cuda.synchronize()
    calls, start = 0, perf_counter()
    while calls == 0 or perf_counter() - start < seconds:
        function()
        calls += 1
    torch.cuda.synchronize()
    return (perf_counter() - start) / calls


def copy_bandwidth(gibibytes: float = 0.25) -> float:
    """Bytes read and written a second by a large copy: what the device can move at best."""
    source = torch.randn(int(gibibytes * 2**29), device="cuda", dtype=torch.float32).to(torch.bfloat16)
    target = torch.empty_like(source)
    timing = time_graphs({"copy": lambda: target.copy_(source)}, seconds=0.2)["copy"]
    return 2 * source.numel() * source.element_size() / timing.p50


def device_name() -> str:
    """The GPU as the driver names it."""
    return torch.cuda.get_device_name()


def _capture(function: Function) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of so many calls of the function, and how many."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile, tune, allocate
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = _graph_of(function, 1, stream)
    # Clocked as a graph: a call from Python may take many times as long as its kernels.
    once = min(_seconds(graph.replay) for _ in range(3))
    calls = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / once)))
    return (_graph_of(function, calls, stream), calls) if calls > 1 else (graph, 1)


def _graph_of(function: Function, calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            function()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _seconds(function: Function) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3
