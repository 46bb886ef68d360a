"""Convert host arrays of any kind to dense arrays of a required type."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from stitch.budget import LARGE_NBYTES, claimed_array, copied
from stitch.errors import LayoutError, LinkError
from stitch.program import Array, DataType, can_change


def capture(
    array: Any,
    shape: tuple[int, ...],
    data_type: DataType,
    borrow: bool,
    what: str,
    allowed: int | None = None,
    is_input: bool = True,
) -> Array:
    """Return an array of the required shape and type that later writes do not affect.

    A writable array is copied unless `borrow` is true. Floats convert to floats, and integers to
    integers that can hold them. `is_input` is false for what no call gives: weights, states.

    Raises:
        LinkError: The shape differs, or the conversion would change the kind of number.
        OutOfMemoryError: A large copy exceeds `allowed` bytes (None: the limit of the process).
    """
    dtype = data_type.dtype
    if type(array) is np.ndarray and array.dtype == dtype and array.shape == shape:
        if borrow or not can_change(array):
            return array
        return array.copy() if array.nbytes < LARGE_NBYTES else copied(array, what, allowed)
    if isinstance(array, np.ndarray) and array.dtype.kind == "c":
        array = _in_pairs(array, shape)
    elements = as_array(array, what)
    if elements.shape != shape:
        remedy = "reshape the array" + ", or compile the program for this shape" * is_input
        if is_input and elements.shape[1:] == shape[1:] and elements.ndim == len(shape):
            remedy = (
                f"a program has one batch size: pass {shape[0]} rows at a time (pad the last "
                "ones), or compile another program for this size, or one with dynamic_shapes="
            )
        raise LinkError(
            f"{what} has another shape",
            expected=f"{list(shape)}",
            got=f"{list(elements.shape)}",
            remedy=remedy,
        )
    return converted(elements, data_type, what, allowed)


def as_array(array: Any, what: str) -> Array:
    """Convert anything array-like (DLPack included) to a NumPy array of a supported type.

    Raises:
        LayoutError: It is an object, text, complex or ragged; names the array.
    """
    taken = _taken_over(array, what)
    if not taken.dtype.isnative:
        taken = taken.astype(taken.dtype.newbyteorder("="))
    try:
        DataType.from_dtype(taken.dtype)
    except LayoutError as error:
        raise LayoutError(
            f"{what} is not a numeric array of a supported type",
            expected=error.expected,
            got=f"dtype {taken.dtype}",
            remedy="pass numbers (NumPy, DLPack, or nested lists), or convert with .astype(...)",
        ) from error
    return taken


def _taken_over(array: Any, what: str) -> Array:
    try:
        if _is_torch(array):
            return _array_of_torch(array)
        if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
            return np.asarray(array)
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError):
            # Not dense, or a type that DLPack or NumPy does not have: a copy works.
            return np.asarray(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(
            f"{what} cannot become an array: {error}", remedy=_remedy(array)
        ) from error


def _remedy(array: Any) -> str:
    """Return advice for an object that cannot be converted to an array."""
    if not _is_torch(array):
        return "give all rows one length, and bring tensors of other libraries to the CPU"
    if array.is_nested:
        return "to_padded_tensor(0.0) makes one dense tensor of a nested one"
    if array.is_quantized:
        return "dequantize() makes numbers of a quantized tensor"
    if array.is_meta:
        return "a meta tensor has no elements: give one with data, on the CPU"
    if array.layout is not sys.modules["torch"].strided:
        return "programs take dense tensors: .to_dense()"
    return "bring it to the CPU and detach it: .detach().cpu()"


def _in_pairs(array: Array, shape: tuple[int, ...]) -> Array:
    """Return complex numbers as (real, imaginary) pairs if the slot has one more axis."""
    if shape != (*array.shape, 2):
        return array
    return np.stack((array.real, array.imag), axis=-1)


def _is_torch(array: Any) -> bool:
    """Return whether this is a PyTorch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _array_of_torch(tensor: Any) -> Array:
    """Return the elements of a CPU tensor without a copy if possible.

    The tensor is detached, and types that NumPy lacks are passed as bits.
    """
    torch = sys.modules["torch"]
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    name = str(plain.dtype).removeprefix("torch.")
    bits = {"bfloat16": torch.int16}.get(name, torch.uint8 if "float8" in name else None)
    if bits is None:
        taken: Array = plain.numpy()
        return taken
    array: Array = plain.view(bits).numpy()
    return array.view(DataType(name).dtype)


def converted(array: Array, data_type: DataType, what: str, allowed: int | None = None) -> Array:
    """Return a dense copy in the required type; raises `LinkError` if the kind of number would
    change."""
    dtype = data_type.dtype
    if array.dtype == dtype:
        return copied(array, what, allowed)
    given = DataType.from_dtype(array.dtype)
    if given.is_floating is not data_type.is_floating or (dtype.kind == "b") is not (
        array.dtype.kind == "b"
    ):
        raise _mismatch(given, data_type, what)
    stored: Array = claimed_array(array.shape, dtype, what, allowed)
    with np.errstate(all="ignore"):
        np.copyto(stored, array, casting="unsafe")
    if data_type.is_floating and np.isfinite(stored).sum() < np.isfinite(array).sum():
        raise _mismatch(given, data_type, what, "some values are too large for it")
    if not data_type.is_floating and not np.array_equal(stored, array):
        raise _mismatch(given, data_type, what, "some values do not fit")
    return stored


def _mismatch(
    given: DataType, wanted: DataType, what: str, why: str = "it is never converted"
) -> LinkError:
    return LinkError(
        f"{what} has another type, and {why}",
        expected=wanted.value,
        got=given.value,
        remedy=f"convert the array with .astype({wanted.value!r})",
    )
