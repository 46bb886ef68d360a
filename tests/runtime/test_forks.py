"""A device belongs to the process that opened it: in the child of a fork it says so, and is quiet.

Each test is a program of its own: children leave by the way that a program usually ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

COMMON = """
    import os, signal, sys, threading, time, warnings

    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
    import numpy as np
    import stitch

    def product():
        builder = stitch.ComputationGraphBuilder("square")
        x = builder.input("x", (96, 96), "float32")
        builder.output("y", builder.op("MatMul", x, x))
        return stitch.compile(builder.build(), target="tiny")

    def refused(work, said="belongs to process"):
        try:
            work()
        except stitch.TaskError as error:
            assert said in str(error) and "open a device in this process" in str(error), error
        else:
            raise AssertionError(f"{work} did not say that the device is another process's")

    def forked(work):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            signal.alarm(100)
            work()
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, f"a child ended with status {status}"

    model, x = product(), np.ones((96, 96), np.float32)
"""


def run(body: str, *arguments: str) -> str:
    """Run a program after the common part; gives what it prints."""
    text = textwrap.dedent(COMMON) + textwrap.dedent(body)
    done = subprocess.run(
        # A thread of BLAS may hold its own lock at the fork: the child would wait for it for ever.
        [sys.executable, "-c", text, *arguments], capture_output=True, text=True, timeout=200,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


BESIDE_A_THREAD = """
    executor, threads, forks = sys.argv[1], int(sys.argv[2]) or None, int(sys.argv[3])
    device = stitch.open_device("tiny", executor=executor, threads=threads)
    loaded = device.load(model)
    pipeline = stitch.Pipeline([loaded])
    held, done, stop = pipeline(x), 0, threading.Event()

    def compute():
        global done
        while not stop.is_set():
            assert loaded(x).numpy()[0, 0] == 96 and pipeline(x).numpy()[5, 5] == 96
            done += 1

    def in_child():
        uses = (
            lambda: pipeline(x), lambda: loaded(x), held.numpy, lambda: held.address,
            lambda: device.load(model), lambda: device.tensor(x), device.flush, device.wait,
            device.explain, device.memory_report, lambda: device.memory("l1"),
            lambda: held.to_layout(held.layout), lambda: stitch.wait(held),
            lambda: stitch.submit(device, loaded, 0, (x,)), lambda: held.__dlpack__(),
            device.__enter__,
        )
        for use in uses:
            refused(use)
        assert device.is_closed and repr(held).startswith("<Tensor ")
        device.close()
        with stitch.open_device("tiny", executor=executor, threads=threads) as own:
            assert own.load(model)(x).numpy()[0, 0] == 96

    worker = threading.Thread(target=compute, daemon=True)
    worker.start()
    for _ in range(forks):
        before = done
        forked(in_child)
        while done == before and worker.is_alive():
            time.sleep(0.001)
    stop.set()
    worker.join()
    assert pipeline(x).numpy()[0, 0] == 96
    device.close()
    print("parent", done >= forks)
"""


@pytest.mark.parametrize(
    ("executor", "threads", "forks"),
    [
        pytest.param("numpy", 0, 20, marks=pytest.mark.campaign("threads")),
        ("onnxruntime", 3, 3),
        pytest.param("onnxruntime", 0, 20, marks=pytest.mark.campaign("threads")),
        pytest.param("onnxruntime", 3, 20, marks=pytest.mark.campaign("threads")),
    ],
)
def test_forks_beside_a_computing_thread_say_so_at_once_and_end(
    executor: str, threads: int, forks: int
) -> None:
    made = run(BESIDE_A_THREAD, executor, str(threads), str(forks))
    assert made.split() == ["parent", "True"]


def test_a_fork_without_other_threads_follows_the_same_rule() -> None:
    body = """
        import multiprocessing

        with stitch.open_device("tiny") as device:
            loaded = device.load(model)
            pending = loaded(x)

            def work(queue):
                try:
                    pending.numpy()
                except stitch.TaskError as error:
                    queue.put(str(error))
                with stitch.open_device("tiny") as own:
                    queue.put(float(own.load(model)(x).numpy()[0, 0]))

            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            child = context.Process(target=work, args=(queue,))
            child.start()
            said, made = queue.get(timeout=60), queue.get(timeout=60)
            child.join(60)
            assert child.exitcode == 0 and "belongs to process" in said and made == 96
            assert pending.numpy()[0, 0] == 96
        print("parent")
    """
    assert run(body).strip() == "parent"


def test_a_fork_out_of_a_hook_leaves_parent_and_child_whole() -> None:
    body = """
        from stitch.runtime import HookContext

        device = stitch.open_device("tiny")
        loaded = device.load(model)
        children = []

        def fork(context: HookContext) -> None:
            children.append(os.fork())

        end = device.hooks.register(after_program=fork)
        made = loaded(x)
        # What was under way ends in both processes.
        assert made.numpy()[0, 0] == 96
        if not children[0]:
            refused(made.numpy)
            device.close()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
        end()
        assert loaded(x).numpy()[0, 0] == 96
        device.close()
        print("parent")
    """
    assert run(body).strip() == "parent"


def test_a_training_in_a_child_says_so_and_stops_quietly() -> None:
    body = """
        builder = stitch.ComputationGraphBuilder("line")
        given = builder.input("x", (4, 3), "float32")
        weight = builder.parameter("w", np.ones((3, 2), np.float32))
        builder.output("y", builder.op("MatMul", given, weight))
        trained = stitch.compile(
            builder.build(), target="tiny", optimizer="sgd", loss="mse"
        )
        instance = trained.start()
        batch, label = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)

        def step():
            instance.forward(batch)
            instance.compute_loss(label)
            instance.backward()
            instance.update()
            instance.zero_grad()

        def in_child():
            refused(step)
            instance.close()

        for _ in range(8):
            step()
        forked(in_child)
        step()
        assert instance.steps == 9
        instance.close()
        print("parent")
    """
    assert run(body).strip() == "parent"
