"""On what terms programs may be joined to one session of ONNX Runtime, bit for bit.

Comes in: programs that run one after the other. Goes out: what stands in the way, and after how
many runs joining them pays. Must not know sessions' models.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.ops import multiply_adds
from stitch.program import Program
from stitch.runtime.executors.host import compute_type
from stitch.runtime.executors.linking_terms import LinkTerms
from stitch.runtime.executors.onnx.session import EXPECT, has_effect, is_masked

#: Runs after which programs are joined. Optimising one takes as long as 1000 calls of a small
#: program, and each run then takes one call less for every program but one: what has run so often
#: is taken to run thousands of times more.
REPEATS = 100
#: Multiply-adds of a program, on average, from which on a call of 2 us is less than a hundredth.
WORTH_NOTHING = 16_000_000
#: Bytes of a program's constants beyond which its optimised form, which has them, is not made:
#: the form goes through a file of less than 2 GiB.
MOST_CONSTANTS = 1 << 30


def joining_terms(programs: Sequence[Program]) -> LinkTerms:
    """The terms for programs in run order."""
    masked = list(map(is_masked, programs))
    if has_effect() and any(masked) and not all(masked):
        yes, no = programs[masked.index(True)].name, programs[masked.index(False)].name
        return LinkTerms(f"{yes!r} takes denormal numbers as zero, {no!r} does not")
    for program in programs:
        obstacle = _obstacle(program)
        if obstacle:
            return LinkTerms(f"{program.name!r} {obstacle}")
    work = sum(multiply_adds(o, p.values, p.bodies) for p in programs for o in p.operations)
    gains = len(programs) > 1 and work < WORTH_NOTHING * len(programs)
    return LinkTerms(repeats=REPEATS if gains else None)


def _obstacle(program: Program) -> str:
    """What of one program stands in the way of joining it to others."""
    if any((o.domain, o.op) == EXPECT for o in program.operations):
        return "checks the values of an input, which could come from another program"
    if sum(constant.data.nbytes for constant in program.constants) > MOST_CONSTANTS:
        return f"has more than {MOST_CONSTANTS} bytes of constants"
    names = {slot.value: slot.name for slot in program.inputs}
    names |= {slot.value: slot.name for slot in program.outputs}
    stored = {v: program.values[v].desc.layout.data_type for v in names}
    for v, name in names.items():
        kind = program.values[v].type
        if stored[v].is_narrow:
            return f"has {name!r} as {stored[v].value}, to which ONNX Runtime converts nothing"
        if compute_type(kind) is not kind.data_type is not stored[v]:
            return f"stores {name!r}, which is {kind.data_type.value}, as {stored[v].value}"
    read = {v for operation in program.operations for v in operation.inputs}
    for slot in program.outputs:
        v = slot.value
        if v in read and stored[v] is not program.values[v].type.data_type:
            return f"reads its output {slot.name!r} before that is rounded to {stored[v].value}"
    return ""
