"""`explain`: every copy of a device with bytes, simulated time and reason; and its memory contents.

`Footprint.own_nbytes` defines the size of a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from stitch.machine import footprint
from stitch.memory import LENT_ADDRESSES
from stitch.planner import (
    LEAST,
    Allocate,
    Buffer,
    Copy,
    CostCertificate,
    Execute,
    Plan,
    Relocate,
    memory_rise,
)
from stitch.program import Space
from stitch.runtime import Account, RuntimeDevice, Totals
from stitch.tasks import Transformation, TransformationKind

WRITTEN = "the host overwrote a tensor"


@dataclass(frozen=True, slots=True)
class CopyLine:
    """One copy: its bytes and simulated seconds, how often it ran, and why.

    `producer` names the slot that wrote the tensor, `consumer` the slot that reads the copy, or the
    program for which an eviction or a move makes room; each with the line of the user's source, if
    it is known. These do not count when lines are compared.
    """

    kind: str  # copy, evict, move, bounce, write
    source: str
    target: str
    nbytes: int
    seconds: float
    times: int
    reason: str
    certificate: str | None
    producer: str = field(default="", compare=False)
    producer_location: str = field(default="", compare=False)
    consumer: str = field(default="", compare=False)
    consumer_location: str = field(default="", compare=False)

    def text(self, width: int = 0) -> str:
        """Return all but the reason in one line; the kind takes at least `width` characters."""
        proof = f" [{self.certificate}]" if self.certificate else ""
        return (
            f"{self.kind:{width}} x{self.times} {self.nbytes} B {self.seconds * 1e6:.1f} us  "
            f"{self.source} -> {self.target}{proof}"
        )

    @property
    def location(self) -> str:
        """Return the source line of the consumer, else of the producer, else nothing."""
        return self.consumer_location or self.producer_location

    def link_text(self) -> str:
        """Return the producer and the consumer with their source lines, as far as known.

        >>> CopyLine("copy", "l1", "dram", 4, 0.0, 1, "", None, "output 'y' of 'a'", "a.yaml:7",
        ...          "input 'x' of 'b'").link_text()
        "output 'y' of 'a' (a.yaml:7) -> input 'x' of 'b'"
        """
        ends = [(self.consumer, self.consumer_location)]
        if self.producer != self.consumer:  # Equal for an array that the caller passes.
            ends.insert(0, (self.producer, self.producer_location))
        return " -> ".join([f"{name} ({at})" if at else name for name, at in ends if name])


def copy_lines(plans: Iterable[tuple[Plan, int]]) -> tuple[CopyLine, ...]:
    """Return the copies of plans in order, with one line for equal copies of several plans."""
    plans = tuple(plans)
    lines: dict[tuple[Any, ...], CopyLine] = {}
    origins = _origins(plan for plan, _ in plans)
    for plan, times in plans:
        buffers = {buffer.number: buffer for buffer in plan.request.buffers}
        buffers |= {s.buffer.number: s.buffer for s in plan.steps if isinstance(s, Allocate)}
        for step, consumer in _with_consumers(plan):
            for line in _lines(step, plan, buffers, origins, consumer):
                key = (line.kind, line.source, line.target, line.nbytes, line.reason,
                       line.certificate)  # fmt: skip
                earlier = lines.get(key, line)
                lines[key] = replace(earlier, times=earlier.times + times)
    return tuple(lines.values())


#: A slot or a program, and its source location; both may be empty.
_End: TypeAlias = tuple[str, str]
_UNKNOWN: _End = ("", "")


def _origins(plans: Iterable[Plan]) -> dict[str, str]:
    """Return the source locations of outputs, by the origin of their buffers."""
    transformations = {
        task.transformation.key: task.transformation for plan in plans for task in
        plan.request.tasks
    }  # fmt: skip
    return {
        f"output {one.output_name(index)!r} of {one.name!r}": location
        for one in transformations.values()
        for index, location in enumerate(one.output_locations)
    }


def _with_consumers(plan: Plan) -> Iterator[tuple[Copy | Relocate, _End]]:
    """Yield the copies of a plan in order, with the input or the program that needs each."""
    consumers: dict[int, _End] = {}
    waiting: list[int] = []
    for number, step in enumerate(plan.steps):
        if isinstance(step, Execute):
            one = plan.request.tasks[step.task].transformation
            read = {instance.buffer: at for at, instance in enumerate(step.inputs)}
            for earlier in waiting:
                copy = plan.steps[earlier]
                at = read.get(copy.target.buffer) if isinstance(copy, Copy) else None
                consumers[earlier] = _input_end(one, at)
            waiting.clear()
        elif isinstance(step, Copy) and step.made != step.value:
            consumers[number] = ("to_layout", "")
        elif isinstance(step, Copy | Relocate):
            waiting.append(number)
    for number, step in enumerate(plan.steps):
        if isinstance(step, Copy | Relocate):
            yield step, consumers.get(number, _UNKNOWN)


def _input_end(one: Transformation, index: int | None) -> _End:
    """Return an input of a transformation, or the whole for None."""
    if index is None:
        return repr(one.name), next(filter(None, one.input_locations), "")
    at = one.input_locations
    return f"input {one.input_name(index)!r} of {one.name!r}", at[index] if index < len(at) else ""


def _lines(
    step: Copy | Relocate, plan: Plan, buffers: Mapping[int, Buffer], origins: Mapping[str, str],
    consumer: _End,
) -> Iterator[CopyLine]:  # fmt: skip
    """Yield the copies of one step, with `times` 0."""
    certificate = step.certificate
    proof: str | None = None
    if certificate is not None:
        proof = str(certificate.kind)
        if isinstance(certificate, CostCertificate):
            through, free = certificate.through_seconds, certificate.free_size
            proof += f": {through * 1e6:.1f} us, less than inside {free} B free per bank"
        elif certificate.gaps:
            proof += f": {sum(certificate.pieces)} B per bank into {sum(certificate.gaps)} B"
    if isinstance(step, Copy):
        source, target = step.source.desc.text(), step.target.desc.text()
        origin = buffers[step.source.buffer].origin
        ends = (origin, origins.get(origin, ""), *consumer)
        yield CopyLine(step.kind, source, target, step.nbytes, step.seconds, 0, step.reason, proof,
                       *ends)  # fmt: skip
        return
    kind, where = "bounce" if step.stage is not None else "move", step.space.value
    for number, _ in step.targets:
        nbytes = footprint(buffers[number].desc, plan.request.machine.shape).own_nbytes
        # The step has the time of all tensors: divide it by bytes.
        part = nbytes / step.nbytes if step.nbytes else 1 / step.count
        origin = buffers[number].origin
        yield CopyLine(kind, where, where, nbytes, step.seconds * part, 0, step.reason, proof,
                       origin, origins.get(origin, ""), *consumer)  # fmt: skip


def other_lines(account: Account) -> tuple[CopyLine, ...]:
    """Return the copies outside of plans: writes of the host."""
    return tuple(
        CopyLine("write", line.source, line.target, line.nbytes, line.seconds, line.times, WRITTEN,
                 None)
        for line in account.writes
    )  # fmt: skip


def explain(device: RuntimeDevice) -> str:
    """Run the queue and describe the device's copies.

    Each distinct copy has a line with kind, count, bytes, simulated time, source and target, and a
    line with its reason. Kernel staging (layouts that only the executor uses) is separate.
    """
    account = device.account()
    total, earlier = account.total, account.earlier
    out = [
        f"{device.machine.name}: {counted(total.programs, 'program run')}, "
        f"{counted(total.copies, 'copy', 'copies')}, {total.nbytes} B, "
        f"{total.seconds * 1e6:.1f} us simulated ({account.period})"
    ]
    if total.programs:
        out.append(f"  {_programs_text(device, total, account.plans)}")
    runs, seconds = account.measured
    if device.backend.executor.captures and runs:
        each = f"{counted(runs, 'run')} as long as the shortest that was timed"
        out.append(f"  measured, launched call by call: {seconds * 1e6:.1f} us ({each})")
    if earlier.copies:
        out.append(
            f"  {counted(earlier.copies, 'copy', 'copies')} of older or failed plans, "
            f"{earlier.nbytes} B, not listed"
        )
    gaps = [plan.gap for plan, _ in account.plans]
    gap = max((g for g in gaps if g is not None), default=0.0)
    if gap > 0 and None not in gaps:
        out.append(f"  no plan for the same work saves more than {gap / (1 + gap):.1%} of its time")
    for line in (*copy_lines(account.plans), *other_lines(account)):
        out += [f"  {line.text(6)}", f"         {line.reason}"]
    for read in account.reads:
        nbytes = read.times * read.nbytes
        out.append(f"  read   x{read.times} {nbytes} B in all  {read.source} -> {read.target}")
    if total.staging_nbytes:
        out.append(f"  kernel staging: up to {total.staging_nbytes} B in the executor (no copies)")
    left = device.backend.executor.left_to_numpy
    if left:
        out.append(f"  by NumPy's kernels, by way of the host: {', '.join(sorted(left))}")
    if device.prices is not None:
        table = device.prices
        out.append(f"  kernels chosen by the prices {table.name!r} ({table.processor.text()})")
    if device.inter_op_threads > 1:
        out.append(f"  {threads_line(device, total)}")
    writes, written = account.writes_seen, account.nbytes_seen
    out.append(f"  the spaces saw {writes} writes by copies and moves, {written} B")
    out.append(f"  {host_memory_line(device)}")
    return "\n".join(out)


def threads_line(device: RuntimeDevice, total: Totals) -> str:
    """Describe the work that ran concurrently on inter-op threads, or why none did."""
    if total.beside:
        ran = f"{counted(total.beside, 'section')} ran concurrently"
        return f"{device.inter_op_threads} inter-op threads: {ran}" + (
            ", except with hooks" if device.hooks.active else ""
        )
    why = device.why_single_thread
    if why is None:
        least = f"an estimate of {LEAST:.0f} us or more"
        why = f"no plan without moves has independent sections with {least}"
    return f"{device.inter_op_threads} inter-op threads, no work ran concurrently: {why}"


def _programs_text(device: RuntimeDevice, total: Totals, plans: Sequence[tuple[Plan, int]]) -> str:
    """Describe the simulated time of the programs."""
    machine = device.machine
    if machine.compute is None:
        return f"the time of programs is not counted: {machine.name!r} has no compute rates"
    if total.programs and not total.program_seconds:
        return "the time of programs is unknown: they are opaque"
    unknown = sum(times * len(opaque_programs_of(plan)) for plan, times in plans)
    text = f"the programs themselves: {total.program_seconds * 1e6:.1f} us simulated"
    return text if not unknown else f"{text}, without {counted(unknown, 'run')} of opaque programs"


def totals_json(period: str, total: Totals) -> dict[str, Any]:
    """Return totals as plain data."""
    return {"period": period, "programs": total.programs, "copies": total.copies,
            "nbytes": total.nbytes, "entries": total.entries, "seconds": total.seconds,
            "program_seconds": total.program_seconds}  # fmt: skip


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun.

    >>> counted(1, "copy", "copies"), counted(2, "run")
    ('1 copy', '2 runs')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def programs_of(plan: Plan) -> list[str]:
    """Return the names of the programs that a plan runs."""
    works = (task.transformation for task in plan.request.tasks)
    return [work.name for work in works if work.kind is TransformationKind.PROGRAM]


def opaque_programs_of(plan: Plan) -> list[str]:
    """Return the programs of a plan without simulated time, on a machine with compute rates."""
    works = (task.transformation for task in plan.request.tasks)
    return [work.name for work in works
            if work.kind is TransformationKind.PROGRAM and not work.seconds]  # fmt: skip


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan's copies as plain data."""
    return {
        "seconds": plan.seconds,
        "program_seconds": plan.program_seconds,
        "tasks": [task.transformation.name for task in plan.request.tasks],
        "programs": programs_of(plan),
        "copies": [asdict(line) for line in copy_lines([(plan, 1)])],
    }


def _view(device: RuntimeDevice, space: Space) -> dict[str, Any]:
    use, shape = device.memory_use()[space], device.machine.shape.space(space)
    table = [
        {"address": address, "size": size, "allocated": True, "tensor": origin}
        for address, size, origin in use.buffers
    ] + [
        {"address": address, "size": size, "allocated": False, "tensor": ""}
        for address, size in use.holes
    ]
    return {
        "num_banks": shape.banks,
        "total_bytes_per_bank": shape.capacity,
        "total_bytes_allocated_per_bank": use.used_nbytes,
        "total_bytes_free_per_bank": use.free_nbytes,
        "total_bytes_leased_per_bank": use.leased_nbytes,
        "largest_contiguous_bytes_free_per_bank": use.largest_hole,
        "block_table": sorted(table, key=lambda entry: int(str(entry["address"]))),
    }


def memory_views(device: RuntimeDevice) -> dict[str, dict[str, Any]]:
    """Return the contents of every space by name, as of one moment."""
    with device.at_rest():
        return {space.value: _view(device, space) for space in device.machine.shape.spaces}


def host_memory_line(device: RuntimeDevice) -> str:
    """Describe the peak and the limit of host memory."""
    return (
        f"host memory: at most {device.peak_nbytes} B claimed, {device.allowed_nbytes} B allowed "
        "to all devices of the process"
    )


def memory_report(device: RuntimeDevice) -> str:
    """Return the contents of spaces as text: a line per space and per buffer, and host memory."""
    out = []
    for name, view in memory_views(device).items():
        out.append(
            f"{name}: {counted(view['num_banks'], 'bank')} x {view['total_bytes_per_bank']} B, "
            f"{view['total_bytes_allocated_per_bank']} B allocated, "
            f"{view['total_bytes_free_per_bank']} B free, largest hole "
            f"{view['largest_contiguous_bytes_free_per_bank']} B (per bank){_leased(view)}"
        )
        out += [
            f"  {entry['address']:#010x} {entry['size']:>9} B  {entry['tensor']}"
            for entry in view["block_table"]
            if entry["allocated"]
        ]
    return "\n".join([*out, host_memory_line(device)])


def _leased(view: dict[str, Any]) -> str:
    """Describe the free memory that is reserved for output slots."""
    nbytes = view["total_bytes_leased_per_bank"]
    return f", {nbytes} B of the free leased" if nbytes else ""


def plan_peaks(plans: Iterable[Plan]) -> dict[Space, int]:
    """Return the largest bytes per bank of any plan at one time, by space (scratch included).

    They include the buffers that the plan found when it was made.
    """
    largest: Counter[Space] = Counter()
    for plan in plans:
        used = memory_rise(plan)
        for buffer in plan.request.buffers:
            if buffer.address is not None:
                used[buffer.space] += buffer.size_per_bank
        largest |= used
    return largest


def peaks_of(device: RuntimeDevice) -> dict[str, int]:
    """Return the peaks of the period's plans and of present memory, in bytes per bank by space.

    A plan that runs in the steady state is looked at again only if memory was allocated or freed,
    or more of its own results are held than before. So results of several plans are not counted
    together if they were first held at different times, later in the same buffers at one time, and
    dropped since.
    """
    used = Counter({space: use.used_nbytes for space, use in device.memory_use().items()})
    with device.lock:
        used |= device.records.peaks
    return {space.value: size for space, size in used.items()}


# Buffers before and after a plan.

#: A space and an address in it.
Place = tuple[Space, int]


def touched_at_start(plan: Plan) -> dict[Place, Buffer]:
    """Return the buffers that exist before a plan and that it reads, moves or frees."""
    return touched_buffers(plan, plan.request.buffers)


def touched_buffers(plan: Plan, buffers: Iterable[Buffer]) -> dict[Place, Buffer]:
    """Return the buffers that a plan reads, moves, frees or allocates, by address."""
    others = {b.number for b in plan.request.buffers} - plan.touched
    return {
        (b.space, b.address): b
        for b in buffers
        if b.address is not None and b.address < LENT_ADDRESSES and b.number not in others
    }
