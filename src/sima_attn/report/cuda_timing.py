"""Time of functions on a CUDA device, in turns: as CUDA graphs, as calls from Python, or until enqueued; and memory."""

from collections.abc import Callable, Mapping

import torch

from sima_attn.report.timing import Timing, percentiles, time_interleaved

Function = Callable[[], object]
SAMPLE_SECONDS = 1e-3  # a graph repeats its function until it runs about this long
MOST_CALLS = 200
ENQUEUED_CALLS = 50  # the queue of a device holds about 1,000 kernels


def check_cuda() -> None:
    """Raise if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA device, and torch finds none; `sima bench cpu` needs none")


def time_graphs(
    functions: Mapping[str, Function], *, seconds: float = 1.0, least_samples: int = 15
) -> dict[str, Timing]:
    """Time all functions as CUDA graphs, in rounds, for about `seconds` each.

    A graph has no launch overhead of Python: the time is that of the device. The functions take turns, so slow drifts
    of the machine affect all alike. The inputs stay in place, as for one layer that is called repeatedly.
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


def time_calls(functions: Mapping[str, Function], *, seconds: float = 1.0) -> dict[str, Timing]:
    """Wall-clock time per call from Python, including the work of the device: a loop without CUDA graphs.

    A sample is a few calls followed by one synchronization. Samples are short and many, because the clock of a CPU may
    change within a second.
    """
    check_cuda()
    wait = torch.cuda.synchronize
    return time_interleaved(
        functions, seconds=seconds, sample_seconds=0.01, least_samples=10, before_sample=wait, after_calls=wait
    )


def time_enqueuing(functions: Mapping[str, Function], *, seconds: float = 1.0) -> dict[str, Timing]:
    """CPU time per call: until the call returns, while the device may still be computing.

    The device is idle at the start of each sample, and the calls of a sample do not fill its queue; a full queue would
    block the call.
    """
    check_cuda()
    return time_interleaved(
        functions,
        seconds=seconds,
        least_samples=10,
        calls_per_sample=ENQUEUED_CALLS,
        before_sample=torch.cuda.synchronize,
    )


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy: the bandwidth that the device reaches."""
    source = torch.randn(2**27, device="cuda", dtype=torch.float32).to(torch.bfloat16)  # 256 MiB
    target = torch.empty_like(source)
    timing = time_graphs({"copy": lambda: target.copy_(source)}, seconds=0.2)["copy"]
    return 2 * source.numel() * source.element_size() / timing.p50


def peak_mib(function: Function, *, warmup: int = 1) -> float:
    """Peak memory of a call in addition to what was allocated before, in MiB.

    The first calls allocate workspaces that stay, and may compile and tune: `warmup` of them are not counted.
    """
    for _ in range(warmup):
        function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _capture(function: Function) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of several calls of the function, and their number."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile, tune, allocate
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = _graph_of(function, 1, stream)
    # Timed as a graph: a call from Python may take many times as long as its kernels.
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
