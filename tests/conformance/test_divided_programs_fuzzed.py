"""Random programs, unit by unit and divided at random, give what plain bindings of them give.

Each program runs over the same bytes again and again, with different rubbish in everything that it
is to write: outputs, scratch, the workspace, and what kernels use for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stitch import ComputationGraphBuilder
from stitch.compiler import CompileOptions, compile_graph
from stitch.errors import CompileError, LayoutError, OutOfMemoryError
from stitch.machine import footprint, load_machine
from stitch.memory import prepare_copy
from stitch.program import Array, Ownership, TensorDesc, Value, host_layout
from stitch.runtime.executors import BoundProgram, Workspace, as_bytes
from stitch.runtime.executors.automatic import AutomaticExecutor
from stitch.runtime.executors.host import ForeignCall, PreparedKernels
from stitch.runtime.executors.onnx.onnxruntime_executor import Sessions
from tests.support.executors.drawn_programs import DrawnProgram, drawn_program
from tests.support.executors.named_prices import ATEN
from tests.support.stitched_models import model

MACHINES = {name: load_machine(name) for name in ("host", "tiny")}
SESSIONS = Sessions(1)
KERNEL_NBYTES = 1 << 21
QUICK = settings(
    max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
LONG = settings(
    max_examples=2_500, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


class Regions:
    """The bytes of a program's slots and scratch; an output may have those of an input."""

    def __init__(self, drawn: DrawnProgram) -> None:
        self.drawn = drawn
        self.program, self.machine = drawn.program, drawn.machine.shape
        self.inputs = tuple(self._empty(self._value(s.value)) for s in self.program.inputs)
        self.outputs = tuple(
            self._empty(self._value(s.value))
            if s.aliases_input is None
            else self.inputs[s.aliases_input]
            for s in self.program.outputs
        )
        space = self.machine.space(self.program.scratch.space)
        self.scratch = np.zeros(self.program.scratch.size_per_bank * space.banks, np.uint8)

    def _value(self, value: int) -> Value:
        return self.program.values[value]

    def _empty(self, value: Value) -> Array:
        found = footprint(value.desc, self.machine)
        return np.zeros(found.size_per_bank * found.banks, np.uint8)

    def fill(self, rubbish: int) -> None:
        for array in (*self.outputs, self.scratch):
            array.fill(rubbish)
        for slot, data, region in zip(
            self.program.inputs, self.drawn.inputs, self.inputs, strict=True
        ):
            region.fill(rubbish)
            value = self._value(slot.value)
            source = TensorDesc(value.type.shape, host_layout(value.type.data_type))
            prepare_copy(source, value.desc, self.machine).bind(as_bytes(data), region)()

    def results(self) -> list[Array]:
        found = []
        for slot, region in zip(self.program.outputs, self.outputs, strict=True):
            value = self._value(slot.value)
            array = np.zeros(value.type.shape, value.type.data_type.dtype)
            target = TensorDesc(value.type.shape, host_layout(value.type.data_type))
            prepare_copy(value.desc, target, self.machine).bind(region, as_bytes(array))()
            found.append(array)
        return found

    def kept(self) -> list[bytes]:
        """The bytes of the inputs that no output takes the place of."""
        taken = {s.aliases_input for s in self.program.outputs}
        return [a.tobytes() for i, a in enumerate(self.inputs) if i not in taken]


def run(bound: BoundProgram) -> None:
    with np.errstate(all="ignore"):
        for step in bound.steps:
            step()


def drawn_runs(random: Random, able: Sequence[bool]) -> list[list[int]]:
    """A division at random, with short runs and long ones."""
    runs: list[list[int]] = []
    stay = random.choice((3, 7, 9))
    foreign = False
    for index, can in enumerate(able):
        before, foreign = foreign, can and (random.randrange(10) < stay) == (foreign or stay < 9)
        if foreign and before and random.randrange(10):
            runs[-1].append(index)
        elif foreign:
            runs.append([index])
    return runs


def segments(drawn: DrawnProgram, runs: list[list[int]]) -> list[ForeignCall]:
    """The sessions of a division, without what ONNX Runtime turns out not to do."""
    able = SESSIONS.able(drawn.program)
    while True:
        found, able = SESSIONS.calls(drawn.program, runs, able)
        if found is not None:
            return found
        runs = [left for run in runs if (left := _first_run([i for i in run if able[i]]))]


def _first_run(indices: list[int]) -> list[int]:
    return [i for at, i in enumerate(indices) if i == indices[0] + at]


def check(random: Random, drawn: DrawnProgram) -> None:
    """Runs a program in several ways; each must give what the plain binding gives."""
    regions = Regions(drawn)
    shape, program = drawn.machine.shape, drawn.program
    workspace = Workspace()
    # So large that kernels find all that they use in it.
    workspace.kernels.take(KERNEL_NBYTES)
    prepared = PreparedKernels(program, shape, workspace)
    regions.fill(0x55)
    run(prepared.bind_plainly(regions.inputs, regions.outputs, regions.scratch))
    wanted = regions.results()
    compare(drawn, regions, prepared, wanted, by_numpy=True)
    calls = segments(drawn, drawn_runs(random, SESSIONS.able(program)))
    compare(drawn, regions, PreparedKernels(program, shape, workspace, calls), wanted)
    foreign = {i for call in calls for i in call.operations}
    known = [i for i, o in enumerate(program.operations) if ATEN.price(program, o, 1, 1) < math.inf]
    chosen = [i for i in known if i not in foreign and random.randrange(4)]
    both = PreparedKernels(program, shape, workspace, calls, ATEN, chosen)
    compare(drawn, regions, both, wanted)
    if random.randrange(4) == 0:
        executor = AutomaticExecutor()
        executor.sessions = SESSIONS
        automatic = executor.prepare(program, shape, workspace)
        if isinstance(automatic, PreparedKernels):
            compare(drawn, regions, automatic, wanted)


def compare(
    drawn: DrawnProgram, regions: Regions, prepared: PreparedKernels, wanted: list[Array],
    *, by_numpy: bool = False,
) -> None:  # fmt: skip
    memory = prepared.workspace.kernels
    memory.restart()
    taken = memory.take(KERNEL_NBYTES)
    taken.fill(0x55)
    bound = prepared.bind(regions.inputs, regions.outputs, regions.scratch)
    # Another program may run while this one is bound.
    assert (taken == 0x55).all()
    space = prepared.workspace.region(prepared.arrangement.nbytes)
    first: list[Array] | None = None
    for rubbish in (0xFF, 0x00):
        regions.fill(rubbish)
        space.fill(rubbish)
        prepared.workspace.kernels.restart()
        prepared.workspace.kernels.take(KERNEL_NBYTES).fill(rubbish)
        before = regions.kept()
        run(bound)
        assert regions.kept() == before
        found = regions.results()
        for i, (one, right) in enumerate(zip(found, wanted, strict=True)):
            exact = by_numpy and drawn.exact[i]
            near(one, right, 0.0 if exact else drawn.errors[i], drawn, i)
        if first is not None:
            for i, (one, right) in enumerate(zip(found, first, strict=True)):
                near(one, right, 0.0, drawn, i)
        first = found
    if by_numpy and first is not None and bound.one_by_one is not None:
        regions.fill(0x00)
        run(bound.one_by_one())
        # Bits, and not just numbers: -0 is not 0 here.
        assert [a.tobytes() for a in regions.results()] == [a.tobytes() for a in first]


def near(found: Array, right: Array, error: float, drawn: DrawnProgram, index: int) -> None:
    if found.shape == right.shape and found.tobytes() == right.tobytes():
        return
    # The text of a program takes longer than to run it: only where it may be wanted.
    name = f"output {index} of\n{drawn.program.text()}"
    if error == 0 or found.dtype.kind in "bi":
        np.testing.assert_array_equal(found, right, err_msg=name)
        return
    wide = found.astype(np.float64), right.astype(np.float64)
    np.testing.assert_allclose(*wide, rtol=2e-4, atol=error, err_msg=name)


def attack(random: Random) -> None:
    long = random.randrange(5) == 0
    machine = MACHINES["tiny" if not long and random.randrange(3) == 0 else "host"]
    try:
        drawn = drawn_program(random, machine, random.choice((4, 8, 16, 30)), long=long)
    except (CompileError, LayoutError, OutOfMemoryError):
        return
    check(random, drawn)


@QUICK
@given(st.randoms(use_true_random=False))
def test_a_random_program_divided_at_random_gives_the_plain_bindings_numbers(
    random: Random,
) -> None:
    attack(random)


@pytest.mark.campaign("executors")
@LONG
@given(st.integers(0, 1 << 60))
def test_many_random_programs_divided_at_random_give_the_plain_bindings_numbers(seed: int) -> None:
    attack(Random(seed))


def checked(build: Callable[[ComputationGraphBuilder], None], *inputs: Array) -> None:
    """Checks a written program as the drawn ones are checked, in many divisions."""
    builder = ComputationGraphBuilder("written")
    build(builder)
    machine = MACHINES["host"]
    program = compile_graph(builder.build(), machine, CompileOptions(optimize=False)).program
    count = len(program.outputs)
    drawn = DrawnProgram(program, machine, inputs, (1e-4,) * count, (False,) * count)
    for seed in range(8):
        check(Random(seed), drawn)


def test_views_of_no_elements_are_bound() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (3, 4), "float32")
        nothing = b.op("Slice", x + 1.0, [2], [2], [1])
        b.output("turned", b.transpose(nothing, (1, 0)) * 2.0)
        b.output("joined", b.concat([nothing, x - 1.0, nothing], axis=1))

    checked(build, np.arange(12, dtype=np.float32).reshape(3, 4))


def test_products_over_no_numbers_are_zero_and_their_bias_is_scaled() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x, bias = b.input("x", (2, 3, 0), "float32"), b.input("bias", (3, 3), "float32")
        b.output("batch", b.matmul(x, b.transpose(x, (0, 2, 1))) + 1.0)
        flat = b.reshape(x, (3, 0))
        b.output("gemm", b.op("Gemm", flat, flat, bias, transB=1, beta=0.5))

    checked(build, np.zeros((2, 3, 0), np.float32), np.ones((3, 3), np.float32))


def test_a_squeeze_of_no_axes_keeps_all() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (1, 4, 1), "float32")
        b.output("y", b.op("Slice", b.op("Squeeze", b.op("Erf", x), []), [0], [1], [2]))

    checked(build, np.ones((1, 4, 1), np.float32))


def test_a_function_of_some_rows_is_not_computed_over_all_of_them() -> None:
    """Its operand dies, but lies elsewhere in the place that it would take over."""

    def build(b: ComputationGraphBuilder) -> None:
        sums = b.input("x", (6, 40), "float32") * 3.0
        b.output("y", b.op("Gelu", b.op("Erf", b.op("Slice", sums, [1], [5], [0]))))
        more = b.input("z", (4, 8), "int64") + 5
        b.output("quotient", b.op("Div", b.op("Slice", more, [1], [3], [0]), np.full((2, 8), -3)))

    x = np.linspace(-2, 2, 240, dtype=np.float32).reshape(6, 40)
    checked(build, x, np.arange(-20, 12).reshape(4, 8))


def test_blocks_do_not_overwrite_the_number_that_all_of_them_read() -> None:
    """One element of a long value, seen in it, while another operation takes its place."""

    def build(b: ComputationGraphBuilder) -> None:
        long = b.input("x", (150_000,), "float32") * 2.0
        first = b.op("Slice", long, [0], [1], [0])
        scaled = b.input("z", (150_000,), "float32") - first
        taking = long * 3.0
        b.output("y", (taking + scaled) * 0.5)
        b.output("sum", b.op("ReduceSum", taking))

    x = np.linspace(1, 2, 150_000, dtype=np.float32)
    checked(build, x, x[::-1].copy())


def test_a_donated_input_that_is_given_twice_is_not_seen_while_it_is_overwritten() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        state = b.input("state", (4, 4), "float32", ownership=Ownership.DONATE)
        rows = b.op("Slice", b.input("x", (4, 4), "float32"), [3], [-9], [0], [-1])
        b.output("next", state * 2.0)
        b.output("y", rows + 1.0)

    program = model("twice", build, target="host").binary.programs[0]
    assert program.outputs[0].aliases_input == 0
    given = np.arange(16, dtype=np.float32).reshape(4, 4)
    place, y = as_bytes(given.copy()), np.empty((4, 4), np.float32)
    prepared = PreparedKernels(program, MACHINES["host"].shape, Workspace())
    scratch = np.zeros(program.scratch.size_per_bank, np.uint8)
    run(prepared.bind((place, place), (place, as_bytes(y)), scratch))
    np.testing.assert_array_equal(y, given[::-1] + 1)
