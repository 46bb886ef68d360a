"""Operations large enough that what their kernels take shows: (operator, operands, attributes,
number of outputs), operands as in `drawn_operands`. At least one row for every operator.

An operator whose workspace has a rule of its own has rows in which the rule's parts differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.operators.one_operation import own_rows, table_rows

Row = tuple[Any, ...]

_UNARY = "Identity Softmax LogSoftmax Size Shape Flatten Transpose Hardmax Dropout"
_BINARY = "Add Sub Mul Div Mod Pow Max Min Sum Mean Equal Less LessOrEqual Greater GreaterOrEqual"
_REDUCTIONS = """ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum
ReduceLogSumExp ReduceSumSquare"""
_AXIS = np.array(1)


def _of_one_float() -> list[str]:
    """The elementwise operators that take one operand of floats."""
    rows = (*table_rows("elementwise"), *own_rows("f32[1]"))
    return sorted({r.op for r in rows if len(r.specs) == 1 and str(r.specs[0]).startswith("f32")})


def _elementwise() -> list[Row]:
    rows: list[Row] = [(op, ["f32[300,1001]+"], {}) for op in (*_of_one_float(), *_UNARY.split())]
    for op in _BINARY.split():
        words = {"fmod": 1} if op == "Mod" else {}
        rows.append((op, ["f32[300,1001]+", "f32[300,1001]+"], words))
        rows.append((op, ["f32[300,1,7]+", "f32[143,1]+"], words))
        if op not in ("Sum", "Mean"):
            rows.append((op, ["i64[300,1001]+", "i64[1001]+"], {}))
    rows += [
        (op, ["i32[300,1001]", "i32[300,1001]"], {})
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    ]
    rows += [(op, ["bool[1000,1001]", "bool[1001]"], {}) for op in ("And", "Or", "Xor")]
    rows += [(op, ["i64[300,1001]"], {}) for op in ("Abs", "Sign", "Neg")]
    rows += [
        ("Not", ["bool[1000,1001]"], {}),
        ("BitwiseNot", ["ui8[1000,1001]"], {}),
        ("BitShift", ["ui32[300,1001]", "ui32[300,1001]"], {"direction": "LEFT"}),
        ("Where", ["bool[300,1001]", "f32[300,1001]", "f32[1001]"], {}),
        ("PRelu", ["f32[300,1001]", "f32[1001]"], {}),
        ("Clip", ["f32[300,1001]", "f32[]", "f32[]+"], {}),
        ("Clip", ["i64[300,1001]"], {}),
        ("Gelu", ["f32[300,1001]"], {"approximate": "tanh"}),
        ("Pow", ["f32[300,1001]+", "f32[]+"], {}),
        ("Exp", ["f16[300,1001]"], {}),
    ]
    return rows


def _reductions() -> list[Row]:
    rows: list[Row] = []
    for op in _REDUCTIONS.split():
        rows.append((op, ["f32[300,1001]+"], {}))
        rows.append((op, ["f32[300,11,91]+", [1]], {"keepdims": 0}))
        rows.append((op, ["f32[300,11,91]+", [0, 2]], {}))
        rows.append((op, ["i64[300,11,91]+", [2]], {}))
        rows.append((op, ["f32[300,1001]+", []], {"noop_with_empty_axes": 1}))
    for op in ("ArgMax", "ArgMin"):
        rows.append((op, ["f32[300,1001]"], {"axis": 0}))
        rows.append((op, ["f32[300,1001]"], {"axis": 1, "select_last_index": 1}))
    for op in ("CumSum", "CumProd"):
        rows.append((op, ["f32[300,1001]", _AXIS], {"exclusive": 1, "reverse": 1}))
        rows.append((op, ["f32[300,1001]", _AXIS], {}))
    return rows


def _normalizations() -> list[Row]:
    channel = "f32[40]+"
    image = "f32[8,40,30,31]"
    return [
        ("BatchNormalization", [image, *[channel] * 4], {}),
        ("BatchNormalization", [image, *[channel] * 4], {"training_mode": 1}, 3),
        ("LayerNormalization", ["f32[300,1001]", "f32[1001]", "f32[1001]"], {}, 3),
        ("LayerNormalization", ["f32[300,7,143]", "f32[7,143]"], {"axis": 1}),
        ("RMSNormalization", ["f32[300,1001]", "f32[1001]"], {}),
        ("InstanceNormalization", [image, channel, channel], {}),
        ("GroupNormalization", [image, channel, channel], {"num_groups": 5}),
        ("LRN", [image], {"size": 5}),
        ("Softmax", ["f32[300,7,143]"], {"axis": 1}),
        ("LogSoftmax", ["f32[300,7,143]"], {"axis": 1}),
        ("Softmax", ["f32[3000,200]"], {}),
        ("Softmax", ["f32[2,300000]"], {}),
        ("Softmax", ["f32[300000,1]"], {}),
        ("LogSoftmax", ["f32[1000,300,1]"], {}),
        ("Hardmax", ["f32[1000,300,1]"], {}),
        ("Hardmax", ["f32[300,7,143]"], {"axis": 1}),
        ("GeluGradient", ["f32[300,1001]", "f32[300,1001]"], {}),
        ("GeluGradient", ["f32[300,1001]", "f32[300,1001]"], {"approximate": "tanh"}),
        ("SoftmaxGradient", ["f32[300,1001]", "f32[300,1001]"], {}),
        ("SoftmaxGradient", ["f32[300,7,143]", "f32[300,7,143]"], {"axis": 1}),
        *(
            (
                "BatchNormalizationGradient",
                [f"f32[{shape}]", f"f32[{shape}]", *[f"f32[{channels}]+"] * figures],
                {},
                3,
            )
            for figures in (1, 3)
            for shape, channels in (
                ("300,1001", 1001),
                ("30,7,1430", 7),
                ("300,77,13", 77),
                ("300300", 1),
                ("1,3,100100", 3),
                ("3,7000,16", 7000),
            )
        ),
        (
            "LayerNormalizationGradient",
            ["f32[300,1001]", "f32[300,1001]", "f32[300,1]", "f32[300,1]", "f32[1001]"],
            {},
            3,
        ),
    ]


def _products() -> list[Row]:
    return [
        ("MatMul", ["f32[300,500]", "f32[500,400]"], {}),
        ("MatMul", ["f32[7,300,50]", "f32[50,400]"], {}),
        ("MatMul", ["f32[7,1,300,50]", "f32[3,50,90]"], {}),
        ("MatMul", ["i64[100,500]", "i64[500,100]"], {}),
        ("Gemm", ["f32[300,500]", "f32[500,400]", "f32[400]"], {}),
        ("Gemm", ["f32[500,300]", "f32[400,500]", "f32[300,400]"],
         {"transA": 1, "transB": 1, "alpha": 2.0, "beta": 3.0}),
        ("Einsum", ["f32[300,500]", "f32[500,400]"], {"equation": "ij,jk->ik"}),
        ("Einsum", ["f32[20,30,40]", "f32[40,20,50]", "f32[50,60]"],
         {"equation": "abc,cad,de->be"}),
        ("Einsum", ["f32[300,1001]"], {"equation": "ij->ji"}),
        ("Einsum", ["f32[90,40]", "f32[70,40]"], {"equation": "ij,kj->ikj"}),
        ("MatMulInteger", ["ui8[300,500]", "ui8[500,400]", np.array(3, np.uint8)], {}),
        ("QLinearMatMul",
         ["ui8[300,500]", np.float32(0.1), np.array(3, np.uint8), "ui8[500,400]",
          np.float32(0.1), np.array(3, np.uint8), np.float32(0.1), np.array(3, np.uint8)], {}),
        ("QuantizeLinear", ["f32[300,1001]", np.float32(0.1), np.array(3, np.uint8)], {}),
        ("DequantizeLinear", ["ui8[300,1001]", np.float32(0.1), np.array(3, np.uint8)], {}),
        ("Det", ["f32[90,40,40]"], {}),
        ("RNN", ["f32[50,20,60]", "f32[1,64,60]1", "f32[1,64,64]1", "f32[1,128]"], {}, 2),
        ("GRU", ["f32[50,20,60]", "f32[1,192,60]1", "f32[1,192,64]1", "f32[1,384]"], {}, 2),
        ("LSTM", ["f32[50,20,60]", "f32[1,256,60]1", "f32[1,256,64]1", "f32[1,512]"], {}, 3),
        ("LSTM", ["f32[50,20,60]", "f32[2,256,60]1", "f32[2,256,64]1"],
         {"direction": "bidirectional"}, 3),
    ]  # fmt: skip


def _windows() -> list[Row]:
    image, kernel = "f32[4,16,40,41]", {"kernel_shape": (3, 3)}
    around = {**kernel, "pads": (1, 1, 1, 1)}
    zero = np.array(3, np.uint8)
    return [
        ("Conv", [image, "f32[20,16,3,3]", "f32[20]"], around),
        ("Conv", [image, "f32[20,16,1,1]"], {}),
        ("Conv", [image, "f32[32,1,3,3]"], {**around, "group": 16, "strides": (2, 2)}),
        ("Conv", ["f32[1,1,300,301]", "f32[1,1,9,9]"], {}),
        ("ConvTranspose", [image, "f32[16,10,3,3]"], {"strides": (2, 2)}),
        ("ConvTranspose", [image, "f32[16,5,3,3]"], {**around, "group": 2}),
        ("ConvWeightGradient", [image, "f32[4,20,40,41]"], around),
        ("ConvWeightGradient", ["f32[9,64,4,4]", "f32[9,128,4,4]"], around),
        ("ConvInteger", ["ui8[4,16,40,41]", "ui8[20,16,3,3]", zero], around),
        ("QLinearConv",
         ["ui8[4,16,40,41]", np.float32(0.1), zero, "ui8[20,16,3,3]", np.float32(0.1), zero,
          np.float32(0.1), zero], around),
        ("MaxPool", [image], around),
        ("MaxPool", [image], {**around, "strides": (2, 2)}, 2),
        ("AveragePool", [image], around),
        ("LpPool", [image], around),
        ("GlobalAveragePool", [image], {}),
        ("GlobalMaxPool", [image], {}),
        ("MaxPoolGradient", [image, image, image], around),
        ("MaxPoolGradient", ["f32[2,40,15,15]", "f32[2,40,30,31]", "f32[2,40,15,15]"],
         {"kernel_shape": (2, 2), "strides": (2, 2)}),
        ("Col2Im", ["f32[4,144,1600]", [42, 42], [3, 3]], {}),
        ("DeformConv", [image, "f32[20,16,3,3]", "f32[4,18,38,39]1"], {}),
        ("DFT", ["f32[20,1000,1]", None, _AXIS], {}),
        ("DFT", ["f32[20,1009,2]", None, _AXIS], {"inverse": 1}),
        ("DFT", ["f32[20,1000,1]", None, _AXIS], {"onesided": 1}),
        ("DFT", ["f32[1,100003,2]", None, _AXIS], {}),
        ("Resize", ["f32[2,6,60,61]", None, np.array([1, 1, 2, 1.5], np.float32)],
         {"mode": "linear"}),
        ("Resize", ["f32[2,6,60,61]", None, np.array([1, 1, 2, 1.5], np.float32)],
         {"mode": "cubic", "antialias": 1}),
        ("Resize", ["f32[2,6,60,61]", None, np.array([1, 1, 2, 1.5], np.float32)],
         {"mode": "nearest"}),
        ("GridSample", ["f32[2,6,60,61]", "f32[2,70,71,2]1"], {}),
        ("GridSample", ["f32[2,6,60,61]", "f32[2,70,71,2]1"], {"mode": "cubic"}),
        ("RoiAlign", ["f32[2,6,60,61]", np.array([[0, 0, 60, 60], [3, 3, 9, 9]], np.float32),
                      np.array([0, 1])], {"output_height": 30, "output_width": 30}),
    ]  # fmt: skip


def _movements() -> list[Row]:
    some, steps = "f32[300,1001]", {"axis": 1}
    return [
        ("Reshape", [some, [1001, 300]], {}),
        ("Squeeze", ["f32[300,1,1001]", [1]], {}),
        ("Unsqueeze", [some, [1]], {}),
        ("Transpose", ["f32[30,10,1001]"], {"perm": (1, 0, 2)}),
        ("Concat", [some, some], steps),
        ("Split", ["f32[300,1000]"], {"num_outputs": 3, "axis": 1}, 3),
        ("Slice", [some, [0, 5], [200, -1], [0, 1], [2, 3]], {}),
        ("Expand", ["f32[300,1,7]", [300, 143, 7]], {}),
        ("Tile", ["f32[30,101]", [10, 9]], {}),
        ("Trilu", ["f32[3,300,301]", np.array(1)], {}),
        *(("Pad", [some, [3, 2, 1, 4]], {"mode": mode})
          for mode in ("constant", "reflect", "edge", "wrap")),
        ("Gather", [some, "i64[2000]<1001"], {"axis": 1}),
        ("GatherElements", [some, "i64[300,900]<1001"], {"axis": 1}),
        ("GatherND", [some, "i64[30000,2]<300"], {}),
        ("TopK", [some, [50]], {"axis": 1}, 2),
        ("TopK", [some, [50]], {"axis": 0, "largest": 0}, 2),
        ("ScatterElements", [some, "i64[300,900]<1001", "f32[300,900]"], steps),
        ("ScatterElements", [some, "i64[300,900]<1001", "f32[300,900]"],
         {**steps, "reduction": "add"}),
        ("ScatterND", [some, "i64[30000,2]<300", "f32[30000]"], {}),
        ("ScatterND", [some, "i64[30000,2]<300", "f32[30000]"], {"reduction": "max"}),
        ("OneHot", ["i64[1000]<300", np.array(300), "f32[2]"], {}),
        ("TensorScatter", ["f32[30,4,100,20]", "f32[30,4,50,20]", np.zeros(30, np.int64)], {}),
        ("ConstantOfShape", [[300, 1001]], {"value_float": 1.0}),
        ("Range", [np.float32(0), np.float32(300000), np.float32(1)], {}),
        ("Cast", [some], {"to": 7}),
        ("Cast", [some], {"to": 10}),
        ("Cast", [some], {"to": 3}),
        ("Cast", ["i64[300,1001]"], {"to": 9}),
        ("BitCast", [some], {"to": 6}),
        ("TfIdfVectorizer", ["i64[30,1000]+"],
         {"max_gram_length": 2, "min_gram_length": 1, "max_skip_count": 3, "mode": "TF",
          "ngram_counts": (0, 4), "ngram_indexes": (0, 1, 2, 3, 4, 5),
          "pool_int64s": (1, 2, 3, 4, 1, 2, 3, 4)}),
        ("Dropout", [some], {}, 2),
    ]  # fmt: skip


def _own_operators() -> list[Row]:
    some = "f32[300,1001]"
    return [
        ("Window", [some, np.array(1), np.array([2, 1])], {"lengths": (140, 3)}),
        ("Window", [some, np.array(299), np.array([-7, 3])], {"lengths": (40, 1)}),
        ("Repartition", ["f32[3,100,1000]"], {"axis": 1, "degree": 10}),
        ("Combine", ["f32[30,100,100]"], {"axis": 1, "degree": 10}),
        ("Replicate", [some], {"degree": 3}),
        ("Reduction", [some], {"degree": 3}),
        ("Expect", [some, np.array([1, 2]), np.array([1, 2])], {"name": "x"}),
    ]  # fmt: skip


def _one_long_dimension() -> list[Row]:
    """Many steps, softmaxes, windows or indices, and little else; one side far from the others."""
    zero, tenth = np.array(3, np.uint8), np.float32(0.1)
    regions = np.array([[0, 0, 60, 60]], np.float32)
    wide = np.array([[0, 0, 8000, 4]], np.float32)
    twice = {"mode": "linear"}
    return [
        *((op, ["f32[1800,1,858]"], {"axis": 1}) for op in ("Softmax", "LogSoftmax", "Hardmax")),
        ("Hardmax", ["f32[300,56,143]"], {"axis": 1}),
        ("SoftmaxGradient", ["f32[1800,1,858]", "f32[1800,1,858]"], {"axis": 1}),
        ("LayerNormalizationGradient",
         ["f32[1,200200]", "f32[1,200200]", "f32[1,1]", "f32[1,1]", "f32[200200]"], {}, 3),
        ("MatMulInteger", ["ui8[300,4000]", "ui8[4000,400]", zero], {}),
        *(("QLinearMatMul", [a, tenth, zero, b, tenth, zero, tenth, zero], {})
          for a, b in (("ui8[300,4000]", "ui8[4000,400]"), ("ui8[1800,1]", "ui8[1,400]"))),
        ("LSTM", ["f32[50,400,6]", "f32[1,256,6]1", "f32[1,256,64]1", "f32[1,512]"], {}, 3),
        ("GRU", ["f32[400,50,6]", "f32[1,192,6]1", "f32[1,192,64]1"], {"layout": 1}, 2),
        *(("ConvTranspose", ["f32[1,1,1,1]", f"f32[1,1,{size},{size}]"], {"strides": (2, 2)})
          for size in (90, 130)),
        ("Resize", ["f32[1,1,4,20000]", None, np.array([1, 1, 2, 1.5], np.float32)], twice),
        ("Resize", ["f32[1,1,4,20000]", None, None, [1, 1, 4, 50]],
         {"mode": "linear", "antialias": 1}),
        ("Resize", ["f32[1,1,1,12200]", None, np.array([1, 1, 2, 1.5], np.float32)],
         {"mode": "cubic", "antialias": 1, "exclude_outside": 1}),
        ("Resize", ["f32[1,1,4,20000]", np.array([0, 0, 0, 0, 1, 1, 2, 2], np.float32), None,
                    [1, 1, 8, 20000]],
         {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}),
        ("RoiAlign", ["f32[1,2,60,61]", regions, [0]], {"sampling_ratio": 3000}),
        ("RoiAlign", ["f32[1,2,60,61]", regions, [0]], {"sampling_ratio": 3000, "mode": "max"}),
        ("RoiAlign", ["f32[1,200,4,2000]", wide, [0]], {"output_width": 3}),
        ("RoiAlign", ["f32[1,900,60,61]", regions, [0]], {"output_height": 7, "output_width": 7}),
        *(("DeformConv", [f"f32[1,{c},{h + 2},{w + 2}]", f"f32[2,{c},3,3]", f"f32[1,18,{h},{w}]1"],
           {}) for c, h, w in ((200, 38, 39), (2, 1, 4000), (2, 400, 38))),
        *(("MaxPool", [f"f32[{image}]"], {"kernel_shape": (2, 2), "strides": (2, 2)}, 2)
          for image in ("1,3000,7,7", "1,2,600,601", "1,20000,2,2", "1,1,2,100000")),
        ("Trilu", ["f32[1,1800,1806]", np.array(1)], {}),
        *(("Pad", ["f32[1,200200]", [3, 2, 1, 4]], {"mode": mode}) for mode in ("edge", "wrap")),
        ("Gather", ["f32[1001]", "i64[400000]<1001"], {}),
        ("Window", ["f32[400000]", np.array(0), np.array([1, 3])], {"lengths": (300000, 2)}),
        ("GatherND", ["f32[300,1001]", "i64[400000,2]<300"], {}),
        ("ScatterElements", ["f32[300,101]", "i64[300,2200]<101", "f32[300,2200]"], {"axis": 1}),
        ("ScatterND", ["f32[300,1001]", "i64[400000,2]<300", "f32[400000]"], {}),
        ("ScatterND", ["f32[30,20]", "i64[20000,1]<30", "f32[20000,20]"], {"reduction": "add"}),
        ("TopK", ["f32[3000,1001]", [50]], {"axis": 1}, 2),
        ("TopK", ["f32[300000]", [300000]], {}),
    ]  # fmt: skip


ROWS: list[Row] = [
    *_elementwise(), *_reductions(), *_normalizations(), *_products(), *_windows(), *_movements(),
    *_own_operators(), *_one_long_dimension(),
]  # fmt: skip
