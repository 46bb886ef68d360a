"""The check of one row of an operator's table, for the tests of operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.operators.against_onnx import check


@pytest.fixture
def agrees_with_onnx() -> Callable[..., None]:
    """The check of one row; see `check`."""
    return check
