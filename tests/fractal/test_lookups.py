"""Elements chosen by numbers of a graph: embeddings of words, in both modes and in one program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch import fractal as ops
from stitch.errors import TaskError, UsageError
from stitch.fractal import FractalTensor
from stitch.fractal.modes import MODES

TABLE = FractalTensor(np.arange(12, dtype=np.float32).reshape(4, 3))
WORDS = [[2, 0, 3], [1, -1]]


@pytest.mark.parametrize("name", MODES)
def test_words_are_looked_up_in_a_table(name: str) -> None:
    rows = TABLE.numpy()
    with ops.mode(name) as report:
        found = ops.map(
            lambda row: ops.scan(lambda s, i: s + TABLE[i], row, np.zeros(3, np.float32)),
            FractalTensor(WORDS),
        )
        paired = ops.map(lambda i: FractalTensor([TABLE, TABLE])[i][1], FractalTensor([1, 0]))
    assert found.tolist() == [np.cumsum(rows[words], axis=0).tolist() for words in WORDS]
    assert paired.tolist() == [rows[1].tolist()] * 2
    if name == "parallel":
        assert report.explain().count("one program") == 2


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "uint64", "int32"])
@pytest.mark.parametrize("name", MODES)
def test_whole_numbers_of_every_type_choose(name: str, dtype: str) -> None:
    with ops.mode(name):
        found = ops.map(lambda i: TABLE[i], FractalTensor(np.array([3, 0, 2], dtype)))
    assert found.tolist() == TABLE.numpy()[[3, 0, 2]].tolist()


def test_one_program_looks_up_whatever_it_is_given() -> None:
    net = ops.compile(lambda xs: ops.map(lambda i: TABLE[i] * 2.0, xs), FractalTensor([0, 0]))
    assert net(FractalTensor([3, 1])).tolist() == (TABLE.numpy()[[3, 1]] * 2).tolist()
    with pytest.raises(TaskError, match="out of range"):
        net(FractalTensor([4, 0])).tolist()


def test_what_is_no_number_and_lists_of_other_lengths_are_refused() -> None:
    ragged = FractalTensor([[1, 2], [3]])

    def refused(f: Any, xs: FractalTensor, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            ops.compile(lambda xs: ops.map(f, xs), xs)

    refused(lambda i: ragged[i], FractalTensor([0]), "ragged FractalTensor cannot be indexed")
    refused(lambda x: TABLE[x], FractalTensor([0.5]), "one whole number")
