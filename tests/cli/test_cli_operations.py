"""`stitch-run --expected_operations`: operations and what they should be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch.runtime.executors.onnx import onnxruntime_executor, session

Cli = Callable[..., Any]

RUN = ("a.ttb", "b.ttb", "--input=x=@x.npy")


def off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's Relu gives one more, where it is called by itself."""
    call = session.session_call

    def wrong(made: Any, arrays: Any, program: Any, name: str) -> Any:
        run = call(made, arrays, program, name)
        if [o.op for o in program.operations] != ["Relu"]:
            return run
        (result,) = (arrays[slot.value] for slot in program.outputs)
        return lambda: (run(), np.add(result, 1, out=result))

    monkeypatch.setattr(onnxruntime_executor, "session_call", wrong)


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "auto", "torch"])
def test_operations_that_agree_are_a_table_and_a_success(cli: Cli, executor: str) -> None:
    done = cli("run", *RUN, f"--executor={executor}", "--expected_operations=reference")
    assert (done.code, done.err) == (0, "")
    assert "[SUCCESS] 3 results of operations as expected" in done.out
    head = r"program +operation +output +runs +PCC +difference +atol +rtol +at"
    assert re.search(head, done.out)
    rows = re.findall(r"^(\w) +(\d \w+) +\d \w+ +(\d) .* ok ", done.out, re.MULTILINE)
    assert rows == [("a", "0 MatMul", "1"), ("a", "1 Relu", "1"), ("b", "0 Add", "1")]


def test_the_first_operation_that_is_wrong_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_by_one(monkeypatch)
    done = cli("run", *RUN, "--executor=onnxruntime", "--expected_operations=reference")
    assert done.code == 1
    failed = re.search(r"\[FAILED\] (.*)", done.out)
    assert failed is not None
    assert failed[1].startswith(
        "1 result of operations not as expected; the first: program 'a', operation 1 (Relu) at "
    )
    assert "largest difference 1 at" in failed[1]
    assert re.search(r"\(allowed: 0.0001 \+ 1e-05 \* \|expected\|\); PCC ", failed[1])


def test_tolerances_are_those_of_expected_outputs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_by_one(monkeypatch)
    words = (*RUN, "--executor=onnxruntime", "--expected_operations=reference")
    assert cli("run", *words, "--atol=1.01").code == 0
    assert cli("run", *words, "--pcc=0.9").code == 0


@pytest.mark.parametrize("how", ["--executor=null", "--dry_run"])
def test_what_computes_nothing_is_refused(cli: Cli, how: str) -> None:
    done = cli("run", "a.ttb", how, "--expected_operations=reference")
    assert done.code == 2
    assert f"{how} executes nothing, and --expected_operations=reference needs" in done.err


def test_every_pass_is_compared(cli: Cli) -> None:
    words = ("--expected_operations=reference", "--num_runs=2", "--result_file=r.json")
    assert cli("run", *RUN, *words).code == 0
    lines = json.loads(Path("r.json").read_text())["operations"]
    assert [(line["op"], line["runs"]) for line in lines] == [
        ("MatMul", 2), ("Relu", 2), ("Add", 2)
    ]  # fmt: skip


def test_tolerances_alone_are_refused(cli: Cli) -> None:
    done = cli("run", *RUN, "--pcc=0.9")
    assert "no effect without --expected_output or --expected_operations" in done.err
