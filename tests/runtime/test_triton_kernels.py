"""Generated kernels of elementwise operations: their text, and what Triton makes of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.runtime.executors import triton_kernels
from stitch.runtime.executors.triton_kernels import HEADER, KernelWriter, can_run, runs_of
from tests.support.installed_wheel import PIP

ROOT = Path(__file__).parents[2]
TRITON = "triton==3.6.0"


def gates(kind: str = "float32") -> Any:
    """The program of half of an LSTM's cell: of its product the gates are parts."""
    b = ComputationGraphBuilder("gates")
    x, w, c = (b.input(n, s, kind) for n, s in (("x", (2, 4)), ("w", (4, 6)), ("c", (2, 3))))
    product = b.op("MatMul", x, w)
    y = b.op("Add", b.op("Mul", b.op("Sigmoid", product[:, :3]), c), b.op("Tanh", product[:, 3:]))
    b.output("y", y)
    return stitch.compile(b.build(), target="cuda").program


def written(program: Any, narrow: Any = torch.float32) -> KernelWriter:
    operations, values = program.operations, program.values
    ((first, end),) = runs_of(operations, values).items()
    makers = {v: (o, dict(o.attributes)) for o in operations[first:end] for v in o.outputs}
    known, tensors = program.constant_data(), dict[int, torch.Tensor]()

    def read(value: int) -> torch.Tensor:
        return tensors.setdefault(value, torch.zeros(values[value].type.shape, dtype=narrow))

    writer = KernelWriter(values, makers, known, read)
    (result,) = program.outputs
    writer.store(result.value, torch.zeros(values[result.value].type.shape, dtype=narrow))
    return writer


def test_the_text_of_a_kernel_reads_parts_of_a_product_by_strides() -> None:
    text = written(gates()).text()
    assert text.startswith(HEADER)
    assert (
        text.removeprefix(HEADER)
        == """\
@triton.jit
def kernel(p0, p1, p2, p3, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < 6
    x0 = tl.load(p0 + (i // 3) * 6 + i % 3, mask=live, other=0).to(tl.float32)
    x1 = tl.load(p1 + (i // 3) * 3 + i % 3, mask=live, other=0).to(tl.float32)
    x2 = tl.load(p2 + (i // 3) * 6 + i % 3, mask=live, other=0).to(tl.float32)
    v0 = (tl.math.div_rn(1.0, 1.0 + tl.exp(-x0)))
    v1 = (v0 * x1)
    v2 = (tanh(x2))
    v3 = (v1 + v2)
    tl.store(p3 + (i // 3) * 3 + i % 3, v3.to(p3.dtype.element_ty), mask=live)
"""
    )


def test_each_result_of_a_narrow_type_is_rounded() -> None:
    text = written(gates("bfloat16"), torch.bfloat16).text()
    lines = [line.strip() for line in text.splitlines() if line.startswith("    v")]
    assert lines[-1] == "v3 = as_bfloat16((v1 + v2))"
    assert all("as_bfloat16" in line for line in lines)


def test_a_target_that_others_read_elsewhere_is_no_target() -> None:
    writer = written(gates())
    load = writer.loads[1]
    assert writer.allows(load)  # Each element is written where it was read.
    assert not writer.allows(writer.loads[0])  # Another part of the product is read there.
    assert not writer.allows(load.t()) and writer.allows(torch.zeros(2, 3))


def test_what_no_kernel_computes_is_in_no_run() -> None:
    b = ComputationGraphBuilder("numbers")
    x, n = b.input("x", (2, 3), "float32"), b.input("n", (2, 3), "int64")
    b.output("y", np.tanh(x + 1.0) * b.cast(n + n, "float32"))
    b.output("z", b.op("Softmax", b.transpose(x, (1, 0))))
    program = stitch.compile(b.build(), target="cuda").program
    inside = {i for first, end in runs_of(program.operations, program.values).items()
              for i in range(first, end)}  # fmt: skip
    ops = {program.operations[i].op for i in inside}
    assert "Tanh" in ops and not ops & {"Softmax", "Cast"}


def test_without_triton_each_operation_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not can_run(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not can_run(torch.device("cpu")) and not can_run(torch.device("cuda:0"))


def test_a_kernel_that_triton_refuses_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str) -> None:
        asked.append(text)
        raise RuntimeError("no kernel")

    asked: list[str] = []
    monkeypatch.setattr("stitch.runtime.executors.tensor_programs.can_run", lambda device: True)
    monkeypatch.setattr(triton_kernels, "compiled", refused)
    x, w, c = np.ones((2, 4), np.float32), np.ones((4, 6), np.float32), np.ones((2, 3), np.float32)
    b = ComputationGraphBuilder("gates")
    a, d, e = (b.input(n, v.shape, "float32") for n, v in (("x", x), ("w", w), ("c", c)))
    product = a @ d
    b.output("y", b.op("Sigmoid", product[:, :3]) * e + np.tanh(product[:, 3:]))
    with stitch.open_device("torch:cpu") as device:
        found = device.load(stitch.compile(b.build(), target="cuda"))(x, w, c).numpy()
    assert len(asked) == 1
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-4)) + np.tanh(4), 1e-6)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has Triton, 640 MB; installed if it is not there."""
    found = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
    if importlib.util.find_spec("triton") is None:
        folder = tmp_path_factory.mktemp("triton")
        subprocess.run([*PIP, "install", "--no-deps", "--target", folder, TRITON], check=True)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), found["PYTHONPATH"]]))
    return found


@pytest.mark.campaign("triton")
def test_kernels_give_what_numpys_executor_gives_and_compile_for_a_card(
    triton: dict[str, str], tmp_path: Path
) -> None:
    """Interpreted on the processor; compiled for compute capability 9.0, without a card."""
    command, file = [sys.executable, "-m", "tests.support.triton_cases"], tmp_path / "texts.json"
    run = subprocess.run(
        [*command, file], cwd=ROOT, env={**triton, "TRITON_INTERPRET": "1"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0 and " cases, " in run.stdout, run.stdout[-500:] + run.stderr[-3000:]
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [*command, "--compile", file], cwd=ROOT, env={**triton, **cache}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0 and " compiled" in run.stdout, run.stdout + run.stderr[-3000:]


@pytest.mark.campaign("triton")
def test_an_executor_with_kernels_is_one(triton: dict[str, str]) -> None:
    """Results on the host, in other layouts and in several programs: Stitch's own suite."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/runtime/test_torch_devices.py", "-k",
         "TestTorchCpu"],
        cwd=ROOT, env={**triton, "TRITON_INTERPRET": "1"}, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
