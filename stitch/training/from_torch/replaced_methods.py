"""Methods of an object of torch's that are another's for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Replacement:
    """A method of torch's object that is another's for now, and keeps nobody alive."""

    #: Schedulers ask: this one tells by itself that it was called.
    _wrapped_by_lr_sched = True

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = weakref.WeakMethod(method)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        method = self.method()
        assert method is not None, "it is taken back when its owner ends"
        return method(*arguments, **named)


def replace_methods(
    theirs: Any, methods: Mapping[str, Callable[..., Any]], during: Any,
    then: Sequence[Callable[[], object]] = (),
) -> weakref.finalize[Any, Any]:  # fmt: skip
    """Put bound methods in the place of those of these names, while `during` lives.

    What is given back ends it when it is called; then `then` is called too.
    """
    before = {}
    for name, method in methods.items():
        before[name] = vars(theirs).get(name)
        setattr(theirs, name, Replacement(method))
    end = weakref.finalize(during, _restore, theirs, before, then)
    end.atexit = False
    return end


def owner_of(theirs: Any, name: str) -> Any:
    """Who has replaced a method of an object; None where nobody has."""
    now = vars(theirs).get(name)
    method = now.method() if isinstance(now, Replacement) else None
    return getattr(method, "__self__", None)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a bound method that does not keep its object alive; None where that is gone."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = weak()
        return None if alive is None else alive(*arguments)

    return call


def _restore(theirs: Any, before: dict[str, Any], then: Sequence[Callable[[], object]]) -> None:
    for name, value in before.items():
        if value is None:
            vars(theirs).pop(name, None)
        else:
            setattr(theirs, name, value)
    for call in then:
        call()
