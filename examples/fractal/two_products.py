"""Two matrix products back to back, blockwise: (A @ B) @ C without a matrix A @ B.

A map over rows of blocks of A; a fold over columns of B and the rows of C that belong to them; in
it a fold over the blocks of a row and a column.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stitch import fractal as ops

ROWS, INNER, COLUMNS, BLOCK, OUT = 3, 2, 4, 4, 6


def first(state: Any, a: Any, b: Any) -> Any:
    return state + a @ b


def second(state: Any, column: Any, c: Any, *, row: Any) -> Any:
    block = ops.fold(first, ops.zip(row, column), np.zeros((BLOCK, BLOCK), np.float32))
    return state + block @ c


def rows(row: Any, *, columns: Any, cs: Any) -> Any:
    return ops.fold(second, ops.zip(columns, cs), np.zeros((BLOCK, OUT), np.float32), row=row)


def network(a: Any, b: Any, c: Any) -> Any:
    """(A @ B) @ C in blocks of rows, for A as [rows][inner], B as [columns][inner] of blocks."""
    return ops.map(rows, a, columns=b, cs=c)


def inputs() -> dict[str, Any]:
    """The blocks of A by rows, those of B by columns, and those of C."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32) * np.float32(0.3)

    return {
        "a": ops.FractalTensor([list(row) for row in normal(ROWS, INNER, BLOCK, BLOCK)]),
        "b": ops.FractalTensor([list(column) for column in normal(COLUMNS, INNER, BLOCK, BLOCK)]),
        "c": ops.FractalTensor(normal(COLUMNS, BLOCK, OUT)),
    }


def main() -> None:
    """Run it, and say how far it is from the product of whole matrices."""
    given = inputs()
    found = network(**given).numpy().reshape(-1, OUT)
    a = np.block([list(row.numpy()) for row in given["a"]])
    b = np.block([list(column.numpy()) for column in given["b"]])  # transposed, by blocks
    b = b.reshape(COLUMNS, BLOCK, INNER, BLOCK).transpose(2, 1, 0, 3).reshape(INNER * BLOCK, -1)
    whole = a @ b @ given["c"].numpy().reshape(-1, OUT)
    print(f"two products: {ROWS} blocks of rows, "
          f"differ by {np.abs(found - whole).max():.1e} from whole matrices")  # fmt: skip


if __name__ == "__main__":
    main()
