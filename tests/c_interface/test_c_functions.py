"""The functions of the C interface, called with cffi's values without building the library."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI

import stitch
from stitch.c_interface.embedded import Library
from stitch.c_interface.header import FUNCTIONS, header_text, types_text
from stitch.c_interface.table import HANDLE_TYPES, CFunction
from stitch.graph import from_json

HEADER = Path(__file__).parents[2] / "include" / "stitch.h"
PARAMETERS = {function.name: function.parameters for function in FUNCTIONS}
USAGE, FORMAT, FAILURE, HANDLE = 2, 3, 6, 7


class FakeFFI:
    """cffi without a compiled library: keeps the functions instead of giving them to C."""

    def __init__(self) -> None:
        self.ffi = FFI()
        self.ffi.cdef(types_text())
        self.functions: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ffi, name)

    def def_extern(self, name: str, error: Any = None) -> Callable[..., Any]:
        return lambda function: self.functions.setdefault(name.removeprefix("py_"), function)


class C:
    """Calls functions as C does."""

    def __init__(self) -> None:
        fake = FakeFFI()
        self.ffi, self.library = fake.ffi, Library(fake)
        self.library.define_errors()
        for function in FUNCTIONS:
            run = self.library.define_run
            (run if function.name == "stitch_run" else self.library.define)(function)
        self.functions = fake.functions

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function; return the code of its error."""
        return self.error(name, *arguments)[0]

    def error(self, name: str, *arguments: Any) -> tuple[int, str, str]:
        """Call a function; return code, message and remedy of its error, and destroy it."""
        ffi, types = self.ffi, [p.type for p in PARAMETERS[name]]
        alive = [ffi.new("char[]", a.encode()) if isinstance(a, str) else a for a in arguments]
        error = self.functions[name](*[
            ffi.cast(kind, one) if kind.endswith("*") else one.id if kind in HANDLE_TYPES else one
            for kind, one in zip(types, alive, strict=True)
        ])  # fmt: skip
        if error == ffi.NULL:
            return 0, "", ""
        message, remedy = (
            ffi.string(self.functions[f"stitch_error_{part}"](error)).decode()
            for part in ("message", "remedy")
        )
        code: int = self.functions["stitch_error_code"](error)
        self.functions["stitch_error_destroy"](error)
        return code, message, remedy

    def ok(self, name: str, *arguments: Any) -> None:
        assert self.error(name, *arguments) == (0, "", "")

    def make(self, kind: str, name: str, *arguments: Any) -> Any:
        """Call a function whose last argument is an output; return it."""
        out = self.ffi.new(f"stitch_{kind}_t *")
        self.ok(name, *arguments, out)
        return out[0]

    def text(self, name: str, *arguments: Any) -> str:
        """Call a function that returns a text, with exactly the capacity that it needs."""
        ffi = self.ffi
        needed = ffi.new("size_t *")
        self.ok(name, *arguments, ffi.NULL, 0, needed)
        text = ffi.new("char[]", needed[0])
        self.ok(name, *arguments, text, needed[0], ffi.NULL)
        return bytes(ffi.string(text)).decode()

    def array(self, array: np.ndarray, code: int = 1) -> tuple[Any, Any]:
        """Return a `stitch_array_t *` over an array, and what keeps it alive."""
        shape = self.ffi.new("int64_t[]", [*array.shape, 0])
        data = self.ffi.from_buffer(array)
        value = [self.ffi.cast("void *", data), code, array.ndim, shape]
        return self.ffi.new("stitch_array_t *", value), (shape, data, array)

    def zero(self, function: CFunction) -> list[Any]:
        """Return NULL, 0 and zero handles for all arguments of a function."""
        ffi = self.ffi
        return [
            ffi.NULL if p.type.endswith(("*", "callback_t"))
            else ffi.new(f"{p.type} *")[0]
            for p in function.parameters
        ]  # fmt: skip


@pytest.fixture(scope="module")
def c() -> C:
    return C()


@pytest.fixture
def device(c: C) -> Iterator[Any]:
    opened = c.make("device", "stitch_open_device", "host", c.ffi.NULL)
    yield opened
    c.code("stitch_close_device", opened)


@pytest.fixture(scope="module")
def doubling(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A `.ttb` file of a program with one float32 input and output, 2x3."""
    path = tmp_path_factory.mktemp("c") / "doubling.ttb"
    stitch.compile(lambda x: x * 2, [np.zeros((2, 3), np.float32)], target="host").save(path)
    return str(path)


def floats(c: C, *arrays: np.ndarray) -> Any:
    return c.ffi.new("float *[]", [c.ffi.from_buffer("float[]", one) for one in arrays])


def test_the_header_of_the_repository_is_the_one_that_is_generated() -> None:
    assert HEADER.read_text(encoding="utf-8") == header_text(), (
        "python -m stitch.c_interface header > include/stitch.h"
    )


def test_the_fixed_prototypes_are_in_the_header() -> None:
    text = " ".join(header_text().split())
    for prototype in (
        "stitch_error_t stitch_open_device(const char *name, const char *executor, "
        "stitch_device_t *out);",
        "stitch_error_t stitch_load(stitch_device_t device, const char *path, "
        "stitch_program_t *out);",
        "stitch_error_t stitch_run(stitch_program_t program, const float *const *inputs, "
        "size_t n_inputs, float *const *outputs, size_t n_outputs);",
        "stitch_error_t stitch_close_device(stitch_device_t device);",
        "int stitch_error_code(stitch_error_t error);",
        "const char *stitch_error_message(stitch_error_t error);",
        "const char *stitch_error_remedy(stitch_error_t error);",
        "void stitch_error_destroy(stitch_error_t error);",
        "typedef struct { void *data; int type; int rank; const int64_t *shape; } stitch_array_t;",
    ):
        assert prototype in text


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: str(f.name))
def test_nothing_but_null_and_zero_is_an_error_of_each_function(c: C, function: CFunction) -> None:
    before = len(c.library.handles)
    code, message, _ = c.error(function.name, *c.zero(function))
    assert code in (USAGE, HANDLE), message
    assert "NULL" in message or "zero" in message
    assert len(c.library.handles) == before


@pytest.mark.parametrize(
    "function", [f for f in FUNCTIONS if f.parameters[0].type.startswith("stitch_")],
    ids=lambda f: str(f.name),
)  # fmt: skip
def test_a_freed_or_foreign_handle_is_an_error_of_each_function(
    c: C, device: Any, function: CFunction
) -> None:
    own = function.parameters[0].type
    freed = c.make("optimizer", "stitch_optimizer_create", "sgd")
    c.ok("stitch_optimizer_destroy", freed)
    other, foreign = "device", device.id
    if own == "stitch_device_t":
        other, foreign = "optimizer", c.make("optimizer", "stitch_optimizer_create", "sgd").id
    arguments = c.zero(function)
    for at, parameter in enumerate(function.parameters):
        if parameter.name in ("out", "outputs", "description", "text"):
            arguments[at] = c.ffi.cast("void *", c.ffi.new("char[]", 64))
            if parameter.name == "out":
                arguments[at] = c.ffi.new(parameter.type)
    for handle, said in ((freed.id, "destroyed before"), (foreign, f"got: {other}"),
                         (2**64 - 1, "is no "), (5, "is no ")):  # fmt: skip
        arguments[0] = c.ffi.new(f"{own} *", [handle])[0]
        code, message, _ = c.error(function.name, *arguments)
        assert (code, said in message) == (HANDLE, True), message


def test_errors_are_objects_that_may_be_destroyed_twice(c: C) -> None:
    error = c.functions["stitch_open_device"](c.ffi.new("char[]", b"nowhere"), c.ffi.NULL,
                                              c.ffi.new("stitch_device_t *"))  # fmt: skip
    assert c.functions["stitch_error_code"](error) == USAGE
    for _ in range(2):
        c.functions["stitch_error_destroy"](error)
    assert c.functions["stitch_error_code"](error) == HANDLE
    for part, said in (("message", b"was destroyed"), ("remedy", b"")):
        assert said in c.ffi.string(c.functions[f"stitch_error_{part}"](error))


def test_a_program_runs_on_floats_and_on_arrays(c: C, device: Any, doubling: str) -> None:
    program = c.make("program", "stitch_load", device, doubling)
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((2, 3), np.float32)
    c.ok("stitch_run", program, floats(c, x), 1, floats(c, y), 1)
    np.testing.assert_array_equal(y, 2 * x)
    (source, keep), (target, kept) = c.array(x + 1), c.array(y)
    c.ok("stitch_run_arrays", program, source, 1, target, 1)
    np.testing.assert_array_equal(y, 2 * x + 2)
    x[:], y[:] = 5, 0  # The memory of the first call, with other elements.
    c.ok("stitch_run", program, floats(c, x), 1, floats(c, y), 1)
    assert (y == 10).all() and keep and kept
    c.ok("stitch_program_destroy", program)
    assert c.code("stitch_run", program, floats(c, x), 1, floats(c, y), 1) == HANDLE
    assert c.code("stitch_program_destroy", program) == HANDLE


def test_wrong_arrays_of_a_program(c: C, device: Any, doubling: str) -> None:
    program, ffi = c.make("program", "stitch_load", device, doubling), c.ffi
    x, y = np.zeros((2, 3), np.float32), np.full((2, 3), 7, np.float32)
    ins, outs = floats(c, x), floats(c, y)
    for arguments, said in (
        ((ins, 2, outs, 1), "expected: 1\n  got: 2"), ((ins, 1, outs, 0), "expected: 1\n  got: 0"),
        ((ffi.NULL, 1, outs, 1), "inputs is NULL"), ((ins, 1, ffi.NULL, 1), "outputs is NULL"),
        ((ffi.new("float *[1]"), 1, outs, 1), "inputs[0] is NULL"),
        ((ins, 2**63, outs, 1), "wrong number of inputs"),
    ):  # fmt: skip
        code, message, _ = c.error("stitch_run", program, *arguments)
        assert code == USAGE and said in message
    assert (y == 7).all()
    good, keep = c.array(x)
    for change, said in (
        ({"type": 99}, "no stitch_data_type_t"), ({"rank": -1}, "-1 axes"),
        ({"rank": 65}, "65 axes"), ({"shape": ffi.NULL}, "NULL shape"),
        ({"data": ffi.NULL}, "has no data"), ({"shape": ffi.new("int64_t[]", [2, -3])}, "negative"),
        ({"shape": ffi.new("int64_t[]", [3, 2])}, "another shape"),
        ({"shape": ffi.new("int64_t[]", [2**40, 2**40])}, ""),
    ):  # fmt: skip
        wrong = ffi.new("stitch_array_t *", good[0])
        for field, value in change.items():
            setattr(wrong, field, value)
        code, message, _ = c.error("stitch_run_arrays", program, good, 1, wrong, 1)
        assert code in (USAGE, FAILURE) and said in message
        code, message, _ = c.error("stitch_run_arrays", program, wrong, 1, good, 1)
        assert code in (USAGE, FAILURE)
    assert keep
    float64, also = c.array(np.zeros((2, 3)), 11)
    code, message, _ = c.error("stitch_run_arrays", program, good, 1, float64, 1)
    assert code == USAGE and "float64[2, 3]" in message and also


def test_slots_are_described(c: C, device: Any, doubling: str) -> None:
    program, ffi = c.make("program", "stitch_load_program", device, doubling, "traced"), c.ffi
    counts = ffi.new("size_t[2]")
    c.ok("stitch_count_slots", program, counts, counts + 1)
    assert list(counts) == [1, 1]
    name, described = ffi.new("char **"), ffi.new("stitch_array_t *")
    c.ok("stitch_describe_input", program, 0, name, described)
    assert ffi.string(name[0]) == b"x"
    assert (described.type, ffi.unpack(described.shape, described.rank)) == (1, [2, 3])
    c.ok("stitch_describe_output", program, 0, ffi.NULL, described)
    assert c.error("stitch_describe_output", program, 1, ffi.NULL, described)[0] == USAGE
    assert c.error("stitch_load_program", device, doubling, "other",
                   ffi.new("stitch_program_t *"))[0] != 0  # fmt: skip


def test_files_that_are_none(c: C, device: Any, tmp_path: Path) -> None:
    out = c.ffi.new("stitch_program_t *", [77])
    (tmp_path / "bad.ttb").write_bytes(b"no flatbuffer at all")
    code, message, _ = c.error("stitch_load", device, str(tmp_path / "bad.ttb"), out)
    assert code == FORMAT and message and out.id == 0
    assert c.code("stitch_load", device, str(tmp_path / "none.ttb"), out) == FORMAT
    text = c.ffi.new("char[]", b"\xff\xfe")
    assert "not UTF-8" in c.error("stitch_load", device, text, out)[1]


def test_texts_and_their_capacity(c: C, device: Any) -> None:
    ffi, needed = c.ffi, c.ffi.new("size_t *")
    text = c.text("stitch_explain", device)
    assert text.startswith("host: ")
    short = ffi.new("char[]", b"abc")
    code, message, _ = c.error("stitch_explain", device, short, 3, needed)
    assert code == USAGE and f"{len(text) + 1} bytes" in message
    assert needed[0] == len(text) + 1 and ffi.string(short) == b"abc"
    assert c.code("stitch_explain", device, ffi.NULL, 1000, ffi.NULL) == USAGE
    assert c.code("stitch_explain", device, ffi.NULL, 0, ffi.NULL) == USAGE


def small_graph(c: C) -> Any:
    """A graph of one dense layer, 4x3 to 4x2."""
    graph = c.make("computation_graph", "stitch_computation_graph_create", c.ffi.NULL)
    shape = c.ffi.new("int64_t[]", [4, 3])
    x = c.make("tensor", "stitch_computation_graph_add_input", graph, "x", 1, shape, 2)
    y = c.make("tensor", "stitch_computation_graph_add_op_dense", graph, x, 2, c.ffi.NULL)
    assert c.text("stitch_tensor_name", graph, x) == "x"
    c.ok("stitch_computation_graph_add_output", graph, "y", y)
    return graph


def test_a_training_in_c_has_the_bits_of_python(c: C, tmp_path: Path) -> None:
    ffi, rng = c.ffi, np.random.default_rng(0)
    x, label = rng.normal(size=(4, 3)).astype(np.float32), np.array([0, 1, 1, 0])
    b = stitch.ComputationGraphBuilder("graph")
    b.output("y", b.dense(b.input("x", (4, 3), "float32"), 2))
    loss_fn = stitch.losses.CrossEntropyLoss()
    model = stitch.compile(b.build(), optimizer=stitch.SGD(lr=0.1), loss=loss_fn, target="host")
    graph = small_graph(c)
    optimizer = c.make("optimizer", "stitch_optimizer_create", '{"optimizer": "sgd", "lr": 0.1}')
    out = ffi.new("stitch_model_compilation_result_t *")
    arguments = (graph, optimizer, ffi.NULL, "host", out)
    assert "no loss" in c.error("stitch_computation_graph_compile", *arguments)[1]
    c.ok("stitch_computation_graph_set_loss", graph, "sparse_categorical_crossentropy")
    c.ok("stitch_computation_graph_compile", *arguments)
    result = out[0]
    training = c.make("model_training_instance", "stitch_start_training", result)
    code, message, _ = c.error("stitch_model_training_instance_forward", training)
    assert code == USAGE and "no x" in message
    labels = ffi.from_buffer("int64_t[]", label)
    loss, number = ffi.new("float *"), 0.0
    with model.start():
        for _ in range(3):
            c.ok("stitch_set_tensor_float", training, "x", ffi.from_buffer("float[]", x), 12)
            c.ok("stitch_set_tensor_int64", training, "label", labels, 4)
            c.ok("stitch_model_training_instance_forward", training)
            c.ok("stitch_get_tensor_float", training, "loss", loss, 1)
            c.ok("stitch_model_training_instance_backward", training)
            c.ok("stitch_model_training_instance_update", training)
            python = loss_fn(model(x), label)
            python.backward()
            model.instance.update()
            model.instance.zero_grad()
            number = python.item()
        text = c.text("stitch_model_compilation_result_as_json", result)
        (tmp_path / "c.json").write_text(text, encoding="utf-8")
        read = stitch.CompiledModel.load(tmp_path / "c.json")
        for name in ("dense.weight", "dense.bias"):
            assert read.get_tensor(name).tobytes() == model.get_tensor(name).tobytes()
    assert loss[0] == np.float32(number)
    check_tensors(c, training)
    c.ok("stitch_stop_training", training)
    assert c.code("stitch_model_training_instance_forward", training) == HANDLE
    again = c.make("model_compilation_result", "stitch_model_compilation_result_from_json", text)
    for handle in (result, again):
        c.ok("stitch_model_compilation_result_destroy", handle)


def check_tensors(c: C, training: Any) -> None:
    """Elements of other types, counts and names; a description."""
    ffi, bias = c.ffi, c.ffi.new("float[2]", [3, 4])
    c.ok("stitch_set_tensor_float", training, "dense.bias", bias, 2)
    value, keep = c.array(np.zeros(2, np.float32))
    c.ok("stitch_get_tensor_array", training, "dense.bias", value)
    assert keep[2].tolist() == [3, 4]
    described = ffi.new("stitch_array_t *")
    c.ok("stitch_describe_tensor", training, "label", described)
    assert (described.type, ffi.unpack(described.shape, described.rank)) == (7, [4])
    for name, *arguments in (
        ("stitch_get_tensor_float", "dense.bias", bias, 3),
        ("stitch_get_tensor_float", "b", bias, 2),
        ("stitch_get_tensor_int32", "dense.bias", ffi.new("int32_t[2]"), 2),
        ("stitch_set_tensor_float", "dense.bias", bias, 1),
        ("stitch_set_tensor_float", "dense.bias", ffi.NULL, 2),
        ("stitch_set_tensor_double", "label", ffi.new("double[1]"), 1),
    ):  # fmt: skip
        assert c.code(name, training, *arguments) == USAGE


#: By operator: arguments after the graph, where names are tensors, and the same in Python.
OPERATORS: dict[str, tuple[Sequence[Any], Callable[..., Any]]] = {
    **{name: (["x"], lambda b, t, n=name: getattr(b, n)(t["x"]))
       for name in ("relu", "sigmoid", "tanh", "gelu", "elu", "identity", "exp", "sin", "cos",
                    "rsqrt", "flat")},
    **{name: (["x", "x2"], lambda b, t, n=python: getattr(b, n)(t["x"], t["x2"]))
       for name, python in (("add", "add"), ("subtract", "sub"), ("multiply", "mul"),
                            ("divide", "div"), ("max", "maximum"), ("min", "minimum"),
                            ("batch_matmul", "matmul"))},
    **{name: (["x", 2.5], lambda b, t, n=python: getattr(b, n)(t["x"], 2.5))
       for name, python in (("pow", "pow"), ("scalar_add", "add"), ("scalar_sub", "sub"),
                            ("scalar_multiply", "mul"), ("scalar_truediv", "div"))},
    "mean": (["x", [1], 1, 1], lambda b, t: b.reduce_mean(t["x"], [1], True)),
    "reduce_sum": (["x", [0, 1], 2, 0], lambda b, t: b.reduce_sum(t["x"], [0, 1], False)),
    "dense": (["x", 5, "relu"], lambda b, t: b.dense(t["x"], 5, activation="relu")),
    "linear": (["x", "w", None, "tanh"],
               lambda b, t: b.linear(t["x"], t["w"], None, "tanh")),
    "conv2d": (["image", "kernel", "bias", 2, 1, 0, 1, 1, None],
               lambda b, t: b.conv2d(t["image"], t["kernel"], t["bias"], stride=(2, 1),
                                     padding=(0, 1))),
    "pool2d": (["image", 2, 3, 1, 2, 1, 0, "average"],
               lambda b, t: b.pool2d(t["image"], (2, 3), stride=(1, 2), padding=(1, 0),
                                     kind="average")),
    "batch_norm": (
        ["image", *["three"] * 4, 0.5, 1],
        lambda b, t: b.batch_norm(t["image"], *[t["three"]] * 4, epsilon=0.5, relu=True)),
    "layer_norm": (["x", None, "bias4", -1, 0.25],
                   lambda b, t: b.layer_norm(t["x"], None, t["bias4"], axis=-1, epsilon=0.25)),
    "embedding": (["indices", "w", "mean"],
                  lambda b, t: b.embedding(t["indices"], t["w"], "mean")),
    "multihead_attention": (
        ["seq", "seq", "seq", ["w"] * 4, 4, None, 0, 2, 1],
        lambda b, t: b.multi_head_attention(*[t["seq"]] * 3, [t["w"]] * 4, heads=2, causal=True)),
    "softmax": (["x", 0], lambda b, t: b.softmax(t["x"], 0)),
    "dropout": (["x", 0.25], lambda b, t: b.dropout(t["x"], 0.25)),
    "cast": (["x", 7], lambda b, t: b.cast(t["x"], "int64")),
    "gather": (["x", "indices", 1], lambda b, t: b.gather_elements(t["x"], t["indices"], 1)),
    "concat": ([["x", "x2", "x"], 3, 1], lambda b, t: b.concat([t["x"], t["x2"], t["x"]], 1)),
    "reshape": (["x", [2, -1], 2], lambda b, t: b.reshape(t["x"], [2, -1])),
    "transpose": (["image", [0, 3, 1, 2], 4], lambda b, t: b.transpose(t["image"], [0, 3, 1, 2])),
    "reverse": (["x", 1], lambda b, t: b.reverse(t["x"], 1)),
    "split": (["x", [1, 3], 2, 1, 2], lambda b, t: b.split(t["x"], [1, 3], 1)),
    "topk": (["x", 2, 1, 2], lambda b, t: b.topk(t["x"], 2, sorted=True)),
}  # fmt: skip
INPUTS = {"x": (4, 4), "x2": (4, 4), "image": (1, 3, 6, 6), "seq": (1, 3, 4)}
PARAMETERS_OF = {"w": (4, 4), "kernel": (2, 3, 2, 2), "bias": (2,), "three": (3,), "bias4": (4,)}


def test_every_operator_is_tried() -> None:
    prefix = "stitch_computation_graph_add_op_"
    assert {prefix + name for name in OPERATORS} == {
        f.name for f in FUNCTIONS if f.name.startswith(prefix)
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_adds_what_the_builder_adds(c: C, name: str) -> None:
    ffi, (given, python) = c.ffi, OPERATORS[name]
    b = stitch.ComputationGraphBuilder("graph")
    graph = c.make("computation_graph", "stitch_computation_graph_create", "graph")
    mine, theirs = dict[str, Any](), dict[str, Any]()
    add = "stitch_computation_graph_add_"
    for key, shape, code in (*((k, s, 1) for k, s in INPUTS.items()), ("indices", (4, 4), 7)):
        lengths = ffi.new("int64_t[]", shape)
        mine[key] = c.make("tensor", f"{add}input", graph, key, code, lengths, len(shape))
        theirs[key] = b.input(key, shape, "float32" if code == 1 else "int64")
    for key, shape in PARAMETERS_OF.items():
        value, keep = c.array(np.full(shape, 0.5, np.float32))
        mine[key] = c.make("tensor", f"{add}parameter", graph, key, value)
        theirs[key] = b.parameter(key, keep[2])
    arguments: list[Any] = []
    for one, parameter in zip(given, PARAMETERS[f"{add}op_{name}"][1:], strict=False):
        if isinstance(one, list) and isinstance(one[0], str):
            one = ffi.new("stitch_tensor_t[]", [mine[key] for key in one])
        elif isinstance(one, list):
            one = ffi.new("int64_t[]", one)
        elif one is None:
            zero = parameter.type == "stitch_tensor_t"
            one = ffi.new("stitch_tensor_t *")[0] if zero else ffi.NULL
        elif parameter.type == "stitch_tensor_t":
            one = mine[one]
        arguments.append(one)
    several = name in ("split", "topk")
    out = ffi.new("stitch_tensor_t[]", 2)
    if several:
        arguments.insert(-1, out)
    c.ok(f"{add}op_{name}", graph, *arguments, *(() if several else (out,)))
    found = python(b, theirs)
    for i, tensor in enumerate(found if several else (found,)):
        b.output(f"y{i}", tensor)
        c.ok(f"{add}output", graph, f"y{i}", out[i])
    read = from_json(c.text("stitch_computation_graph_as_json", graph))
    assert read.text() == b.build().text()


def test_tensors_belong_to_their_graph(c: C) -> None:
    graph, other, ffi = small_graph(c), small_graph(c), c.ffi
    out = ffi.new("stitch_tensor_t *", [9, 9])
    mine = ffi.new("stitch_tensor_t *", [graph.id, 0])[0]
    c.ok("stitch_computation_graph_add_op_relu", graph, mine, out)
    assert out.graph == graph.id
    for wrong in ([other.id, 0], [graph.id, 99], [0, 0]):
        tensor = ffi.new("stitch_tensor_t *", wrong)[0]
        assert c.code("stitch_computation_graph_add_op_relu", graph, tensor, out) == HANDLE
        assert (out.graph, out.index) == (0, 0)
    many = ffi.new("stitch_tensor_t[2]", [[graph.id, 0], [graph.id, 0]])
    parts = ffi.new("stitch_tensor_t[2]")
    attributes = json.dumps({"axis": 0})
    c.ok("stitch_computation_graph_add_op", graph, "Concat", ffi.NULL, many, 2, attributes, out, 1)
    sizes = ffi.new("int64_t[]", [1, 7])
    c.ok("stitch_computation_graph_add_op_split", graph, out[0], sizes, 2, 0, parts, 2)
    for text, said in (("{", "no JSON"), ("[1]", "are an object"), ('{"axes": 3}', "axes")):
        code, message, _ = c.error("stitch_computation_graph_add_op", graph, "Concat", ffi.NULL,
                                   many, 2, text, out, 1)  # fmt: skip
        assert code in (USAGE, FORMAT) and said in message
    text = c.text("stitch_computation_graph_as_json", graph)
    read = c.make("computation_graph", "stitch_computation_graph_from_json", text)
    assert c.text("stitch_computation_graph_as_json", read) == text
    shape = ffi.new("int64_t[1]", [2])
    code, message, _ = c.error("stitch_computation_graph_add_input", read, "z", 1, shape, 1, out)
    assert code == USAGE and "complete" in message
    c.ok("stitch_computation_graph_destroy", graph)
    assert c.code("stitch_computation_graph_add_op_relu", graph, mine, out) == HANDLE


def test_outputs_may_lie_where_inputs_do(c: C) -> None:
    graph, ffi = small_graph(c), c.ffi
    x = ffi.new("stitch_tensor_t *", [graph.id, 0])
    add = ("stitch_computation_graph_add_op", graph)
    c.ok(*add, "Relu", ffi.NULL, x, 1, ffi.NULL, x, 1)
    c.ok(*add, "Tanh", "", x, 1, ffi.NULL, x, 1)
    assert c.text("stitch_tensor_name", graph, x[0]) == "tanh"
    assert c.code(*add, "NoSuchOperator", ffi.NULL, x, 1, ffi.NULL, x, 1) == FORMAT
    assert c.code(*add, "Relu", ffi.NULL, x, 1, ffi.NULL, x, 2**60) != 0
    x[0] = ffi.new("stitch_tensor_t *", [0, 0])[0]
    assert c.code("stitch_computation_graph_add_op_concat", graph, x, 1, 0, x) != 0
    shape = ffi.new("int64_t[1]")
    name = "stitch_computation_graph_add_input"
    assert c.error(name, graph, "z", 1, shape, 2**40, x)[1].startswith("shape has too many axes")


def test_remedies_name_functions_of_c(c: C) -> None:
    graph, ffi = small_graph(c), c.ffi
    code, message, remedy = c.error("stitch_computation_graph_set_loss", graph, "mze")
    assert code == USAGE and "unknown loss" in message and "'mse'" in remedy
    for wrong in ('{"loss": "mse", "reductoin": "sum"}', '{"loss": "mse", "label_smoothing": 1}'):
        code, message, _ = c.error("stitch_computation_graph_set_loss", graph, wrong)
        assert code == USAGE and "loss 'mse' takes no " in message
    c.ok("stitch_computation_graph_set_loss", graph, "mse")
    optimizer = c.make("optimizer", "stitch_optimizer_create", "sgd")
    kind, target = "model_compilation_result", "tiny"
    result = c.make(kind, "stitch_computation_graph_compile", graph, optimizer, "none", target)
    training = c.make("model_training_instance", "stitch_start_training", result)
    prefix = "stitch_model_training_instance_"
    assert f"{prefix}forward" in c.error(f"{prefix}backward", training)[2]
    assert c.error(f"{prefix}update", training)[2] == f"call {prefix}backward first"
    c.ok("stitch_stop_training", training)
    out = ffi.new("stitch_device_t *")
    assert "pass NULL, or" in c.error("stitch_open_device", "torch:cpu", "numpy", out)[2]
    remedy = c.error("stitch_open_device", "tiny", "cuda-inductor", out)[2]
    assert 'stitch_open_device("cuda:0", "cuda-inductor", &device) or' in remedy
    host = c.make("device", "stitch_open_device", "host", ffi.NULL)
    started = ffi.new("stitch_model_training_instance_t *")
    remedy = c.error("stitch_start_training_on", result, host, 0, started)[2]
    assert remedy == "compile it with target 'host'"
    c.ok("stitch_close_device", host)


def test_an_error_that_is_raised_again_keeps_its_remedy(c: C) -> None:
    error = stitch.errors.UsageError("wrong", remedy="do this")
    for _ in range(2):
        found = c.library.error(error)
        assert c.ffi.string(c.functions["stitch_error_message"](found)) == b"wrong"
        assert c.ffi.string(c.functions["stitch_error_remedy"](found)) == b"do this"
        c.functions["stitch_error_destroy"](found)


def test_a_callback_may_call_stitch(c: C, device: Any, doubling: str) -> None:
    program, seen = c.make("program", "stitch_load", device, doubling), list[int]()

    def listen(context: Any, steps: int, copies: int) -> None:
        array = np.zeros((2, 3), np.float32)
        seen.append(c.code("stitch_run", program, floats(c, array), 1, floats(c, array), 1))
        seen.append(c.code("stitch_close_device", device))

    callback = c.ffi.callback("stitch_plan_callback_t", listen)
    c.ok("stitch_on_plan", device, callback, c.ffi.NULL)
    x = np.ones((2, 3), np.float32)
    c.ok("stitch_run", program, floats(c, x), 1, floats(c, x), 1)
    assert seen and 0 not in seen and (x == 2).all()


def test_the_rest_of_a_training(c: C, device: Any, tmp_path: Path) -> None:
    """A seed, a learning rate, files, a loss that is NaN; a program for inference; a pipeline."""
    ffi, graph = c.ffi, small_graph(c)
    optimizer = c.make("optimizer", "stitch_optimizer_create", "sgd")
    c.ok("stitch_computation_graph_set_loss", graph, '{"loss": "mse", "reduction": "sum"}')
    kind, folder = "model_compilation_result", str(tmp_path)
    result = c.make(kind, "stitch_computation_graph_compile", graph, optimizer, "none", "host")
    training = c.make("model_training_instance", "stitch_start_training_on", result, device, 3)
    weight, before = ffi.new("float[6]"), ffi.new("float[6]")
    c.ok("stitch_get_tensor_float", training, "dense.weight", before, 6)
    x = ffi.new("float[12]", [1.0] * 12)
    for name, values, count in (("x", x, 12), ("label", ffi.new("float[8]", [1.0] * 8), 8)):
        c.ok("stitch_set_tensor_float", training, name, values, count)
    for lr in (0.0, 0.5):
        c.ok("stitch_optimizer_set_lr", optimizer, lr)
        for step in ("forward", "backward", "update"):
            c.ok(f"stitch_model_training_instance_{step}", training)
        c.ok("stitch_get_tensor_float", training, "dense.weight", weight, 6)
        assert (list(weight) == list(before)) == (lr == 0.0)
    x[0] = math.nan
    c.ok("stitch_set_tensor_float", training, "x", x, 12)
    for step in ("forward", "backward"):
        c.ok(f"stitch_model_training_instance_{step}", training)
    code, message, remedy = c.error("stitch_model_training_instance_update", training)
    assert code == FAILURE and "is nan" in message and "learning rate" in remedy
    c.ok("stitch_get_tensor_float", training, "dense.weight", before, 6)
    assert list(weight) == list(before)
    c.ok("stitch_model_compilation_result_dump", result, f"{folder}/model.json")
    again = c.make(kind, "stitch_model_compilation_result_load", f"{folder}/model.json")
    text = c.text("stitch_model_compilation_result_as_json", again)
    assert text == (tmp_path / "model.json").read_text(encoding="utf-8")
    c.ok("stitch_stop_training", training)
    c.ok("stitch_computation_graph_save", graph, "host", f"{folder}/dense.ttb")
    (tmp_path / "two.yaml").write_text(
        "modules: {a: dense.ttb}\ninputs: {x: {shape: [4, 3], type: float32}}\n"
        "steps:\n  - {run: a, inputs: {x: x}, outputs: {y: y}}\noutputs: {y: y}\n"
    )
    pipeline = c.make("pipeline", "stitch_pipeline_from_yaml", device, f"{folder}/two.yaml")
    source, keep = c.array(np.ones((4, 3), np.float32))
    target, kept = c.array(np.zeros((4, 2), np.float32))
    c.ok("stitch_run_pipeline", pipeline, source, 1, target, 1)
    program = c.make("program", "stitch_load", device, f"{folder}/dense.ttb")
    other = np.zeros((4, 2), np.float32)
    c.ok("stitch_run", program, floats(c, keep[2]), 1, floats(c, other), 1)
    np.testing.assert_array_equal(kept[2], other)
    assert other.any()
    c.ok("stitch_pipeline_destroy", pipeline)
    assert c.code("stitch_run_pipeline", pipeline, source, 1, target, 1) == HANDLE
