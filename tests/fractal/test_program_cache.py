"""Programs of calls that come again are kept, but not all, and threads may share them."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.fractal import FractalTensor, program_cache
from stitch.fractal.program_cache import ProgramCache
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.runtime import LoadedProgram

MIB = 1 << 20


def graph_of(nbytes: int) -> ComputationGraph:
    builder = ComputationGraphBuilder("held")
    builder.output("y", builder.parameter("w", np.zeros(nbytes, np.uint8)))
    return builder.build()


def test_so_many_bytes_are_kept_and_the_last_one() -> None:
    kept: ProgramCache[int] = ProgramCache(most=100)
    third = graph_of(program_cache.MAX_CONSTANT_NBYTES // 3)
    for number in range(5):
        kept.keep(number, number, third)
    assert [kept.get(number) for number in range(5)] == [None, None, 2, 3, 4]
    kept.keep("large", 7, graph_of(program_cache.MAX_CONSTANT_NBYTES + 1))
    assert (len(kept), kept.get("large")) == (1, 7)
    kept.keep("small", 8, graph_of(1))
    kept.keep("small", 9, graph_of(1))
    assert (len(kept), kept.get("small"), kept.nbytes) == (1, 9, 1)


def test_weights_that_change_do_not_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a constant of another program."""
    monkeypatch.setattr(program_cache, "MAX_CONSTANT_NBYTES", 4 * MIB)
    xs = FractalTensor(np.ones((2, 1, 512), np.float32))
    with stitch.open_device("host") as device, ops.mode("parallel", device=device):
        for number in range(10):
            weights = np.full((512, 512), number, np.float32)
            found = ops.map(lambda x, w=weights: x @ w, xs)
            assert found.numpy()[0, 0, 0] == 512 * number
        gc.collect()
        held = [one for one in gc.get_objects() if isinstance(one, LoadedProgram)]
        assert sum(one.device is device for one in held) <= 4


def test_threads_share_what_is_kept() -> None:
    kept: ProgramCache[int] = ProgramCache(most=1)
    empty, wrong = graph_of(1), []

    def work(own: int) -> None:
        try:
            for number in range(5000):
                key = (own + number) % 3
                found = kept.get(key)
                if found is None:
                    kept.keep(key, key, empty)
                assert found in (None, key)
        except Exception as error:
            wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(own,)) for own in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
    assert (len(kept), kept.nbytes) == (1, 1)
