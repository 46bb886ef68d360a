"""`Pipeline`: a fixed chain of loaded programs, called in one go; the fast steady path.

The first call plans the whole chain; later calls with arrays check the plan's preconditions, run
its steps, and hand out the outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.linker import chain_wires
from stitch.program import Array
from stitch.runtime.program import InputPort, LoadedProgram
from stitch.runtime.tensor import Tensor
from stitch.runtime.turns import MAX_TURNS, OWN_REFERENCES, Turn, can_take_turns


class Pipeline:
    """Loaded programs chained by position: `pipeline(x)` is `c(b(a(x)))` with one plan.

    Where numbers of slots differ, outputs feed activations of their name (`chain_wires`), and may
    go around programs. Inputs of later programs that no output feeds are inputs of the pipeline.
    Raises `UsageError` for no program or several devices, `LinkError` where two do not fit.
    """

    def __init__(self, programs: Iterable[LoadedProgram]) -> None:
        self.programs = tuple(programs) if isinstance(programs, Iterable) else ()
        if not self.programs or not all(isinstance(p, LoadedProgram) for p in self.programs):
            raise UsageError(
                "a pipeline needs at least one program, loaded on a device",
                expected="programs: a list of what device.load gave",
                got=type(programs).__name__,
            )
        self.device = self.programs[0].device
        if any(p.device is not self.device for p in self.programs):
            raise UsageError("the programs of a pipeline are loaded on one device")
        wires = chain_wires([loaded.program for loaded in self.programs])
        self._feeds = {(w.consumer, w.input): (w.producer, w.output) for w in wires}
        #: The last reader of every output that feeds one: nobody holds it longer.
        self._last_readers = {source: reader for reader, source in sorted(self._feeds.items())}
        self.inputs = tuple(
            (stage, index)
            for stage, program in enumerate(self.programs)
            for index in range(len(program.ports))
            if (stage, index) not in self._feeds
        )
        ports = [self.programs[s].ports[i] for s, i in self.inputs]
        self._ports = tuple(ports)
        self._count = len(ports)
        self._turns: list[Turn] = []

    def __call__(self, *arguments: Any, **named: Any) -> Tensor | tuple[Tensor, ...]:
        """Run the chain on arrays (or tensors); gives the last program's outputs.

        The result is ready when this returns where all inputs are arrays of the described types;
        otherwise it is queued like any call.
        """
        if named or len(arguments) != self._count:
            arguments = self._arrange(arguments, named)
        device = self.device
        lock = device.lock
        # `with` would take twice as long, of a call that has half a microsecond for everything.
        lock.acquire()
        try:
            if not device.dropped:
                epoch = device.records.epoch
                for turn in self._turns:
                    if turn.epoch == epoch and getrefcount(turn.only) == OWN_REFERENCES:
                        if turn.run(turn.straight, arguments):
                            return turn.only  # type: ignore[return-value]  # None is never unheld.
                        break
            return self._look_closer(arguments)
        except BaseException as error:
            for turn in self._turns:
                turn.stopped(error)
            raise
        finally:
            lock.release()

    def _look_closer(self, arguments: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...]:
        """Something has happened since the last call: check what a turn rests on, or plan anew."""
        device = self.device
        if not all(map(_is_plain, arguments, self._ports)):
            return self.queue(arguments)
        if not device.needs_attention():
            for turn in self._turns:
                if turn.is_unheld() and turn.is_free() and turn.again(arguments):
                    return turn.outputs()
        return self._first_time(arguments)

    def _first_time(self, arrays: tuple[Array, ...]) -> Tensor | tuple[Tensor, ...]:
        """Plan and run by way of the queue; keep the plan where it can take turns."""
        device = self.device
        device.check_open()
        device.flush()
        outputs = self.queue(arrays, borrow=True)
        device.flush()
        handles = outputs if isinstance(outputs, tuple) else (outputs,)
        ready = device.last_ready
        if ready is not None and not device.hooks.active and can_take_turns(ready):
            self._turns = [t for t in self._turns if t.is_whole()][: MAX_TURNS - 1]
            self._turns.append(Turn(device, ready, handles, self._ports))
        return outputs

    def queue(
        self, arguments: Sequence[Any], *, borrow: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """Queue the chain as ordinary calls; gives the last program's outputs, pending."""
        given: dict[tuple[int, int], Any] = dict(zip(self.inputs, arguments, strict=True))
        held: dict[tuple[int, int], Tensor] = {}
        outputs: tuple[Tensor, ...] = ()
        for stage, program in enumerate(self.programs):
            inputs = []
            for index in range(len(program.ports)):
                source = self._feeds.get((stage, index))
                if source is None:
                    inputs.append(given[stage, index])
                elif self._last_readers[source] == (stage, index):
                    inputs.append(held.pop(source))
                else:
                    inputs.append(held[source])
            made = self.device.submit(program, inputs, borrow)
            outputs = made if isinstance(made, tuple) else (made,)
            held |= {(stage, o): tensor for o, tensor in enumerate(outputs)
                     if (stage, o) in self._last_readers}  # fmt: skip
        return outputs[0] if len(outputs) == 1 else outputs

    def _arrange(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Array, ...]:
        names = self.input_names
        given = dict(zip(names, arguments, strict=False))
        unknown = sorted(named.keys() - set(names))
        twice = sorted(given.keys() & named.keys())
        given.update(named)
        missing = [name for name in names if name not in given]
        if missing or unknown or twice or len(arguments) > len(names):
            raise UsageError(
                "wrong inputs for the pipeline"
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + (f"; surplus: {', '.join(unknown)}" if unknown else "")
                + (f"; given twice: {', '.join(twice)}" if twice else ""),
                expected=", ".join(names),
                got=f"{len(arguments)} by position, {len(named)} by name",
            )
        return tuple(given[name] for name in names)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs; one that several programs use is told apart by its program."""
        names = [p.name for p in self._ports]
        times = Counter(names)
        return tuple(
            name if times[name] == 1 else f"{self.programs[s].name}.{name}"
            for name, (s, _) in zip(names, self.inputs, strict=True)
        )


def _is_plain(argument: Any, port: InputPort) -> bool:
    """Whether it is an array of just the described type and shape."""
    return (
        type(argument) is np.ndarray
        and argument.dtype is port.dtype
        and argument.shape == port.shape
    )
