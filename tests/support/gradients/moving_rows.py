"""Gradients' cases: operators that move, repeat, drop, read and write elements."""

from __future__ import annotations

import numpy as np

from tests.support.gradients.running import Case, case

C = "f64[2,3,4]"

SHAPES = [
    case("Identity", [C]),
    case("Reshape", [C, [4, -1]]),
    case("Reshape", [C, [0, -1]]),
    case("Flatten", [C]),
    case("Flatten", [C], axis=0),
    case("Squeeze", ["f64[1,3,1]"]),
    case("Squeeze", ["f64[1,3,1]", [-1]]),
    case("Unsqueeze", [C, [0, -1]]),
    case("Dropout", [C]),
    case("Transpose", [C]),
    case("Transpose", [C], perm=(1, 2, 0)),
    case("Concat", [C, "f64[2,1,4]", "f64[2,2,4]"], axis=1),
    case("Concat", [C], axis=-1),
    case("Concat", [C, np.ones((2, 3, 2))], axis=-1),
    case("Split", [C, [1, 3]], outputs=2, axis=2),
    case("Split", ["f64[7,2]"], outputs=3, num_outputs=3),
    case("Slice", [C, [1], [3], [1]]),
    case("Slice", [C, [0, -3], [9, -1]]),
    case("Slice", ["f64[9,8]", [1, 0], [8, 99], [0, 1], [3, 2]]),
    case("Slice", ["f64[9,8]", [-2, 99], [0, -99], [0, -1], [-3, -1]]),
    case("Slice", ["f64[9,8]", [3], [3], [0]]),
    case("Expand", ["f64[3,1]", [2, 1, 4]]),
    case("Expand", ["f64[]", [2, 3]]),
    case("Tile", ["f64[2,3]", [3, 2]]),
    case("Tile", ["f64[2,3]", [1, 1]]),
    case("Trilu", [C]),
    case("Trilu", [C, np.array(-1)], upper=0),
    case("Pad", ["f64[3,4]", [1, 0, 2, 3]]),
    case("Pad", ["f64[3,4]", [-1, 1, 0, 2]]),
    case("Pad", ["f64[3,4]", [1, -1, 2, -2], "f64[]"]),
    case("Pad", ["f64[3,4]", [2, 1], None, [-1]]),
    *(
        case("Pad", ["f64[2,3,5]", [2, 1, 0, 3], None, [1, 2]], mode=mode)
        for mode in ("edge", "reflect", "wrap")
    ),
    case("Pad", ["f64[1,4,5]", [1, 2, 3, 1], None, [1, 2]], mode="reflect"),
]  # fmt: skip


INDEXING = [
    case("Gather", ["f64[5,3]", "i64[2,4]<5"]),
    case("Gather", ["f64[2,5,3]", "i64[4]<5"], axis=1),
    case("Gather", ["f64[2,5,3]", "i32[2,2]<3"], axis=-1),
    case("Gather", ["f64[5,3]", np.array(-2)]),
    case("Gather", ["f64[5,3]", [1, 1, -1]]),
    case("Gather", ["f64[2,5]", np.array([3])], axis=1),
    case("Window", ["f64[9,3]", np.array(1), [2, 1]], lengths=(3, 2)),
    case("Window", ["f64[9,3]", np.array(8), [-3]], lengths=(3,)),
    case("Window", ["f64[9,3]", np.array(2), [0, 3, 99]], lengths=(4, 2, 1)),
    case("Window", ["f64[9,3]", "i64[]<5", "i64[2]<2"], lengths=(4, 2)),
    case("Window", ["f64[5]", np.array(1), [1]], lengths=(0,)),
    case("Repartition", ["f64[2,4,6]"], axis=1, degree=3),
    case("Combine", ["f64[6,2,3]"], axis=-1, degree=3),
    case("Replicate", ["f64[2,3]"], degree=3),
    case("Reduction", ["f64[6,3]"], degree=3),
    case("GatherElements", ["f64[4,5]", "i64[4,2]<5"], axis=1),
    case("GatherElements", ["f64[4,5]", "i64[2,5]<4"]),
    case("GatherND", ["f64[4,5,2]", "i64[3,2]<4"]),
    case("GatherND", ["f64[3,5,2]", "i64[3,2,1]<5"], batch_dims=1),
    case("TopK", ["f64[3,6]", [2]]),
    case("TopK", ["f64[6,3]", [4]], outputs=2, axis=0, largest=0),
    case("ScatterElements", ["f64[4,5]", np.array([[0, 3], [2, 1]]), "f64[2,2]"], axis=1),
    case("ScatterElements", ["f64[4,5]", "i64[3,5]<5", "f64[3,5]"], axis=1, reduction="add"),
    case("ScatterND", ["f64[4,3]", np.array([[2], [0]]), "f64[2,3]"]),
    case("ScatterND", ["f64[4,3]", np.array([[2], [2]]), "f64[2,3]"], reduction="add"),
    case("OneHot", ["i64[2,3]<4", [4], "f64[2]"]),
]  # fmt: skip

ROWS: list[Case] = [*SHAPES, *INDEXING]
