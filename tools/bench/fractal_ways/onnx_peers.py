"""ONNX Runtime: its LSTM operator, and models with its own Scan, written by hand.

A `Scan` has the cell of the nest as its body, operator by operator; what all rounds share is
captured from around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from fractal_ways.cases import Run
from stitch.program import Array

OPSET, IR_VERSION = 17, 8
FLOAT = TensorProto.FLOAT


class _Model:
    """Nodes and constants of a model that is being written."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, array: Array) -> str:
        """A constant, by its name."""
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def op(self, op: str, given: Sequence[str], *made: str, **attributes: Any) -> None:
        """A node."""
        self.nodes.append(helper.make_node(op, [*given], [*made], **attributes))

    def built(
        self, given: Mapping[str, Sequence[int]], made: Mapping[str, Sequence[int]],
        more: Sequence[Any] = (),
    ) -> bytes:  # fmt: skip
        """The model, serialized; `more` are inputs of other types."""
        inputs = [*_infos(given), *more]
        graph = helper.make_graph(self.nodes, "nest", inputs, _infos(made), self.constants)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
        )
        serialized: bytes = model.SerializeToString()
        return serialized


def _infos(shapes: Mapping[str, Sequence[int]]) -> list[Any]:
    return [helper.make_tensor_value_info(name, FLOAT, [*s]) for name, s in shapes.items()]


def session_run(model: bytes, given: dict[str, Array]) -> Run:
    """A session whose inputs lie where it reads them, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in given.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    for output in session.get_outputs():
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty(output.shape, np.float32))
        binding.bind_ortvalue_output(output.name, value)

    def run() -> Any:
        session.run_with_iobinding(binding)
        return binding.get_outputs()

    return run


def lstm(model: str, xs: Array, ws: Array, us: Array, bs: Array) -> Run:
    """A stacked LSTM as `operators`, `scans`, or `hoisted scans`."""
    if model == "operators":
        return session_run(_lstm_operators(xs, ws, us, bs), {"xs": xs})
    is_hoisted = model == "hoisted scans"
    return session_run(lstm_scans(xs.shape, ws, us, bs, is_hoisted=is_hoisted), {"xs": xs})


def _lstm_operators(xs: Array, ws: Array, us: Array, bs: Array) -> bytes:
    """ONNX's gates are input, output, forget, new."""
    written, (depth, hidden, _), words = _Model(), ws.shape, "xs"

    def turned(block: Array) -> Array:
        i, f, o, new = np.split(block, 4, axis=1)
        return np.concatenate([i, o, f, new], axis=1).T[None]

    for n in range(depth):
        w, u = turned(ws[n]), turned(us[n])
        b = np.concatenate([turned(bs[n])[:, :, 0], np.zeros((1, 4 * hidden), np.float32)], axis=1)
        parts = {"w": w, "u": u, "b": b}
        names = [written.constant(f"{key}{n}", part) for key, part in parts.items()]
        written.op("LSTM", [words, *names], f"directions{n}", hidden_size=hidden)
        axis = written.constant(f"axis{n}", np.array([1], np.int64))
        written.op("Squeeze", [f"directions{n}", axis], f"words{n}")
        words = f"words{n}"
    written.op("Identity", [words], "said")
    return written.built({"xs": xs.shape}, {"said": xs.shape})


def lstm_scans(
    shape: Sequence[int], ws: Array, us: Array, bs: Array, *, is_hoisted: bool = False
) -> bytes:
    """A Scan for each layer; `is_hoisted`: the products of all words with the weights of a layer
    come before it."""
    written, words = _Model(), "xs"
    length, batch, hidden = shape
    zero = written.constant("zero", np.zeros((batch, hidden), np.float32))
    for n in range(len(ws)):
        for key, part in {"w": ws[n], "u": us[n], "b": bs[n]}.items():
            written.constant(f"{key}{n}", part)
        taken = words
        if is_hoisted:
            written.op("MatMul", [words, f"w{n}"], f"products{n}")
            written.op("Add", [f"products{n}", f"b{n}"], f"taken{n}")
            taken = f"taken{n}"
        body = _lstm_cell(n, batch, hidden, is_hoisted=is_hoisted)
        made = f"said{n}", f"kept{n}", f"words{n}"
        written.op("Scan", [zero, zero, taken], *made, body=body, num_scan_inputs=1)
        words = f"words{n}"
    written.op("Identity", [words], "all_said")
    return written.built({"xs": shape}, {"all_said": (length, batch, hidden)})


def _lstm_cell(n: int, batch: int, hidden: int, *, is_hoisted: bool) -> Any:
    """The body of layer n."""
    cell, state = _Model(), (batch, hidden)
    cell.op("MatMul", ["said_before", f"u{n}"], "by_state")
    if is_hoisted:
        cell.op("Add", ["x", "by_state"], "gates")
    else:
        cell.op("MatMul", ["x", f"w{n}"], "by_word")
        cell.op("Add", ["by_word", "by_state"], "both")
        cell.op("Add", ["both", f"b{n}"], "gates")
    cell.op("Split", ["gates"], "i", "f", "o", "new", axis=1)
    for gate in "ifo":
        cell.op("Sigmoid", [gate], f"{gate}_open")
    cell.op("Tanh", ["new"], "new_in_range")
    cell.op("Mul", ["f_open", "kept_before"], "kept_of_before")
    cell.op("Mul", ["i_open", "new_in_range"], "kept_of_new")
    cell.op("Add", ["kept_of_before", "kept_of_new"], "kept")
    cell.op("Tanh", ["kept"], "kept_in_range")
    cell.op("Mul", ["o_open", "kept_in_range"], "said")
    cell.op("Identity", ["said"], "word")
    taken = {"said_before": state, "kept_before": state,
             "x": (batch, 4 * hidden if is_hoisted else hidden)}  # fmt: skip
    made = {"said": state, "kept": state, "word": state}
    return helper.make_graph(cell.nodes, f"cell{n}", _infos(taken), _infos(made))


def ragged_products(model: str, lists: Sequence[Array]) -> Run:
    """Running products of each list, as `scans` or a `sequence map`."""
    if model == "scans":
        return session_run(*_scan_of_each(lists))
    given = {
        "matrices": np.concatenate(lists),
        "lengths": np.array([len(each) for each in lists], np.int64),
    }
    return session_run(_mapped_scan(given["matrices"].shape, len(lists)), given)


def _product_of_round(size: int) -> Any:
    """The body of a scan of products."""
    body, kind = _Model(), (size, size)
    body.op("MatMul", ["before", "matrix"], "after")
    body.op("Identity", ["after"], "product")
    taken, made = {"before": kind, "matrix": kind}, {"after": kind, "product": kind}
    return helper.make_graph(body.nodes, "step", _infos(taken), _infos(made))


def _scan_of_each(lists: Sequence[Array]) -> tuple[bytes, dict[str, Array]]:
    """A Scan for each list, and an input."""
    written, size = _Model(), lists[0].shape[1]
    written.constant("identity", np.eye(size, dtype=np.float32))
    for n in range(len(lists)):
        names = f"last{n}", f"products{n}"
        written.op(
            "Scan", ["identity", f"list{n}"], *names, body=_product_of_round(size),
            num_scan_inputs=1,
        )  # fmt: skip
    shapes = [each.shape for each in lists]
    given = {f"list{n}": shape for n, shape in enumerate(shapes)}
    made = {f"products{n}": shape for n, shape in enumerate(shapes)}
    return written.built(given, made), dict(zip(given, lists, strict=True))


def _mapped_scan(shape: Sequence[int], lists: int) -> bytes:
    """All matrices split into a sequence of lists, a map over it with a Scan as its body."""
    written, size = _Model(), shape[1]
    written.constant("identity", np.eye(size, dtype=np.float32))
    mapped = _Model()
    mapped.op(
        "Scan", ["identity", "list"], "last", "products", body=_product_of_round(size),
        num_scan_inputs=1,
    )  # fmt: skip
    any_list = [
        [helper.make_tensor_value_info(name, FLOAT, ["words", size, size])]
        for name in ("list", "products")
    ]
    body = helper.make_graph(mapped.nodes, "list", *any_list)
    written.op("SplitToSequence", ["matrices", "lengths"], "lists", axis=0)
    written.op("SequenceMap", ["lists"], "mapped", body=body)
    written.op("ConcatFromSequence", ["mapped"], "found", axis=0)
    lengths = helper.make_tensor_value_info("lengths", TensorProto.INT64, [lists])
    return written.built({"matrices": shape}, {"found": shape}, [lengths])
