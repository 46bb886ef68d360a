"""Programs whose operations do not fit together, in files that pass the format's checks: whatever
reads a file describes it or refuses it with an error of ours."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

import stitch
from stitch.cli.describe import SECTIONS, describe, program_lines
from stitch.errors import StitchError
from stitch.machine import MachineShape, load_machine
from stitch.program import (
    ABSENT,
    Constant,
    DataType,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    Space,
    Value,
    ValueType,
)
from stitch.ttb import Binary, encode, inspect_sizes, load
from tests.support.operators.hostile_operations import Drawn, cases_by_operator, damaged

CASES = cases_by_operator()
KEYS = sorted(CASES)
TYPES = tuple(kind for kind in DataType if not kind.is_block)
EXTENTS = (0, 1, 2, 3, 7, 2**31)


class _Drawing:
    """A program as it is drawn, operation by operation."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.inputs: list[InputSlot] = []
        self.outputs: list[OutputSlot] = []
        self.constants: list[Constant] = []

    def value(self, shape: tuple[int, ...], data_type: DataType) -> int:
        number = len(self.values)
        kind = ValueType(shape, data_type)
        self.values.append(Value(f"v{number}", kind, Layout(data_type)))
        return number

    def operation(self, case: Drawn) -> None:
        draw = self.draw
        read = [ABSENT if a is None else self.operand(a) for a in case.operands]
        if draw.random() < 0.2:
            read = read[: draw.randint(0, len(read))]
        if draw.random() < 0.1:
            read = [ABSENT] * len(read)
        made = []
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            shape = tuple(draw.choice(EXTENTS) for _ in range(draw.randint(0, 4)))
            made.append(self.value(shape, draw.choice(TYPES)))
            self.outputs.append(OutputSlot(f"o{made[-1]}", made[-1]))
        attributes: dict[str, Any] = {
            k: v for k, v in case.attributes.items() if isinstance(v, int | float | str | tuple)
        }
        if draw.random() < 0.2:
            attributes["axis"] = draw.choice((99, -99, 2**62, "x", 1.5))
        name = "Nope" if draw.random() < 0.05 else case.op.name
        self.operations.append(
            Operation(name, tuple(read), tuple(made), attributes, case.op.domain)
        )

    def operand(self, array: Any) -> int:
        number = self.value(array.shape, DataType.from_dtype(array.dtype))
        if self.draw.random() < 0.4:
            self.constants.append(Constant(number, array))
        else:
            self.inputs.append(InputSlot(f"i{number}", number))
        return number

    def program(self) -> Program:
        return Program(
            "p", tuple(self.inputs), tuple(self.outputs), tuple(self.values),
            tuple(self.operations), tuple(self.constants), Scratch(Space.HOST, 0),
        )  # fmt: skip


def drawn_files(seed: int, count: int) -> Iterator[tuple[Program, bytes]]:
    """Programs that the format can hold, and their files."""
    shape = load_machine("host").shape
    draw = random.Random(seed)
    for _ in range(count):
        drawing = _Drawing(draw)
        for _ in range(draw.randint(1, 2)):
            drawing.operation(damaged(draw, draw.choice(CASES[draw.choice(KEYS)])))
        try:
            program = drawing.program()
            yield program, encode(Binary((program,), shape, "a test"))
        except StitchError:
            continue


def survive(seed: int, count: int) -> int:
    """How many files were described, and then loaded or refused."""
    shown = 0
    with stitch.open_device("host", executor="null") as device:
        for program, data in drawn_files(seed, count):
            try:
                described = describe(load(data), inspect_sizes(data), SECTIONS)
                assert json.dumps(described)
                assert all(map(program_lines, described["programs"]))
                shown += 1
                problem = described["programs"][0]["memory"].get("host", {}).get("problem")
                try:
                    device.load(data)
                except StitchError:
                    continue
                # What loads is not described as defective, but for what one executor lacks.
                assert problem is None, problem
            except StitchError as error:
                assert str(error)
            except Exception as error:
                raise AssertionError(f"{program.operations}: {error!r}") from error
    return shown


def test_a_file_whose_operations_do_not_fit_is_described_with_its_defect() -> None:
    assert survive(20261128, 200) > 150


@pytest.mark.campaign("hostile")
@pytest.mark.parametrize("seed", range(8))
def test_many_files_whose_operations_do_not_fit_are_described(seed: int) -> None:
    assert survive(seed, 3_000) > 2_000


def test_an_operation_without_operands_is_described_with_its_defect() -> None:
    shape: MachineShape = load_machine("host").shape
    value = Value("y", ValueType((2,), DataType.FLOAT32), Layout(DataType.FLOAT32))
    program = Program(
        "p", (), (OutputSlot("y", 0),), (value,), (Operation("Resize", (), (0,)),), (),
        Scratch(Space.HOST, 0),
    )  # fmt: skip
    data = encode(Binary((program,), shape, "a test"))
    (described,) = describe(load(data), inspect_sizes(data), SECTIONS)["programs"]
    assert "Resize" in described["memory"]["host"]["problem"]
    assert any("cannot run this program" in line for line in program_lines(described))
