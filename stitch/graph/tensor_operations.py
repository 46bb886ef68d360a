"""`TensorOperations`: what a symbolic tensor asks of the builder that made it.

Generic in the tensor, so that neither it nor the builder need be known here: the tensor is typed by
this protocol, and the builder fits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from stitch.program import DataType, ValueType

Scalar = bool | int | float | np.generic
Axes = int | Sequence[int] | None

T = TypeVar("T")


class TensorOperations(Protocol[T]):
    """The operations that a tensor's own operators and methods stand for."""

    @property
    def name(self) -> str: ...
    def type_of(self, index: int, /) -> ValueType: ...
    def name_of(self, index: int, /) -> str: ...

    def cast(self, x: T, data_type: DataType | str | np.dtype[Any] | type, /) -> T: ...
    def index(self, x: T, key: object, /) -> T: ...
    def transpose(self, x: T, axes: Sequence[int] | None = None, /) -> T: ...
    def numpy_ufunc(
        self,
        ufunc: np.ufunc,
        method: str,
        inputs: tuple[object, ...],
        arguments: dict[str, object],
        /,
    ) -> object: ...
    def numpy_function(
        self,
        function: Callable[..., object],
        inputs: tuple[object, ...],
        arguments: dict[str, object],
        /,
    ) -> object: ...
