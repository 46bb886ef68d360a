"""torch.nn with a `Module` that can be compiled: `import stitch.torch.nn as nn`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary, ref

from stitch.argument_kinds import PATH, WRITABLE, either, takes
from stitch.errors import UsageError
from stitch.program import Array
from stitch.torch.captured_model import CapturedModel, capture, check_torch_arguments
from stitch.torch.module_json import module_json, write_text
from stitch.torch.shared_module import set_tensor_of, tensor_of, torch

#: The arguments of torch's own `Module.compile`.
_TORCH_ARGUMENTS = frozenset({"backend", "mode", "dynamic", "fullgraph", "options", "disable"})
#: The last compiled model of each module; the user keeps it alive.
_captured: WeakKeyDictionary[Module, ref[CapturedModel]] = WeakKeyDictionary()


class Module(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A torch module with the methods of the tracing interface.

    `torch.compile(model, backend="stitch")` forwards them. While a model that `compile` returned is
    in training, they act on that model; else on the module and its torch tensors.
    """

    def compile(
        self, *arguments: Any, algorithm: str = "none", optimizer: Any = None, loss: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Return a model that captures this module at its first call; `options` as for
        `stitch.compile`. Without `loss`, a model with an optimizer takes it from the first
        `loss_fn(pred, y)`. With arguments of torch's `compile` (`backend=` ...), call that."""
        if arguments or _TORCH_ARGUMENTS & options.keys():
            check_torch_arguments(algorithm=algorithm, optimizer=optimizer, loss=loss, **options)
            return super().compile(*arguments, **options)
        captured = capture(self, algorithm=algorithm, optimizer=optimizer, loss=loss, **options)
        _captured[self] = ref(captured)
        return captured

    def _model(self) -> CapturedModel | None:
        reference = _captured.get(self)
        captured = None if reference is None else reference()
        if captured is None or not captured.is_captured or captured.is_over:
            return None
        return captured

    def as_json(self, *, weights: bool = True) -> str:
        """Return the compiled model with the state of its training as JSON; else the module's
        tensors and the state of torch.compile's optimizer. `stitch.torch.load` reads both."""
        model = self._model()
        return model.as_json(weights=weights) if model else module_json(self)

    @takes(file=either(PATH, WRITABLE))
    def dump(self, file: str | Path | IO[str], *, weights: bool = True) -> None:
        """Write `as_json` to a path, atomically, or to an open text file."""
        write_text(file, self.as_json(weights=weights))

    def get_tensor(self, name: str, index: Any = ...) -> Array:
        """Return the current elements, or a part, of a parameter, buffer or gradient; in training,
        of any tensor of the training. Raises `UsageError` for unknown names."""
        model = self._model()
        return model.get_tensor(name, index) if model else tensor_of(self, name, index)

    def set_tensor(self, name: str, array: Any, index: Any = ...) -> None:
        """Overwrite a tensor of `get_tensor`, or a part; raises `UsageError` for unknown names,
        `LinkError` for other shapes and types."""
        model = self._model()
        if model:
            model.set_tensor(name, array, index)
        else:
            set_tensor_of(self, name, array, index)

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        """As in torch; a training of the module takes the loaded values."""
        result = super().load_state_dict(state_dict, *arguments, **named)
        model = self._model()
        if model is not None:
            model.take_over(state_dict)
        return result


class Sequential(Module, torch.nn.Sequential):  # type: ignore[misc]  # torch has no types here
    """torch's `Sequential` with the methods of `Module`."""

    @takes()
    def __init__(self, *layers: Any) -> None:
        wrong = [layer for layer in layers if not isinstance(layer, torch.nn.Module)]
        if wrong and not (len(layers) == 1 and isinstance(layers[0], OrderedDict)):
            raise UsageError(
                "Sequential takes modules", expected="Sequential(layer, layer, ...)",
                got=f"{type(wrong[0]).__name__}: {' '.join(repr(wrong[0]).split())[:60]}",
                remedy="unpack a list: Sequential(*layers)",
            )  # fmt: skip
        super().__init__(*layers)


def __getattr__(name: str) -> Any:
    """All other names are those of torch.nn."""
    return getattr(torch.nn, name)


def __dir__() -> list[str]:
    return sorted({*dir(torch.nn), *globals()})
