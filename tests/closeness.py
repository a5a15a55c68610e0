"""How tests compare tensors: by relative error, against a reference of higher precision."""

from torch import Tensor


def relative_error(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference| in float64; NaN anywhere gives NaN, which no bound accepts.

    The floor of 1e-3 is for references that cancel to zero.
    """
    out, reference = out.double(), reference.double()
    return ((out - reference).norm() / reference.norm().clamp_min(1e-3)).item()


def assert_close(out: Tensor, reference: Tensor, bound: float = 1e-12) -> None:
    assert out.shape == reference.shape, f"shape {tuple(out.shape)}, expected {tuple(reference.shape)}"
    error = relative_error(out, reference)
    assert error <= bound, f"relative error {error:.2e} is over {bound:.0e}"


def assert_as_accurate(out: Tensor, plain: Tensor, reference: Tensor, factor: float = 2.0) -> None:
    """`out` may err at most `factor` times as much as plain torch does in the same dtype."""
    assert out.dtype == plain.dtype, f"dtype {out.dtype}, expected {plain.dtype}"
    ours, theirs = relative_error(out, reference), relative_error(plain, reference)
    assert ours <= factor * theirs, f"relative error {ours:.2e}, plain torch has {theirs:.2e}"
