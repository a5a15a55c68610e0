import os

import hypothesis
import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter. It is chosen when the kernels are defined, so here.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Reproducible everywhere: the same examples each run, one thread each for the two pytest workers.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40, print_blob=True)
hypothesis.settings.load_profile("fixed")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter):
    """What the log of a run on a GPU must say, however quiet it is."""
    import datetime

    if torch.cuda.is_available():
        today = datetime.date.today().isoformat()
        terminalreporter.write_line(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {today}")
