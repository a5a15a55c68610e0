"""One model over several processes, each of which holds some rows of every image."""

from sima_attn.parallel.api import parallelize, unparallelize

__all__ = ["parallelize", "unparallelize"]
