import functools
import gc
import itertools
import os
import random

import hypothesis
import pytest
import torch

import fast_interpreter

# Without a GPU the Triton kernels run in Triton's interpreter. It is chosen when the kernels are defined, so here.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    fast_interpreter.install()

# Reproducible everywhere: the same examples each run, one thread each for the two pytest workers.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40, print_blob=True)
hypothesis.settings.load_profile("fixed")
torch.set_num_threads(1)
# And for every program that a test starts: threads that wait for a busy core spin, which doubles its time.
os.environ["OMP_NUM_THREADS"] = "1"


# What a terminal or a CI service sets and rich, typer or translated messages would follow.
OF_THE_MACHINE = "FORCE_COLOR NO_COLOR PY_COLORS TTY_COMPATIBLE TERMINAL_WIDTH GITHUB_ACTIONS LANGUAGE".split()
TERMINAL = {"COLUMNS": "1000", "LINES": "50", "TERM": "dumb", "LC_ALL": "C.UTF-8"}


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in random order")
    parser.addoption("--update-tables", action="store_true", help="write the tables of the docs from their rows")


@pytest.hookimpl(trylast=True)  # after pytest has made its own terminal
def pytest_configure(config):
    """Give every test, and every command that a test starts, one terminal: no message wraps, none is colored."""
    if config.pluginmanager.has_plugin("terminalreporter"):
        writer = config.get_terminal_writer()
        writer.fullwidth = writer.fullwidth  # pytest's own report keeps the width of the real terminal
    for name in OF_THE_MACHINE:
        os.environ.pop(name, None)
    os.environ.update(TERMINAL)


def pytest_collection_modifyitems(config, items):
    seed = config.getoption("shuffle")
    if seed is None:
        return
    rng = random.Random(seed)
    # File by file: what a file sets up for its tests is set up once.
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    rng.shuffle(files)
    for tests in files:
        rng.shuffle(tests)
    items[:] = itertools.chain.from_iterable(files)


def pytest_collection_finish(session):
    """Leave what is imported and collected out of garbage collections: they would go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    gc.unfreeze()  # or nanobind reports them as leaks at exit


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


START = os.getcwd()


@pytest.fixture(autouse=True)
def nothing_in_the_current_folder():
    """No test leaves a file where pytest was started, which is the checkout: `monkeypatch.chdir(tmp_path)` before.

    `runs` is not looked at: the tests of the pages put screenshots there.
    """
    before = set(os.listdir(START))
    yield
    left = sorted(name for name in set(os.listdir(START)) - before - {"runs"} if not name.startswith("."))
    assert not left, f"the test left {', '.join(left)} in {START}"


@pytest.fixture
def brief_timing(monkeypatch):
    """Benchmarks that call everything once for its time: what they make of the times is tested, not the times."""
    from sima_attn.report.timing import time_interleaved

    brief = functools.partial(time_interleaved, sample_seconds=0, least_samples=1)
    for module in ("cpu", "demo", "detect", "paper_edge"):
        monkeypatch.setattr(f"sima_attn.bench.{module}.time_interleaved", brief)


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter, config):
    """What the log must say, however quiet it is: the order of the tests, and on a GPU which one it was."""
    import datetime

    if config.getoption("shuffle") is not None:
        terminalreporter.write_line(f"in the random order of --shuffle={config.getoption('shuffle')}")
    if torch.cuda.is_available():
        today = datetime.date.today().isoformat()
        terminalreporter.write_line(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {today}")
