"""The data of a report page: a record, reduced to what the page shows.

Plans are stored once and runs refer to them; consecutive equal passes are stored once with their
number. `page.js` expands plans and runs. Texts are numbers into `texts`, spaces into `spaces`.

    plans:  {"works": [[name, kind, seconds, [input name], [output name]]], "steps": [Step],
             "buffers": [Buffer]}, which the plan reads, moves or frees
    Buffer: [number, space, address | -1 (outside the spaces), size per bank, desc, origin]
    Step:   [0, Buffer]                                                             allocate
            [1, buffer]                                                             free
            [2, kind, source buffer, target buffer, source desc, target desc, nbytes, seconds,
             reason, Proof | 0, advice | -1]                                        copy
            [3, space, [[buffer, address, nbytes]], stage space | -1, nbytes, seconds, reason,
             Proof | 0, [[space, address, space, address, nbytes]]]                 relocate
            [4, work, [input buffer], [input desc], [output buffer], [output desc],
             [space, address, size] | 0]                                            execute
    Proof:  [kind, pieces, gaps, cyclic size, free size, seconds through another space, seconds of
            moving the cyclic bytes once inside]
    locations: [[origin, location in the user's source]]
    kinds:  the distinct events: [0, space, address, size, origin] reserved, [1, space, address,
            size] freed, [2, plan] run, [3, plan, [step]] stopped after these steps, [4, nbytes,
            desc, seconds] written by the host, [5, nbytes, desc] read by the host
    events: [[times, [number into kinds]]]
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

from stitch.errors import FormatError
from stitch.graph import placement_between
from stitch.machine import footprint
from stitch.memory import LENT_ADDRESSES
from stitch.planner import Allocate, Buffer, Copy, CostCertificate, Execute, Free, Plan, Relocate
from stitch.program import Space, TensorDesc
from stitch.report.run_record import RunRecord

Packed: TypeAlias = list[Any]
#: The location of an operation in a file that `stitch-compile` takes.
_SOURCE = re.compile(r"(.+\.(?:yaml|yml|onnx))(?::.*)?")
#: Texts longer than this are cut in the middle.
MAX_TEXT = 20_000
#: Longest repeated sequence of events that is looked for, and the least number of repeats.
_PERIOD, _REPEATS = 512, 2
#: How many later occurrences of an event may begin the next pass.
_TRIALS = 4


def page_data(record: RunRecord) -> dict[str, Any]:
    """Return the data of a record; raise `FormatError` for an event that is malformed."""
    return _Packer(record).data()


@final
class _Packer:
    """Numbers texts, plans and events of one record."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._shape = record.machine.shape
        self._spaces = tuple(self._shape.spaces)
        self._numbers = {space.value: at for at, space in enumerate(self._spaces)}
        self._texts: dict[str, int] = {}
        self._descs: dict[TensorDesc, int] = {}
        self._advice: dict[tuple[str, TensorDesc, TensorDesc], int] = {}

    def data(self) -> dict[str, Any]:
        record = self._record
        spaces = [(space.value, self._shape.space(space)) for space in self._spaces]
        numbers = {index: at for at, index in enumerate(record.plans)}
        plans = [self._plan(plan) for plan in record.plans.values()]
        kinds: dict[tuple[Any, ...], int] = {}
        order = []
        for at, event in enumerate(record.events):
            try:
                kind = self._event(event, numbers)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise FormatError(
                    f"malformed event: {type(error).__name__} {error}"[:200], where=f"events[{at}]"
                ) from error
            order.append(kinds.setdefault(kind, len(kinds)))
        return {
            "machine": self._text(record.machine.shape.name),
            "spaces": [
                [name, shape.banks, shape.base, shape.limit, shape.alignment]
                for name, shape in spaces
            ],
            "plans": plans, "kinds": list(kinds), "events": fold(order),
            "totals": [record.cost.copies, record.cost.nbytes, record.cost.seconds,
                       record.cost.program_seconds],
            "least_seconds": self._least_seconds(), "locations": self._locations(),
            "texts": list(self._texts),
        }  # fmt: skip

    def _least_seconds(self) -> float:
        """Return the sum of the lower bounds of all runs, 0 if that of one is unknown."""
        total = 0.0
        for event in self._record.events:
            if event.get("event") == "run":
                plan = self._record.plans[event["plan"]]
                if plan.seconds and not plan.least_seconds:
                    return 0.0
                total += plan.least_seconds
        return total

    def _locations(self) -> list[tuple[int, int]]:
        """Return the origins of buffers whose slots have a source location, with these."""
        found: dict[str, str] = {}
        for plan in self._record.plans.values():
            for task in plan.request.tasks:
                one = task.transformation
                for i, place in enumerate(one.input_locations):
                    found.setdefault(f"input {one.input_name(i)!r} of {one.name!r}", place)
                for i, place in enumerate(one.output_locations):
                    found.setdefault(f"output {one.output_name(i)!r} of {one.name!r}", place)
        return [(self._text(origin), self._text(at)) for origin, at in found.items() if at]

    def _text(self, text: str) -> int:
        if len(text) > MAX_TEXT:
            text = f"{text[: MAX_TEXT // 2]} ... {text[-MAX_TEXT // 2 :]}"
        return self._texts.setdefault(text, len(self._texts))

    def _desc(self, desc: TensorDesc) -> int:
        number = self._descs.get(desc)
        if number is None:
            number = self._descs[desc] = self._text(desc.text())
        return number

    def _space(self, space: Space) -> int:
        return self._numbers[space.value]

    def _event(self, event: Mapping[str, Any], plans: Mapping[int, int]) -> tuple[Any, ...]:
        kind = event.get("event")
        if kind in ("reserve", "free"):
            space, address = self._numbers[event["space"]], int(event["address"])
            place = space, address, int(event["size_per_bank"])
            if kind == "free":
                return 1, *place
            return 0, *place, self._text(str(event.get("origin", "")))
        if kind == "run":
            return 2, plans[event["plan"]]
        if kind == "stopped":
            steps = event["steps"]
            done = range(steps) if isinstance(steps, int) else steps
            count = len(self._record.plans[event["plan"]].steps)
            if any(not 0 <= step < count for step in done):
                raise ValueError(f"a step of {count}")
            return 3, plans[event["plan"]], tuple(done)
        if kind == "write":
            seconds = float(event.get("seconds", 0.0))
            return 4, int(event["nbytes"]), self._text(str(event["desc"])), seconds
        if kind == "read":
            return 5, int(event["nbytes"]), self._text(str(event["desc"]))
        raise ValueError(f"{kind!r} is no event")

    # -- plans -------------------------------------------------------------------------------------

    def _plan(self, plan: Plan) -> dict[str, Any]:
        buffers = {buffer.number: buffer for buffer in plan.request.buffers}
        buffers |= {s.buffer.number: s.buffer for s in plan.steps if isinstance(s, Allocate)}
        works = [task.transformation for task in plan.request.tasks]
        return {
            "works": [
                [self._text(w.name), w.kind.value, w.seconds,
                 [self._text(w.input_name(i)) for i in range(len(w.inputs))],
                 [self._text(w.output_name(o)) for o in range(len(w.outputs))]]
                for w in works
            ],
            # The others may lie elsewhere by now: a plan is independent of them.
            "buffers": [self._buffer(buffer) for buffer in plan.request.buffers
                        if buffer.address is None or buffer.number in plan.touched],
            "steps": [self._step(step, at, plan, buffers) for at, step in enumerate(plan.steps)],
        }  # fmt: skip

    def _buffer(self, buffer: Buffer) -> Packed:
        address = buffer.address
        if address is None or address >= LENT_ADDRESSES:
            address = -1
        return [buffer.number, self._space(buffer.space), address, buffer.size_per_bank,
                self._desc(buffer.desc), self._text(buffer.origin)]  # fmt: skip

    def _step(self, step: Any, at: int, plan: Plan, buffers: Mapping[int, Buffer]) -> Packed:
        if isinstance(step, Allocate):
            return [0, self._buffer(step.buffer)]
        if isinstance(step, Free):
            return [1, step.buffer]
        if isinstance(step, Copy):
            return [2, self._text(step.kind), step.source.buffer, step.target.buffer,
                    self._desc(step.source.desc), self._desc(step.target.desc), step.nbytes,
                    step.seconds, self._text(step.reason), self._proof(step),
                    self._advised(step, at, plan, buffers)]  # fmt: skip
        if isinstance(step, Relocate):
            targets = [
                [number, address, footprint(buffers[number].desc, self._shape).own_nbytes]
                for number, address in step.targets
            ]
            stage = -1 if step.stage is None else self._space(step.stage_space)
            ways = [[self._space(t.source_space), t.source_address, self._space(t.target_space),
                     t.target_address, t.nbytes] for t in step.transfers]  # fmt: skip
            return [3, self._space(step.space), targets, stage, step.nbytes, step.seconds,
                    self._text(step.reason), self._proof(step), ways]  # fmt: skip
        scratch: Packed | int = 0
        if step.scratch is not None and step.scratch[2]:
            scratch = [self._space(step.scratch[0]), *step.scratch[1:]]
        return [4, step.task, [i.buffer for i in step.inputs],
                [self._desc(i.desc) for i in step.inputs], [i.buffer for i in step.outputs],
                [self._desc(i.desc) for i in step.outputs], scratch]  # fmt: skip

    def _proof(self, step: Copy | Relocate) -> Packed | int:
        proof = step.certificate
        if proof is None:
            return 0
        if isinstance(proof, CostCertificate):
            assert isinstance(step, Relocate)
            size, banks = proof.cyclic_size, self._shape.space(step.space).banks
            inside = self._record.machine.seconds(step.space, step.space, size * banks, size)
            return [proof.kind, proof.pieces, (), size, proof.free_size, proof.through_seconds,
                    inside]  # fmt: skip
        return [proof.kind, proof.pieces, proof.gaps, 0, 0, 0.0, 0.0]

    def _advised(self, step: Copy, at: int, plan: Plan, buffers: Mapping[int, Buffer]) -> int:
        """Return the command that compiles the reader of a copy for what is there, or -1."""
        outside = step.source.buffer in plan.request.entering()
        if step.kind != "copy" or outside or buffers[step.source.buffer].address is None:
            return -1
        for later in plan.steps[at + 1 :]:
            if isinstance(later, Execute):
                slots = [i for i, x in enumerate(later.inputs) if x.buffer == step.target.buffer]
                work = plan.request.tasks[later.task].transformation
                if slots and work.kind.value == "program" and slots[0] < len(work.inputs):
                    slot = work.input_name(slots[0])
                    places = (*work.input_locations, *work.output_locations)
                    source = next((s[1] for at in places if (s := _SOURCE.fullmatch(at))), "")
                    # "layer in b.ttb" is the program `layer` of this file.
                    name = work.name.rpartition(" in ")[2].removesuffix(".ttb")
                    return self._advice_for(name, slot, step.target.desc, step.source.desc, source)
        return -1

    def _advice_for(
        self, program: str, slot: str, have: TensorDesc, want: TensorDesc, source: str
    ) -> int:
        key = f"{program}.{slot}", have, want
        if key not in self._advice:
            options = placement_between("input", slot, have.layout, want.layout)
            sets = [word for option in options for word in ("--set", option.text())]
            command = [
                "stitch-compile",
                source or "SOURCE",
                *sets,
                "-o",
                f"{program}.ttb",
            ]
            self._advice[key] = self._text(shlex.join(command)) if sets else -1
        return self._advice[key]


def fold(order: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return a sequence as (times, part), where equal parts in a row are one.

    >>> fold([7, 1, 2, 1, 2, 1, 2, 9])
    [(1, [7]), (3, [1, 2]), (1, [9])]
    """
    order = list(order)
    following = _following(order)
    folded: list[tuple[int, list[int]]] = []
    at = 0
    while at < len(order):
        soon = 0 <= following[at] <= at + _PERIOD
        period, times = _repeat(order, at, following) if soon else (1, 1)
        part = order[at : at + period]
        if times == 1 and folded and folded[-1][0] == 1:
            folded[-1][1].extend(part)
        else:
            folded.append((times, part))
        at += period * times
    return folded


def _following(order: Sequence[int]) -> list[int]:
    """Return where each element occurs next, -1 for the last occurrence."""
    following, last = [-1] * len(order), dict[int, int]()
    for at in range(len(order) - 1, -1, -1):
        following[at] = last.get(order[at], -1)
        last[order[at]] = at
    return following


def _repeat(order: Sequence[int], at: int, following: Sequence[int]) -> tuple[int, int]:
    """Return the length and the number of the equal parts that begin at a position."""
    best = 1, 1
    for then in _candidates(at, following):
        period, times = then - at, 1
        while order[at : at + period] == order[then : then + period]:
            times, then = times + 1, then + period
        if times >= _REPEATS and period * times > best[0] * best[1]:
            best = period, times
    return best


def _candidates(at: int, following: Sequence[int]) -> Iterable[int]:
    then: int = following[at]
    for _ in range(_TRIALS):
        if not 0 <= then <= at + _PERIOD:
            return
        yield then
        then = following[then]


def expanded(events: Iterable[tuple[int, list[int]]]) -> Iterator[int]:
    """Yield the events of `fold` one by one."""
    for times, part in events:
        for _ in range(times):
            yield from part
