"""Views of what is pending: handles without a value, until what they show is there.

Comes in: a pending tensor, rows of it. Goes out: a handle that knows its shape; whoever asks it for
more runs the queue, and it is a view like any other from then on. Must not know what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from stitch.program import DataType, Layout, TensorDesc
from stitch.runtime.locks import Lock
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import ValueRecord


class Viewing(Protocol):
    """A device, as far as views of its pending tensors ask for it."""

    queue_lock: Lock
    drop: Callable[[ValueRecord], None]

    def view_now(self, value: ValueRecord, start: int, stop: int, *, keep: bool) -> Tensor:
        """A view of a value, made ready."""

    def await_view(self, source: Tensor, start: int, stop: int, *, keep: bool) -> Tensor:
        """A view of what is pending."""


class Awaited:
    """Rows `[start, stop)` of a tensor that is pending; `keep`: with that dimension."""

    __slots__ = ("desc", "device", "keep", "rows", "source")

    def __init__(
        self, device: Viewing, source: Tensor, rows: tuple[int, int], keep: bool, desc: TensorDesc
    ) -> None:
        self.device, self.rows, self.keep, self.desc = device, rows, keep, desc
        #: The tensor, which is kept so; None once its view is there.
        self.source: Tensor | None = source


class AwaitedView(Tensor):
    """A view whose tensor is pending; a `Tensor` and nothing else once that is there."""

    __slots__ = ()
    _awaited: Awaited

    @property
    def device(self) -> Any:
        return self._awaited.device

    @property
    def function_queue(self) -> Any:
        return self._awaited.device

    @property
    def shape(self) -> tuple[int, ...]:
        return self._awaited.desc.shape

    @property
    def data_type(self) -> DataType:
        return self._awaited.desc.layout.data_type

    @property
    def volume(self) -> int:
        return self._awaited.desc.elements

    @property
    def layout(self) -> Layout:
        return self._awaited.desc.layout

    @property
    def is_pending(self) -> bool:
        source = self._awaited.source
        return source is not None and source.is_pending

    @property
    def is_allocated(self) -> bool:
        source = self._awaited.source
        return self._record.is_usable if source is None else source.is_allocated

    def __repr__(self) -> str:
        return f"<Tensor {self._awaited.desc.text()} pending>"

    def _part(self, start: int, stop: int, *, keep: bool) -> Tensor:
        return self._awaited.device.await_view(self, start, stop, keep=keep)


#: Where a handle has its value.
_SLOT: Any = vars(Tensor)["_record"]


def _looked_for(view: AwaitedView) -> ValueRecord:
    """The value of a view, for which the queue has to run."""
    awaited = view._awaited
    find_place(view, awaited, awaited.device.view_now)
    value: ValueRecord = _SLOT.__get__(view)
    return value


# No attribute of the class to those who read it: of every other handle it is in a slot.
setattr(AwaitedView, "_record", property(_looked_for))  # noqa: B010


def awaited_view(
    device: Viewing, source: Tensor, rows: tuple[int, int], keep: bool, desc: TensorDesc
) -> AwaitedView:
    """A handle on rows of what is pending."""
    view = AwaitedView()
    view._awaited = Awaited(device, source, rows, keep, desc)
    # Nothing is dropped with it but what it holds.
    view.__del__ = int
    return view


def find_place(view: Tensor, awaited: Awaited, made_by: Callable[..., Tensor]) -> None:
    """Have a handle show its rows, which are there by now or made ready; once more does no harm."""
    source = awaited.source
    if source is None:
        return
    made = made_by(source._record, *awaited.rows, keep=awaited.keep)
    record, handle, kind = made._record, _any(view), Tensor
    note = partial(awaited.device.drop, record)
    with awaited.device.queue_lock:
        if awaited.source is None:
            return  # Another thread was faster.
        # All at once: nothing can come in between these.
        handle.__class__ = kind
        handle._record = record
        handle.__del__ = note
        record.handles += 1
        awaited.source = None


def _any(handle: Tensor) -> Any:
    return handle


def awaits(view: Tensor, value: ValueRecord) -> bool:
    """Whether a view, or one that it is a view of, waits for a value."""
    source: Tensor | None = view
    while type(source) is AwaitedView:
        source = source._awaited.source
    return source is not None and source is not view and source._record is value
