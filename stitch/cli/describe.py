"""Descriptions of binaries as plain data and as text, for `stitch-inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stitch.errors import StitchError
from stitch.linker import demands
from stitch.machine import MachineShape
from stitch.program import (
    ABSENT,
    OPAQUE_DOMAIN,
    InputSlot,
    MathFidelity,
    OperationList,
    OutputSlot,
    Program,
    Space,
    TensorDesc,
    elements_text,
    has_symbols,
)
from stitch.report import counted
from stitch.runtime import check_program, make_executor, program_peak
from stitch.ttb import Binary, FileSizes, Origin, SymbolicBinary

#: The executor whose host memory is shown.
HOST_EXECUTOR = "numpy"
#: Characters of an opaque operation's text that are printed; `--json` has all of it.
MAX_TEXT = 160
SECTIONS = ("inputs", "outputs", "operations", "memory")


def describe(binary: Binary, sizes: FileSizes, sections: Sequence[str]) -> dict[str, Any]:
    """Return the binary as plain data: the head, and the selected sections of each program."""
    programs = [
        _program(p, binary.machine, sections) | _lives(binary.origin, p, sections)
        for p in binary.programs
    ]
    return {**_head(binary, sizes), "programs": programs}


def _head(binary: Binary | SymbolicBinary, sizes: FileSizes) -> dict[str, Any]:
    origin = binary.origin if isinstance(binary, Binary) else None
    return {
        "format_version": str(binary.version),
        "producer": binary.producer,
        "opset": binary.opset,
        "requires": list(binary.requires),
        "machine": machine_json(binary.machine),
        **({} if origin is None else {"origin": _origin(origin)}),
        "size": {
            name: list(size) if name == "segments" else size for name, size in asdict(sizes).items()
        },
    }


def describe_symbolic(
    binary: SymbolicBinary, sizes: FileSizes, sections: Sequence[str]
) -> dict[str, Any]:
    """Return a binary with named sizes as plain data: as `describe`, with expressions in types."""
    graph, named = binary.graph, binary.sizes

    def slots(listed: Sequence[InputSlot] | Sequence[OutputSlot]) -> list[dict[str, str]]:
        return [{"name": s.name, "type": graph.values[s.value].type.text()} for s in listed]

    program: dict[str, Any] = {
        "name": graph.name,
        "role": binary.role.value,
        "sizes": [asdict(dim) | {"example": named.hints[name]} for name, dim in named.dims.items()],
        "guards": [
            {"left": str(g.left), "relation": g.relation, "right": str(g.right), "line": g.line,
             "relied": g.relied, "is_specialised": g.is_specialised}
            for g in named.guards
        ],
    }  # fmt: skip
    if "inputs" in sections:
        program["inputs"] = slots(graph.inputs)
    if "outputs" in sections:
        program["outputs"] = slots(graph.outputs)
    if "operations" in sections:
        program["operations"] = _operations(graph)
        program["constants"] = [
            {
                "name": graph.values[c.value].name,
                "elements": elements_text(c.data),
            }
            for c in graph.constants if has_symbols(c.data)
        ]  # fmt: skip
    head = _head(binary, sizes)
    return {**head, "programs": [], "symbolic": program}


def symbolic_lines(described: Mapping[str, Any]) -> list[str]:
    """Return the program of `describe_symbolic` as text."""
    out = [f"program {described['name']} ({described['role']}), with named sizes"]
    out += [
        f"  size   {size['name']}: {size['least']} to {size['most']}, compiled at {size['example']}"
        for size in described["sizes"]
    ]
    for guard in described["guards"]:
        kind = "specialised" if guard["is_specialised"] else "guard "
        lines = " by ".join(filter(None, (guard["line"], guard["relied"])))
        out.append(f"  {kind} {guard['left']} {guard['relation']} {guard['right']} ({lines})")
    for side in ("input", "output"):
        for slot in described.get(f"{side}s", ()):
            out.append(f"  {side:6} {slot['name']}: {slot['type']}")
    for constant in described.get("constants", ()):
        out.append(f"  constant {constant['name']} = {constant['elements']}")
    if "operations" in described:
        out += _operation_lines(described["operations"])
    return out


def _origin(origin: Origin) -> dict[str, Any]:
    """Describe the foreign binary, and its properties that Stitch does not represent."""
    return {
        "kind": origin.kind, "version": origin.version, "commit": origin.commit,
        "lacking": list(origin.lacking),
    }  # fmt: skip


def _lives(origin: Origin | None, program: Program, sections: Sequence[str]) -> dict[str, Any]:
    """Return the lifetimes of tensors of an opaque program, by operation numbers."""
    if origin is None or "memory" not in sections:
        return {}
    lives = [
        {"name": life.name, "layout": life.desc.text(), "bytes_per_bank": life.size_per_bank,
         "first": life.first, "last": life.last}
        for life in origin.lives if life.program == program.name
    ]  # fmt: skip
    return {"lives": lives}


def machine_json(shape: MachineShape) -> dict[str, Any]:
    """Return the memory of a machine as plain data."""
    figures = ("banks", "base", "limit", "alignment", "granule")
    spaces = {
        space.value: {name: getattr(shape.space(space), name) for name in figures}
        for space in shape.spaces
    }
    return {"name": shape.name, "core_grid": list(shape.core_grid), "spaces": spaces}


def _program(program: Program, shape: MachineShape, sections: Sequence[str]) -> dict[str, Any]:
    described: dict[str, Any] = {"name": program.name, "role": program.role.value}
    if "inputs" in sections:
        described["inputs"] = [
            _slot(slot.name, program, slot.value, program.input_desc(i))
            | {"kind": slot.kind.value, "ownership": slot.ownership.value}
            for i, slot in enumerate(program.inputs)
        ]
    if "outputs" in sections:
        described["outputs"] = [
            _slot(slot.name, program, slot.value, program.output_desc(i))
            | {"aliases_input": _alias(program, slot.aliases_input)}
            for i, slot in enumerate(program.outputs)
        ]
    if "operations" in sections:
        described["operations"] = _operations(program)
        if program.bodies:
            described["bodies"] = [list(body.lines(i)) for i, body in enumerate(program.bodies)]
        if program.seams:
            described["seams"] = [
                {"first": seam.first, "held": [program.values[v].name for v in seam.held]}
                for seam in program.seams
            ]
    if "memory" in sections:
        described["memory"] = _memory(program, shape)
    return described


def _alias(program: Program, index: int | None) -> str | None:
    return None if index is None else program.inputs[index].name


def _slot(name: str, program: Program, value: int, desc: TensorDesc) -> dict[str, Any]:
    layout = desc.layout
    return {
        "name": name,
        "type": program.values[value].type.text(),
        "layout": layout.text(),
        "shape": list(desc.shape),
        "space": layout.space.value,
        "data_type": layout.data_type.value,
        "address": layout.address,
    }


def _operations(program: OperationList) -> list[dict[str, Any]]:
    def names(indices: Sequence[int]) -> list[str]:
        return ["" if i == ABSENT else program.values[i].name for i in indices]

    return [
        {
            "op": operation.op,
            "domain": operation.domain,
            "inputs": names(operation.inputs),
            "outputs": names(operation.outputs),
            "types": [
                "" if i == ABSENT else program.values[i].type.text() for i in operation.outputs
            ],
            "attributes": {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in sorted(operation.attributes.items())
            },
            "location": operation.location,
            **({} if operation.body == ABSENT else {"body": operation.body}),
            **(
                {}
                if operation.math_fidelity is MathFidelity.BY_TYPE
                else {"math_fidelity": operation.math_fidelity.value}
            ),
            **({"opset": operation.opset} if operation.is_foreign else {}),
        }
        for operation in program.operations
    ]


def _memory(program: Program, shape: MachineShape) -> dict[str, Any]:
    """Return the memory of each space that a run takes, in bytes per bank."""
    try:
        wanted = demands(program, program.scratch, shape)
    except StitchError as error:
        return {"problem": str(error)}
    totals: dict[str, int] = {}
    for demand in wanted:
        totals[demand.space.value] = totals.get(demand.space.value, 0) + demand.size_per_bank
    spaces = {
        space: {
            "bytes_per_bank": total,
            "capacity_per_bank": shape.space(Space(space)).capacity,
            "banks": shape.space(Space(space)).banks,
        }
        for space, total in totals.items()
    }
    parts = [
        {
            "what": demand.label,
            "space": demand.space.value,
            "bytes_per_bank": demand.size_per_bank,
            "address": demand.address,
        }
        for demand in wanted
    ]
    constants = sum(constant.data.nbytes for constant, _ in program.every_constant())
    memory: dict[str, Any] = {"spaces": spaces, "parts": parts, "constants_nbytes": constants}
    if program.is_opaque:
        return memory  # No executor computes it.
    memory["host"] = {"executor": HOST_EXECUTOR, **_on_host(program, shape)}
    return memory


def _on_host(program: Program, shape: MachineShape) -> dict[str, Any]:
    """Return the host memory of a run, or the defect that prevents loading the program."""
    try:
        check_program(program, shape)
        taken = make_executor(HOST_EXECUTOR).host_bytes(program)
    except StitchError as error:
        return {"problem": str(error)}
    return {
        "peak_nbytes": program_peak(program, shape, taken),
        "kernels_nbytes": taken.kernels,
        "largest_operation": taken.largest,
    }


def head_lines(path: str, described: Mapping[str, Any]) -> list[str]:
    """Return version, producer, machine and size of a binary as text."""
    size, machine = described["size"], described["machine"]
    requires = ", ".join(described["requires"]) or "nothing"
    rows, columns = machine["core_grid"]
    spaces = ", ".join(
        f"{name} {s['banks']} x {s['limit'] - s['base']} B" for name, s in machine["spaces"].items()
    )
    origin = described.get("origin")
    first = (
        f"{path}: format {described['format_version']}, written by {described['producer']}, "
        f"opset {described['opset']}, requires {requires}"
        if origin is None
        else f"{path}: {origin['kind']} {origin['version']}, written by tt-mlir at commit "
        f"{origin['commit'] or 'unknown'}; its programs are opaque: planned, never computed"
    )
    return [
        first,
        f"  machine {machine['name']}: {rows}x{columns} cores, {spaces}",
        f"  size {size['total']} B: metadata {size['metadata']}, sealing {size['sealing']}, "
        f"data {size['data']} in {counted(len(size['segments']), 'segment')} "
        f"(padding {size['padding']})",
        *(f"  simplified: {line}" for line in (origin or {}).get("lacking", ())),
    ]


def program_lines(described: Mapping[str, Any], executor: str | None = None) -> list[str]:
    """Return a program's sections as text; `executor` is that of `--executor`."""
    out = [f"program {described['name']} ({described['role']})"]
    for slot in described.get("inputs", ()):
        extra = "" if slot["kind"] == "activation" else f" {slot['kind']}"
        extra += " donate" if slot["ownership"] == "donate" else ""
        out.append(f"  input  {slot['name']}: {slot['type']} in {slot['layout']}{extra}")
    for slot in described.get("outputs", ()):
        alias = slot["aliases_input"]
        extra = "" if alias is None else f" takes the buffer of {alias}"
        out.append(f"  output {slot['name']}: {slot['type']} in {slot['layout']}{extra}")
    if "operations" in described:
        out += _operation_lines(described["operations"])
    out += [f"  {line}" for lines in described.get("bodies", ()) for line in lines]
    if "seams" in described:
        firsts = ", ".join(str(seam["first"]) for seam in described["seams"])
        parts = counted(len(described["seams"]), "part")
        out.append(f"  linked from {parts}, which begin at operations {firsts}")
    if "by_way_of_the_host" in described:
        listed = ", ".join(described["by_way_of_the_host"]) or "none"
        out.append(f"  operators that --executor={executor} computes by way of the host: {listed}")
    if "memory" in described:
        out += _memory_lines(described["memory"])
    for life in described.get("lives", ()):
        alive = f"operations {life['first']} to {life['last']}"
        out.append(
            f"    {life['name']}: {life['layout']}, {life['bytes_per_bank']} B per bank, {alive}"
        )
    return out


def _operation_lines(operations: Sequence[Mapping[str, Any]]) -> list[str]:
    times_of = Counter(operation["op"] for operation in operations)
    listed = ", ".join(f"{op} x{times}" for op, times in sorted(times_of.items()))
    out = [f"  {counted(len(operations), 'operation')}: {listed}"]
    for operation in operations:
        op = f"{operation['domain']}.{operation['op']}" if operation["domain"] else operation["op"]
        attributes = ", ".join(f"{key}={value}" for key, value in operation["attributes"].items())
        if operation["domain"] == OPAQUE_DOMAIN:
            attributes = operation["attributes"].get("kind", "")
        arguments = ", ".join([*(name or "_" for name in operation["inputs"]),
                               *([attributes] if attributes else [])])  # fmt: skip
        results = ", ".join(
            f"{name or '_'}: {kind}" if kind else "_"
            for name, kind in zip(operation["outputs"], operation["types"], strict=True)
        )
        body = f" as body {operation['body']}" if "body" in operation else ""
        body += f" at {operation['math_fidelity']}" if "math_fidelity" in operation else ""
        body += f" of opset {operation['opset']}, foreign" if "opset" in operation else ""
        assigned = f"{results} = " if results else ""
        out.append(f"    {assigned}{op}({arguments}){body}")
        if operation["domain"] == OPAQUE_DOMAIN:
            out += _text_lines(operation)
    return out


def _text_lines(operation: Mapping[str, Any]) -> list[str]:
    """Return an opaque operation's text, without types and devices, and its location."""
    text = operation["attributes"].get("text", "").partition(" : (")[0]
    cut = text[:MAX_TEXT] + ("..." if len(text) > MAX_TEXT else "")
    parts = [cut] if cut else []
    parts += [f"at {operation['location']}"] if operation["location"] else []
    return [f"      {', '.join(parts)}"] if parts else []


def _memory_lines(memory: Mapping[str, Any]) -> list[str]:
    if "problem" in memory:
        return [f"  memory: {memory['problem']}"]
    out = [
        f"  {name}: {s['bytes_per_bank']} of {s['capacity_per_bank']} B per bank "
        f"({counted(s['banks'], 'bank')})"
        for name, s in memory["spaces"].items()
    ]
    for part in memory["parts"]:
        at = "" if part["address"] is None else f" at {part['address']:#x}"
        out.append(f"    {part['space']:4} {part['bytes_per_bank']:>9} B  {part['what']}{at}")
    host = memory.get("host")
    if host is None:
        return out
    if "problem" in host:
        why = " ".join(host["problem"].split())
        out.append(f"  host memory: unknown, {host['executor']} cannot run this program: {why}")
        return out
    line = f"  host memory: a run takes at most {host['peak_nbytes']} B ({host['executor']})"
    if host["largest_operation"]:
        line += f", up to {host['kernels_nbytes']} B of it for {host['largest_operation']}"
    out.append(line)
    return out
