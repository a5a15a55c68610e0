"""A stand-in for a full disk that needs no disk: the system refuses files above a size."""

import resource
from contextlib import contextmanager


@contextmanager
def no_file_above(size):
    """Within it a file of this process cannot grow beyond so many bytes."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
