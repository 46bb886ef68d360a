"""Devices claim host memory before they allocate it, and name what is missing."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.budget import BUDGET, allowing
from stitch.errors import OutOfMemoryError
from tests.support.stitched_models import integers, one, scaled

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_is_left_to_collect() -> None:
    """What other tests left to the collector counts as taken, too."""
    gc.collect()


def sums(name: str, elements: int) -> Any:
    b = stitch.ComputationGraphBuilder(name)
    x = b.input("x", (elements,), "float32")
    b.output("y", b.op("Tanh", x) + x)
    return stitch.compile(b.build(), target="host")


def convolution(size: int) -> Any:
    b = stitch.ComputationGraphBuilder("wide")
    x, w = b.input("x", (1, 8, size, size), "float32"), b.input("w", (8, 8, 3, 3), "float32")
    b.output("y", b.op("Conv", x, w, kernel_shape=(3, 3)))
    return stitch.compile(b.build(), target="host")


def run_alone(script: str) -> str:
    """What a script prints, in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_program_over_the_budget_is_refused_by_name_and_nothing_has_changed() -> None:
    before = BUDGET.taken_nbytes
    allowed = before + 24 * MIB
    with stitch.open_device("host", max_memory=allowed) as device:
        small, large = device.load(sums("small", 1000)), device.load(convolution(512))
        x = np.ones((1, 8, 512, 512), np.float32)
        kept = one(small(np.ones(1000, np.float32)))
        first = kept.numpy()
        with pytest.raises(OutOfMemoryError) as caught:
            one(large(x, np.ones((8, 8, 3, 3), np.float32))).numpy()
        for wanted in (
            "running 'wide'",
            "Conv(1x8x512x512xf32",
            f"of {allowed} are free",
            "max_memory",
        ):
            assert wanted in str(caught.value)
        np.testing.assert_array_equal(kept.numpy(), first)
        np.testing.assert_array_equal(one(small(np.ones(1000, np.float32))).numpy(), first)
    assert BUDGET.taken_nbytes <= before


def test_a_refusal_takes_neither_time_nor_memory() -> None:
    text = run_alone("""
        import time, stitch, numpy as np
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        b = stitch.ComputationGraphBuilder("wide")
        x, w = b.input("x", (4, 64, 1024, 1024), "float32"), b.input("w", (64, 64, 3, 3), "float32")
        b.output("y", b.op("Conv", x, w, kernel_shape=(3, 3)))
        model = stitch.compile(b.build(), target="host")
        x = np.broadcast_to(np.float32(1), (4, 64, 1024, 1024))
        with stitch.open_device("host", max_memory="768MiB") as device:
            program, w = device.load(model), device.tensor(np.ones((64, 64, 3, 3), np.float32))
            before, began = resident(), time.process_time()
            try:
                program(device.empty(stitch.TensorDesc(x.shape, program.input_layout(0))), w)
            except stitch.OutOfMemoryError as error:
                print("device.empty" in str(error))
            print(resident() - before < 64 << 20, time.process_time() - began < 30)
        """)
    assert text.split() == ["True", "True", "True"]


def test_the_budget_is_one_for_all_devices_of_the_process() -> None:
    limit = BUDGET.taken_nbytes + 40 * MIB
    x = np.ones(4 * MIB, np.float32)
    first, second = (stitch.open_device("host", max_memory=limit) for _ in range(2))
    with first, second:
        tensor = first.empty(stitch.TensorDesc((7 * MIB,), first.tensor(x).layout))
        program = second.load(sums("second", 4 * MIB))
        with pytest.raises(OutOfMemoryError, match="running 'second'"):
            one(program(x)).numpy()
        del tensor
        first.close()
        limited = stitch.open_device("host", max_memory=BUDGET.taken_nbytes + 120 * MIB)
        with limited:
            assert one(limited.load(sums("third", 4 * MIB))(x)).shape == (4 * MIB,)


def test_what_a_device_took_is_free_when_it_closes_or_is_collected() -> None:
    before = BUDGET.taken_nbytes
    x = np.ones(MIB, np.float32)
    device = stitch.open_device("host")
    tensor = one(device.load(sums("closed", MIB))(x))
    tensor.numpy()
    assert BUDGET.taken_nbytes > before + x.nbytes
    device.close()
    del tensor
    assert BUDGET.taken_nbytes <= before
    # Here a fixture holds every device of a test.
    text = run_alone("""
        import gc, stitch, numpy as np
        from stitch.budget import BUDGET
        b = stitch.ComputationGraphBuilder("dropped")
        b.output("y", b.op("Tanh", b.input("x", (1 << 20,), "float32")))
        device = stitch.open_device("host")
        tensor = device.load(stitch.compile(b.build(), target="host"))(np.ones(1 << 20, "f4"))
        tensor.numpy()
        print(BUDGET.taken_nbytes > 1 << 22)
        del device, tensor
        gc.collect()
        print(BUDGET.taken_nbytes)
        """)
    assert text.split() == ["True", "0"]


def test_unused_plans_and_bytes_are_freed_for_a_claim() -> None:
    with stitch.open_device("host", max_memory=BUDGET.taken_nbytes + 110 * MIB) as device:
        for size in (2, 3, 4):
            program = device.load(sums(f"of {size}", size * MIB))
            assert one(program(np.ones(size * MIB, np.float32))).numpy().shape == (size * MIB,)


PROGRAMS = {
    "products": """
        x = b.input("x", (2048, 1024), "float32")
        for i in range(3):
            w = b.constant(np.ones((1024, 1024), np.float32))
            x = b.op("Gelu", b.matmul(x, w))
        b.output("y", x)
        """,
    "convolutions": """
        x = b.input("x", (4, 16, 128, 128), "float32")
        for i in range(2):
            w = b.constant(np.ones((16, 16, 3, 3), np.float32))
            x = b.op("Relu", b.op("Conv", x, w, kernel_shape=(3, 3), pads=(1, 1, 1, 1)))
        b.output("y", b.op("MaxPool", x, kernel_shape=(2, 2), strides=(2, 2)))
        """,
    "resized": """
        x = b.input("x", (1, 8, 256, 256), "float32")
        size = b.constant(np.array([1, 8, 700, 700]))
        b.output("y", b.op("Resize", x, None, None, size, mode="cubic"))
        """,
    "deep": """
        x = b.input("x", (2048, 512), "float32")
        for i in range(24):
            w = b.constant(np.full((512, 512), 0.01, np.float32))
            x = b.softmax(b.op("Gemm", x, w)) + x
        b.output("y", x)
        """,
    "branches": """
        x = b.input("x", (2048, 512), "float32")
        found = []
        for i in range(12):
            found.append(b.op("Tanh", b.matmul(x, b.constant(np.full((512, 512), i, "f4")))))
        for value in found[1:]:
            found[0] = b.op("Add", found[0], value)
        b.output("y", found[0])
        """,
    "sorted": """
        x = b.input("x", (1000, 3000), "float32")
        b.output("y", b.apply("TopK", [x, b.constant(np.array([50]))], 2, {})[0])
        """,
    "narrow": """
        x = b.input("x", (2048, 1024), "bfloat16")
        w = b.constant(np.ones((1024, 1024), "float32")).cast("bfloat16")
        b.output("y", b.op("ReduceL2", b.softmax(b.matmul(x, w)), keepdims=0))
        """,
}


@pytest.mark.parametrize(
    "executor",
    ["numpy", "onnxruntime", pytest.param("torch", marks=pytest.mark.campaign("executors"))],
)
def test_no_more_becomes_resident_than_was_claimed(executor: str) -> None:
    script = f"""
import os, re, textwrap
import numpy as np, stitch
from stitch.budget import BUDGET
from stitch.runtime.executors import make_executor
def status(key):
    return int(re.search(key + r":\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
def built(name, body):
    b = stitch.ComputationGraphBuilder(name)
    exec(textwrap.dedent(body))
    return stitch.compile(b.build(), target="host")
def run(device, model):
    program = device.load(model)
    kind = program.ports[0].type
    x = np.ones(kind.shape, kind.data_type.dtype)
    before, claimed = status("VmRSS"), BUDGET.taken_nbytes
    open("/proc/self/clear_refs", "w").write("5")
    tensor = program(x)
    return status("VmHWM") - before, BUDGET.taken_nbytes - claimed
first = built("first", "b.output('y', b.op('Tanh', b.matmul(b.input('x', (8, 8), 'float32'), "
              "np.eye(8, dtype='f4'))))")
make_executor({executor!r})
for name, body in {PROGRAMS!r}.items():
    model = built(name, body)
    if os.fork() == 0:
        device = stitch.open_device("host", executor={executor!r}, window=1)
        run(device, first)
        print(name, *run(device, model), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
    measured = [line.split() for line in run_alone(script).splitlines()]
    assert [name for name, _, _ in measured] == list(PROGRAMS)
    for name, grown, claimed in measured:
        assert int(grown) <= int(claimed) + 8 * MIB, (name, grown, claimed)
        assert int(claimed) <= 24 * int(grown) + 64 * MIB, (name, grown, claimed)


def test_sessions_of_many_programs_fit_where_their_one_arena_does() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    gc.collect()
    limit = BUDGET.taken_nbytes + 80 * MIB
    with stitch.open_device("host", executor="onnxruntime", max_memory=limit) as device:
        loaded = [device.load(scaled(f"s{n}", 2.0, (4, n), target="host")) for n in range(1, 25)]
        one(loaded[0](integers((4, 1)))).numpy()
        before, claimed = resident(), BUDGET.taken_nbytes
        for n, program in enumerate(loaded, 1):
            one(program(integers((4, n)))).numpy()
        assert resident() - before <= BUDGET.taken_nbytes - claimed + MIB


def test_a_device_without_address_space_names_the_limit() -> None:
    text = run_alone("""
        import resource, stitch
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        try:
            stitch.open_device("wormhole_n150")
        except stitch.OutOfMemoryError as error:
            print(error)
        """)
    for wanted in ("of address space for", "RLIMIT_AS", "max_memory"):
        assert wanted in text


def test_large_copies_of_arrays_are_claimed_before_they_are_made() -> None:
    x = np.ones(10 * MIB, np.float32)
    with stitch.open_device("host", max_memory=BUDGET.taken_nbytes + 60 * MIB) as device:
        kept = device.tensor(x)
        with pytest.raises(OutOfMemoryError, match=r"device.tensor\(\)"):
            device.tensor(x)
        with pytest.raises(OutOfMemoryError, match="reading 10485760xf32"):
            kept.numpy()
        del kept


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_an_argument_over_the_budget_of_its_device_is_refused_before_it_is_copied(
    kind: str,
) -> None:
    x = np.broadcast_to(np.ones((), kind), (64 * MIB,))
    with stitch.open_device("host", max_memory=BUDGET.taken_nbytes + 200 * MIB) as device:
        program = device.load(sums("wide", 64 * MIB))
        tracemalloc.start()
        with pytest.raises(OutOfMemoryError, match="input 'x'"):
            program(x)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < MIB


def test_an_argument_of_a_pipeline_file_is_counted_to_its_device(tmp_path: Path) -> None:
    sums("wide", 64 * MIB).save(tmp_path / "wide.ttb")
    (tmp_path / "p.yaml").write_text(
        f"modules: {{wide: wide.ttb}}\ninputs:\n  x: {{shape: [{64 * MIB}], type: float32}}\n"
        "steps:\n  - {run: wide, inputs: {x: x}, outputs: {y: y}}\noutputs: [y]\n"
    )
    x = np.broadcast_to(np.ones((), np.float64), (64 * MIB,))
    with stitch.open_device("host", max_memory=BUDGET.taken_nbytes + 200 * MIB) as device:
        pipeline = stitch.Pipeline.from_yaml(tmp_path / "p.yaml", device=device)
        tracemalloc.start()
        with pytest.raises(OutOfMemoryError, match="input 'x'"):
            pipeline(x)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 4 * MIB


def test_what_does_not_fit_is_not_folded() -> None:
    def compiled() -> Any:
        b = stitch.ComputationGraphBuilder("folded")
        large = b.op("Tanh", b.constant(np.ones(2 * MIB, np.float32)))
        b.output("y", b.input("x", (2 * MIB,), "float32") + large)
        return stitch.compile(b.build(), target="host")

    assert len(compiled().binary.programs[0].operations) == 1
    with allowing(BUDGET.taken_nbytes + 4 * MIB):
        assert len(compiled().binary.programs[0].operations) == 2


def test_where_there_is_no_memory_for_several_places_one_takes_what_is_left() -> None:
    x, nbytes = integers((64, 1024)), 64 * 1024 * 4
    gc.collect()
    limit = BUDGET.taken_nbytes + (6 << 20)
    with stitch.open_device("host", max_memory=limit) as device:
        pipeline = stitch.Pipeline([device.load(scaled("a", 2.0, x.shape, target="host"))])
        held = [one(pipeline(x)) for _ in range(4)]
        made, left = device.statistics().executables_made, limit
        while device.statistics().executables_made == made:
            left = limit - BUDGET.taken_nbytes
            try:
                held.append(one(pipeline(x)))
            except OutOfMemoryError:
                break
        # Nothing was recorded anew, and nothing refused, while there was memory for one.
        assert left < nbytes + mmap.PAGESIZE
        assert len(held) > 9
        del held
