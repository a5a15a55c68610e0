"""The helpers that judge the other tests can themselves fail."""

import pytest
import torch

from closeness import assert_as_accurate, assert_close

ONE = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize("wrong", [ONE * 1.01, ONE * float("nan"), torch.ones(3, 1, dtype=torch.float64)])
def test_assert_close_fails_on_a_wrong_value_a_nan_and_a_wrong_shape(wrong):
    assert_close(ONE, ONE)
    with pytest.raises(AssertionError):
        assert_close(wrong, ONE)


def test_assert_as_accurate_fails_when_the_error_is_larger():
    assert_as_accurate(ONE + 1e-6, ONE + 1e-6, ONE)
    with pytest.raises(AssertionError):
        assert_as_accurate(ONE + 3e-6, ONE + 1e-6, ONE)
    with pytest.raises(AssertionError):
        assert_as_accurate(ONE * float("nan"), ONE + 1e-6, ONE)
