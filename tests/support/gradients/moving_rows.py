"""Gradients' cases: operators that move, repeat, drop, read and write elements."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.gradients.running import Case, case

C = "f64[2,3,4]"

SHAPES = [
    case("Identity", [C], lambda x: x.clone()),
    case("Reshape", [C, [4, -1]], lambda x: x.reshape(4, -1)),
    case("Reshape", [C, [0, -1]], lambda x: x.reshape(2, -1)),
    case("Flatten", [C], lambda x: x.flatten(1)),
    case("Flatten", [C], lambda x: x.reshape(1, -1), axis=0),
    case("Squeeze", ["f64[1,3,1]"], torch.squeeze),
    case("Squeeze", ["f64[1,3,1]", [-1]], lambda x: x.squeeze(-1)),
    case("Unsqueeze", [C, [0, -1]], lambda x: x[None, ..., None]),
    case("Dropout", [C], lambda x: x.clone()),
    case("Transpose", [C], lambda x: x.permute(2, 1, 0)),
    case("Transpose", [C], lambda x: x.permute(1, 2, 0), perm=(1, 2, 0)),
    case("Concat", [C, "f64[2,1,4]", "f64[2,2,4]"], lambda *t: torch.cat(t, 1), axis=1),
    case("Concat", [C], lambda x: x.clone(), axis=-1),
    case("Concat", [C, np.ones((2, 3, 2))], lambda x: torch.cat((x, torch.ones(2, 3, 2)), 2),
         axis=-1),
    case("Split", [C, [1, 3]], lambda x: x.split((1, 3), 2), 2, axis=2),
    case("Split", ["f64[7,2]"], lambda x: x.split((3, 3, 1)), 3, num_outputs=3),
    case("Slice", [C, [1], [3], [1]], lambda x: x[:, 1:3]),
    case("Slice", [C, [0, -3], [9, -1]], lambda x: x[:, 0:2]),
    case("Slice", ["f64[9,8]", [1, 0], [8, 99], [0, 1], [3, 2]], lambda x: x[1:8:3, ::2]),
    case("Slice", ["f64[9,8]", [-2, 99], [0, -99], [0, -1], [-3, -1]],
         lambda x: x.flip(0, 1)[1:8:3]),
    case("Slice", ["f64[9,8]", [3], [3], [0]], lambda x: x[3:3]),
    case("Expand", ["f64[3,1]", [2, 1, 4]], lambda x: x.expand(2, 3, 4)),
    case("Expand", ["f64[]", [2, 3]], lambda x: x.expand(2, 3)),
    case("Tile", ["f64[2,3]", [3, 2]], lambda x: x.tile(3, 2)),
    case("Tile", ["f64[2,3]", [1, 1]], lambda x: x.clone()),
    case("SpaceToDepth", ["f64[1,2,4,6]"], blocksize=2),
    case("DepthToSpace", ["f64[1,8,2,3]"], blocksize=2),
    case("DepthToSpace", ["f64[1,8,2,3]"], lambda x: torch.pixel_shuffle(x, 2),
         blocksize=2, mode="CRD"),
    case("Trilu", [C], torch.triu),
    case("Trilu", [C, np.array(-1)], lambda x: torch.tril(x, -1), upper=0),
    case("Pad", ["f64[3,4]", [1, 0, 2, 3]], lambda x: torch.nn.functional.pad(x, (0, 3, 1, 2))),
    case("Pad", ["f64[3,4]", [-1, 1, 0, 2]], lambda x: torch.nn.functional.pad(x, (1, 2, -1, 0))),
    case("Pad", ["f64[3,4]", [1, -1, 2, -2], "f64[]"]),
    case("Pad", ["f64[3,4]", [2, 1], None, [-1]], lambda x: torch.nn.functional.pad(x, (2, 1))),
    *(
        case("Pad", ["f64[2,3,5]", [2, 1, 0, 3], None, [1, 2]], mode=mode)
        for mode in ("edge", "reflect", "wrap")
    ),
    case("Pad", ["f64[1,4,5]", [1, 2, 3, 1], None, [1, 2]],
         lambda x: torch.nn.functional.pad(x, (2, 1, 1, 3), mode="reflect"), mode="reflect"),
]  # fmt: skip


def _scattered(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return x.scatter_add(1, i, u)


INDEXING = [
    case("Gather", ["f64[5,3]", "i64[2,4]<5"], lambda x, i: x[i]),
    case("Gather", ["f64[2,5,3]", "i64[4]<5"], lambda x, i: x[:, i], axis=1),
    case("Gather", ["f64[2,5,3]", "i32[2,2]<3"], lambda x, i: x[:, :, i], axis=-1),
    case("Gather", ["f64[5,3]", np.array(-2)], lambda x: x[3]),
    case("Gather", ["f64[5,3]", [1, 1, -1]], lambda x: x[[1, 1, 4]]),
    case("Gather", ["f64[2,5]", np.array([3])], lambda x: x[:, 3:4], axis=1),
    case("Window", ["f64[9,3]", np.array(1), [2, 1]],
         lambda x: x[1:].unfold(0, 2, 1)[:6:2].transpose(1, 2), lengths=(3, 2)),
    case("Window", ["f64[9,3]", np.array(8), [-3]], lambda x: x[[8, 5, 2]], lengths=(3,)),
    case("Window", ["f64[9,3]", np.array(2), [0, 3, 99]],
         lambda x: x[2:6:3].reshape(1, 2, 1, 3).expand(4, 2, 1, 3), lengths=(4, 2, 1)),
    case("Window", ["f64[9,3]", "i64[]<5", "i64[2]<2"],
         lambda x, b, s: x[b + torch.arange(4)[:, None] * s[0] + torch.arange(2) * s[1]],
         lengths=(4, 2)),
    case("Window", ["f64[5]", np.array(1), [1]], lambda x: x[1:1], lengths=(0,)),
    case("GatherElements", ["f64[4,5]", "i64[4,2]<5"], lambda x, i: x.gather(1, i), axis=1),
    case("GatherElements", ["f64[4,5]", "i64[2,5]<4"], lambda x, i: x.gather(0, i)),
    case("GatherND", ["f64[4,5,2]", "i64[3,2]<4"], lambda x, i: x[i[:, 0], i[:, 1]]),
    case("GatherND", ["f64[3,5,2]", "i64[3,2,1]<5"], batch_dims=1),
    case("ReverseSequence", ["f64[4,3,2]", np.array([2, 4, 1])]),
    case("ReverseSequence", ["f64[3,4]", np.array([2, 4, 1])], batch_axis=0, time_axis=1),
    case("TopK", ["f64[3,6]", [2]], lambda x: x.topk(2).values),
    case("TopK", ["f64[6,3]", [4]], lambda x: x.topk(4, 0, largest=False).values, 2,
         axis=0, largest=0),
    case("ScatterElements", ["f64[4,5]", np.array([[0, 3], [2, 1]]), "f64[2,2]"],
         lambda x, u: x.scatter(1, torch.tensor([[0, 3], [2, 1]]), u), axis=1),
    case("ScatterElements", ["f64[4,5]", "i64[3,5]<5", "f64[3,5]"], _scattered, axis=1,
         reduction="add"),
    case("ScatterND", ["f64[4,3]", np.array([[2], [0]]), "f64[2,3]"],
         lambda x, u: x.index_copy(0, torch.tensor([2, 0]), u)),
    case("ScatterND", ["f64[4,3]", np.array([[2], [2]]), "f64[2,3]"],
         lambda x, u: x.index_add(0, torch.tensor([2, 2]), u), reduction="add"),
    case("OneHot", ["i64[2,3]<4", [4], "f64[2]"]),
]  # fmt: skip

ROWS: list[Case] = [*SHAPES, *INDEXING]
