"""`stitch-inspect`: print the contents of a file, or the cost of stitching several modules.

Of one `.ttb` file it prints versions, machine, slots, operations, memory and sizes; of several the
plan of one pass without data. `--check_plan` checks the certificates of plans, `--diff` compares
the copies of two runs.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stitch import api
from stitch.cli.command import (
    EXIT_FAILURE,
    EXIT_OK,
    Command,
    say,
    say_result,
)
from stitch.cli.describe import (
    SECTIONS,
    describe,
    describe_symbolic,
    head_lines,
    program_lines,
    symbolic_lines,
)
from stitch.cli.module_files import (
    ModuleFile,
    lacking_lines,
    machine_for,
    read_document,
    read_file,
    read_modules,
    with_unique_names,
)
from stitch.cli.options import FUNCTION_OPTION, WIRE_OPTION
from stitch.cli.parser import add_options, count, make_parser
from stitch.cli.phases import phase
from stitch.cli.rehearsal import Advice, advise, rehearse
from stitch.cli.run_comparison import compare_files
from stitch.cli.wiring import wires_of
from stitch.errors import Problem, UsageError
from stitch.linker import LinkReport, Wire, check_link
from stitch.machine import Machine
from stitch.option_values import INDUCTOR, TORCH_DEVICES
from stitch.planner import Plan, check_plan
from stitch.report import Budget, CopyLine, counted, plan_peaks, read_record
from stitch.runtime import make_executor
from stitch.ttb import Binary, SymbolicBinary

# `stitch-inspect a.ttb b.ttb`: the cost of stitching, and advice.


@dataclass(frozen=True, slots=True)
class Stitching:
    """The links, plans and costs of one pass over several modules, with compile advice.

    `lacking` lists properties of foreign binaries that Stitch does not represent.
    """

    machine: str
    links: tuple[LinkReport, ...]
    copies: tuple[CopyLine, ...]
    advice: Advice | None
    peaks: tuple[tuple[str, int], ...]
    plans: tuple[Plan, ...]
    lacking: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Return the number of copies in one pass."""
        return sum(line.times for line in self.copies)

    @property
    def nbytes(self) -> int:
        """Return the bytes of these copies."""
        return sum(line.times * line.nbytes for line in self.copies)

    @property
    def seconds(self) -> float:
        """Return their simulated seconds."""
        return sum(line.times * line.seconds for line in self.copies)


def stitching(modules: Sequence[ModuleFile], wires: Sequence[Wire], machine: Machine) -> Stitching:
    """Plan one pass without data, and search for a layout of a slot that saves copies.

    Raises `LinkError` if modules do not fit each other, `OutOfMemoryError` if they exceed memory.
    """
    reports = tuple(_report(modules, one) for one in wires)
    now = rehearse(modules, wires, machine)
    plans = tuple(plan for plan, _ in now.plans)
    most = tuple((space.value, size) for space, size in plan_peaks(plans).items())
    advice = advise(modules, wires, machine, now)
    lacking = tuple(lacking_lines(modules))
    return Stitching(machine.name, reports, now.copies, advice, most, plans, lacking)


def _report(modules: Sequence[ModuleFile], one: Wire) -> LinkReport:
    producer, consumer = modules[one.producer].program, modules[one.consumer].program
    return check_link(
        producer.output_desc(one.output),
        consumer.input_desc(one.input),
        output=f"{producer.name}.{producer.outputs[one.output].name}",
        input=f"{consumer.name}.{consumer.inputs[one.input].name}",
    )


def stitching_json(result: Stitching) -> dict[str, Any]:
    """Return the result as plain data."""
    advice = result.advice
    return {
        "machine": result.machine,
        "can_be_stitched": True,
        "links": [
            {"output": r.output, "input": r.input, "conversions": list(r.conversions),
             "changes_type": r.changes_type}
            for r in result.links
        ],
        "copies": [asdict(copy) for copy in result.copies],
        "copy_count": result.count,
        "copy_nbytes": result.nbytes,
        "copy_seconds": result.seconds,
        "peak_bytes_per_bank": dict(result.peaks),
        "advice": [] if advice is None else [advice.line],
        "advice_adds": None if advice is None else asdict(advice.adds),
        "lacking": list(result.lacking),
    }  # fmt: skip


def stitching_lines(result: Stitching) -> list[str]:
    """Return the result as text."""
    out = [
        f"can be stitched on {result.machine}: {counted(result.count, 'copy', 'copies')}, "
        f"{result.nbytes} B, {result.seconds * 1e6:.1f} us simulated in one pass"
    ]
    out += [f"  link {report.text()}" for report in result.links]
    for line in result.copies:
        out += [f"  {line.text()}", f"    {line.reason}"]
    out += [f"  peak {space}: {size} B per bank" for space, size in result.peaks]
    if result.advice is not None:
        out.append(f"  advice: {result.advice.line}")
    out += [f"  simplified: {line}" for line in result.lacking]
    return out


EXAMPLES = """\
  stitch-inspect a.ttb
  stitch-inspect a.ttb --section=operations
  stitch-inspect a.ttb --json --verify=full
  stitch-inspect a.ttb b.ttb                 can they be stitched, and at what cost?
  stitch-inspect a.ttb b.ttb --check-plan
  stitch-inspect a.ttnn b.ttb                binaries of tt-mlir
  stitch-inspect --diff old.json new.json --max-added-bytes=0
  stitch-inspect --check-plan=run.json       a record of stitch-run --record=run.json"""

#: Executors that compute some operators by way of the host.
EXECUTORS = ("cuda", *TORCH_DEVICES, *(name + INDUCTOR for name in TORCH_DEVICES))
#: Lines that a check of plans prints at most.
MAX_LINES = 20


def command() -> Command:
    """Return `stitch-inspect` with its options."""
    parser = make_parser(
        "Show .ttb and .ttnn files, and what stitching costs.",
        EXAMPLES,
    )
    parser.add_argument("modules", nargs="*", metavar="FILE", help=".ttb and .ttnn files, in order")
    add_options(
        parser,
        ("--section", {"action": "append", "choices": (*SECTIONS, "all"),
                       "help": "a section of each program to print; may be repeated "
                       "(default: inputs, outputs, memory)"}),
        ("--executor", {"choices": EXECUTORS, "dest": "for_executor",
                        "help": "list the operators that it computes by way of the host (needs "
                        "torch, no card)"}),
        ("--verify", {"choices": ("metadata", "full"), "default": "metadata",
                      "help": "full: also read the constants and check their checksums"}),
        FUNCTION_OPTION,
        WIRE_OPTION,
        ("--device", {"metavar": "NAME|machine.yaml|.ttsys",
                      "help": "the machine to plan for (default: the first module's)"}),
        ("--check_plan", {"nargs": "?", "const": "", "metavar": "run.json",
                          "help": "check the certificates of the plans of a record, or of the "
                          "plan for the modules; exit code 6 if one is wrong"}),
        ("--diff", {"nargs": 2, "metavar": ("old.json", "new.json"),
                    "help": "compare the copies of two records of runs"}),
        ("--max_added_bytes", {"type": count, "metavar": "N",
                               "help": "with --diff: exit code 7 if more bytes are added"}),
    )  # fmt: skip
    return Command(parser.read, _inspect)


def _inspect(options: argparse.Namespace) -> int:
    record = options.check_plan
    if options.diff is not None:
        if options.modules or record is not None:
            raise UsageError("--diff compares two files: no modules, no --check_plan")
        most = options.max_added_bytes
        budgets = () if most is None else (Budget("bytes", "added", most),)
        return compare_files(options.diff, budgets, "json" if options.json else "text")
    if options.max_added_bytes is not None:
        raise UsageError("--max_added_bytes is for --diff")
    if record is not None and record.endswith(".ttb"):
        raise UsageError(
            f"--check_plan takes a record, not {record}",
            remedy="write --check_plan after the modules",
        )
    if record:
        if options.modules:
            raise UsageError("--check_plan takes a record or modules, not both")
        return _check(dict(read_document(record, read_record).plans), options.json)
    if not options.modules:
        raise UsageError("there is nothing to inspect", expected=".ttb and .ttnn files")
    if len(options.modules) == 1 and record is None:
        if options.wire or options.device or options.function:
            raise UsageError("--wire, --device and --function are for several modules")
        return _show(options)
    if options.for_executor is not None:
        raise UsageError("--executor is for one module")
    return _stitch(options)


def _show(options: argparse.Namespace) -> int:
    path = options.modules[0]
    binary = read_file(path, options.verify)
    sizes = api.inspect_sizes(binary if path == "-" else path)
    asked = options.section or ["inputs", "outputs", "memory"]
    sections = SECTIONS if "all" in asked else tuple(s for s in SECTIONS if s in asked)
    if isinstance(binary, SymbolicBinary):
        if options.for_executor is not None:
            raise binary.needs_sizes(path)
        described = describe_symbolic(binary, sizes, sections)
    else:
        described = describe(binary, sizes, sections)
    if isinstance(binary, Binary) and options.for_executor is not None:
        executor = make_executor("torch:cpu")
        for program, facts in zip(binary.programs, described["programs"], strict=True):
            if not program.is_opaque:
                facts["by_way_of_the_host"] = list(executor.left_to_host(program, binary.machine))
    has_checksums = isinstance(binary, SymbolicBinary) or binary.origin is None
    if options.verify == "full" and has_checksums:
        described["verified"] = "full"
    if options.json:
        say(json.dumps(described, indent=2))
        return EXIT_OK
    lines = head_lines("standard input" if path == "-" else path, described)
    for program in described["programs"]:
        lines += program_lines(program, options.for_executor)
    if "symbolic" in described:
        lines += symbolic_lines(described["symbolic"])
    if options.verify == "full":
        lines.append(
            "all checksums match"
            if has_checksums
            else "the file has no checksums: its structure is valid, changed bytes are not detected"
        )
    say("\n".join(lines))
    return EXIT_OK


def _stitch(options: argparse.Namespace) -> int:
    modules = with_unique_names(
        read_modules(options.modules, options.function, verify=options.verify)
    )
    wires = wires_of(modules, options.wire)
    with phase("planning, and searching for a better layout"):
        stitched = stitching(modules, wires, machine_for(options.device, modules))
    if options.check_plan is not None:
        return _check(dict(enumerate(stitched.plans, 1)), options.json)
    say_result(stitching_json(stitched), lambda: stitching_lines(stitched))
    return EXIT_OK


def _check(plans: dict[int, Plan], as_json: bool) -> int:
    """Print the problems of all plans; return exit code 6 if there is one."""
    problems_of = {index: check_plan(plan) for index, plan in sorted(plans.items())}
    kinds_of = {
        index: Counter(s.certificate.kind for s in plan.copies if s.certificate is not None)
        for index, plan in plans.items()
    }
    wrong = sum(len(problems) for problems in problems_of.values())
    if as_json:
        body: dict[str, Any] = {
            "sound": not wrong,
            "plans": [
                {
                    "plan": index,
                    "steps": len(plans[index].steps),
                    "certificates": kinds_of[index].total(),
                    "kinds": dict(sorted(kinds_of[index].items())),
                    "gap": plans[index].gap,
                    "problems": list(map(asdict, problems)),
                }
                for index, problems in problems_of.items()
            ],
        }
        say(json.dumps(body, indent=2))
        return EXIT_FAILURE if wrong else EXIT_OK
    say("\n".join(_check_lines(plans, problems_of, kinds_of)))
    return EXIT_FAILURE if wrong else EXIT_OK


def _check_lines(
    plans: Mapping[int, Plan], problems_of: Mapping[int, Sequence[Problem]],
    kinds_of: Mapping[int, Counter[str]],
) -> list[str]:  # fmt: skip
    """Return one line per group of plans with equal facts, those with problems first."""
    grouped: dict[tuple[bool, str], list[int]] = {}
    for index, problems in problems_of.items():
        facts = f"{counted(len(plans[index].steps), 'step')}, "
        facts += _of_kinds("certificate", kinds_of[index])
        gap = plans[index].gap
        if plans[index].is_by_prediction:
            facts += ", chosen by predicted uses"
        elif gap is None:
            facts += ", no bound known"
        elif gap > 0:
            facts += f", at most {gap:.1%} over the least simulated time"
        verdict = _of_kinds("problem", Counter(p.kind for p in problems)) if problems else "sound"
        grouped.setdefault((not problems, f"{facts}: {verdict}"), []).append(index)
    lines = []
    groups = sorted(grouped.items(), key=lambda group: (group[0][0], group[1]))
    for (_, text), (first, *others) in groups[:MAX_LINES]:
        more = f" and {len(others)} like it" if others else ""
        lines.append(f"plan {first}{more}: {text}")
        for kind, times in Counter(p.kind for p in problems_of[first]).items():
            problem = next(p for p in problems_of[first] if p.kind == kind)
            lines.append(f"  - {problem}" + (f", and {times - 1} more" if times > 1 else ""))
    hidden = [index for _, others in groups[MAX_LINES:] for index in others]
    if hidden:
        unsound = sum(bool(problems_of[index]) for index in hidden)
        many = counted(len(hidden), "more plan")
        lines.append(f"and {many}, {unsound or 'none'} with problems (--json lists them)")
    return lines


def _of_kinds(what: str, kinds: Counter[str]) -> str:
    """Return the total and the count of each kind.

    >>> _of_kinds("certificate", Counter(["cycle", "capacity", "cycle"]))
    '3 certificates (1 capacity, 2 cycle)'
    """
    each = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return counted(kinds.total(), what) + (f" ({each})" if each else "")
