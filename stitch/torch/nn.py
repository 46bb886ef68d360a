"""torch.nn, with a `Module` that compiles itself: `import stitch.torch.nn as nn`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary, ref

from stitch.argument_kinds import PATH, WRITABLE, either, takes
from stitch.program import Array
from stitch.torch.captured_model import CapturedModel
from stitch.torch.module_json import module_json, written
from stitch.torch.shared_module import set_tensor_of, tensor_of, torch

#: What torch's own `Module.compile` is told.
_TORCHS_WORDS = frozenset({"backend", "mode", "dynamic", "fullgraph", "options", "disable"})
#: What modules were compiled to last; a model lives for as long as its user holds it.
_captured: WeakKeyDictionary[Module, ref[CapturedModel]] = WeakKeyDictionary()


class Module(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A torch module with the methods of the tracing interface.

    They are methods of the module, so that what `torch.compile(model, backend="stitch")` gives
    forwards them. While a model that `compile` gave is in training they are about that; else about
    the module, whose parameters are torch's tensors.
    """

    def compile(
        self, *arguments: Any, algorithm: str = "none", optimizer: Any = None, loss: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """A model that captures this module at its first call, and, with an optimizer, takes its
        loss from the first `loss_fn(pred, y)` where none is given; `options` as for
        `stitch.compile`. With torch's own words (`backend=` ...) it is torch's method."""
        if arguments or _TORCHS_WORDS & options.keys():
            return super().compile(*arguments, **options)
        captured = CapturedModel(
            self, algorithm=algorithm, optimizer=optimizer, loss=loss, **options
        )
        _captured[self] = ref(captured)
        return captured

    def _model(self) -> CapturedModel | None:
        known = _captured.get(self)
        captured = None if known is None else known()
        if captured is None or not captured.is_captured or captured.is_over:
            return None
        return captured

    def as_json(self, *, weights: bool = True) -> str:
        """The model that `compile` gave as JSON, with the state of its training; else the module's
        tensors, and what the optimizer of torch.compile keeps. `stitch.torch.load` reads both."""
        model = self._model()
        return model.as_json(weights=weights) if model else module_json(self)

    @takes(file=either(PATH, WRITABLE))
    def dump(self, file: str | Path | IO[str], *, weights: bool = True) -> None:
        """Write `as_json` to a path, whole or not at all, or into an open text file."""
        written(file, self.as_json(weights=weights))

    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """The elements of a parameter, buffer or gradient as they are now, or a part of them; of a
        training any tensor that it has. Raises `UsageError`."""
        model = self._model()
        return model.get_tensor(name, index) if model else tensor_of(self, name, index)

    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """Overwrite what `get_tensor` gives, or a part of it; raises `UsageError`, `LinkError`."""
        model = self._model()
        if model:
            model.set_tensor(name, array, index)
        else:
            set_tensor_of(self, name, array, index)

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        """torch's: a training of the module takes what was loaded, as it takes `set_tensor`.

        Raises `UsageError` for another value of what is a constant of its programs.
        """
        model = self._model()
        if model is None:
            return super().load_state_dict(state_dict, *arguments, **named)
        model.check_loadable(state_dict)
        given = super().load_state_dict(state_dict, *arguments, **named)
        model.take_over(state_dict)
        return given


def __getattr__(name: str) -> Any:
    """Everything else is torch.nn's."""
    return getattr(torch.nn, name)


def __dir__() -> list[str]:
    return sorted({*dir(torch.nn), *globals()})
