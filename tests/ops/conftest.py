"""Fixtures of the tests of kernels."""

import pytest
import torch

from sima_attn.ops import prepared_calls


@pytest.fixture
def nothing_is_prepared(monkeypatch):
    """Every test prepares its calls anew: what one records must not depend on the tests before it."""
    monkeypatch.setattr(prepared_calls, "_prepared", {})


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Everything the kernels are to fill holds NaN before: what they forget cannot go unnoticed."""
    from sima_attn.ops import triton_launchers

    for launcher in (triton_launchers.Recording, triton_launchers.TracedLauncher):
        empty = launcher.empty
        monkeypatch.setattr(launcher, "empty", lambda *a, _empty=empty, **k: _empty(*a, **k).fill_(torch.nan))
