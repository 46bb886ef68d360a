"""What torch.compile with Stitch refuses with `fallback="error"`, or always, in words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import BackendCompilerFailed

from stitch.errors import CompileError, StitchError, UsageError
from tests.support.torch.compiled import assert_same, compiled


def _refusal(run: Any, *operands: Any) -> StitchError:
    """The error of ours that torch reports."""
    with pytest.raises(BackendCompilerFailed) as caught:
        run(*operands)
    found = caught.value.inner_exception
    assert isinstance(found, StitchError)
    assert str(found) in str(caught.value)
    return found


def test_all_unsupported_operators_are_listed_with_their_lines() -> None:
    def function(x: Any) -> Any:
        first = torch.special.i0(x)
        return first + torch.linalg.inv(x)

    error = _refusal(compiled(function), torch.randn(3, 3))
    assert isinstance(error, CompileError)
    line = function.__code__.co_firstlineno
    for name, number in (("aten.i0.default", line + 1), ("aten.linalg_inv_ex", line + 2)):
        assert name in error.what
        assert f"test_torch_compile_refusals.py:{number}" in error.what
    assert "torch.compiler.disable" in (error.remedy or "")
    assert '"fallback": "torch"' in (error.remedy or "")


def test_sizes_out_of_data_are_named_with_their_lines() -> None:
    def picking(x: Any) -> Any:
        return x.nonzero() * 2

    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        error = _refusal(compiled(picking), torch.ones(3))
    line = picking.__code__.co_firstlineno + 1
    assert "sizes depend on data" in error.what
    assert f"aten.nonzero.default: test_torch_compile_refusals.py:{line}" in error.what


def test_the_remedy_for_an_unsupported_operator_works() -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types here
    def bessel(x: Any) -> Any:
        return torch.special.i0(x)

    def function(x: Any) -> Any:
        return bessel(x * 2) + 1

    x = torch.randn(3, 3)
    assert_same(compiled(function)(x), function(x))


def test_an_unknown_option_is_named_beside_the_known_ones() -> None:
    error = _refusal(compiled(lambda x: x + 1, tarket="host"), torch.ones(2))
    assert isinstance(error, UsageError)
    assert "'tarket'" in error.what
    assert error.expected is not None
    assert error.expected.startswith("target, executor, algorithm, fallback, min_operations, ")
    assert error.remedy == "did you mean 'target'?"
    error = _refusal(compiled(lambda x: x + 1, device="host"), torch.ones(2))
    assert error.remedy == "name the device as option 'target'"


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("target", "wormhole", "wormhole"),
        ("executor", "cuda", "cuda"),
        ("window", 0, "0"),
        ("algorithm", "magic", "magic"),
        ("fallback", "maybe", "torch or error"),
        ("min_operations", -1, "-1"),
        ("min_operations", "few", "few"),
        ("min_operations", True, "True"),
    ],
)
def test_an_option_that_cannot_be_is_refused(option: str, value: Any, word: str) -> None:
    assert word in str(_refusal(compiled(lambda x: x + 1, **{option: value}), torch.ones(2)))


def test_types_that_stitch_lacks_are_refused_with_the_argument() -> None:
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn):
        error = _refusal(compiled(lambda x: x.float() + 1), torch.ones(2).to(dtype))
        assert str(dtype).removeprefix("torch.") in str(error)
        assert "where: argument" in str(error)
