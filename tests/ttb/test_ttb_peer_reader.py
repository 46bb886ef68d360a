"""flatc's own accessors read what we write: the file is an ordinary flatbuffer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from stitch.ttb import encode
from tests.support.benches import run_bench
from tests.support.flatc import classes
from tests.ttb.test_ttb_round_trip import binary_of


def test_flatc_accessors_find_every_part_of_a_written_file() -> None:
    fb: Any = classes
    written = encode(binary_of(np.arange(3, dtype=np.int16), attributes={"axis": -7}))
    assert fb.Binary.BinaryBufferHasIdentifier(written, 0, size_prefixed=True)
    root = fb.Binary.GetRootAs(written, 4)
    program = root.Programs(0)
    operation = program.Operations(0)
    attribute = operation.Attributes(0)
    value = fb.IntAttribute()
    value.Init(attribute.Value().Bytes, attribute.Value().Pos)
    assert (root.Version().Major(), root.Version().Minor()) == (1, 1)
    assert root.Machine().Name() == b"box"
    assert root.Machine().L1().Banks() == 6
    assert [program.Values(i).Name() for i in range(program.ValuesLength())] == [b"x", b"c0", b"y"]
    assert operation.InputsAsNumpy().tolist() == [0, 1]
    assert (attribute.Name(), attribute.ValueType(), value.Value()) == (b"axis", 1, -7)
    assert program.Values(1).Type().ShapeAsNumpy().tolist() == [3]
    assert program.Values(1).Layout().DataType() == fb.DataType.INT16
    assert root.Segments(program.Constants(0).Segment()).Length() == 6


def test_the_load_benchmark_prints_its_figures_as_json() -> None:
    done = run_bench("load", "--json", "--operations=50", "--large_mb=2", "--runs=1")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["operations_ms"] > 0
    assert set(figures["missed"]) <= set(figures)
