"""What the torch front end refuses, in words that help, and what it carries over."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stitch
from stitch.cli import compile_main as main
from stitch.errors import CompileError, LayoutError, UsageError
from tests.support.torch.agreement import Applied, run_graph

X = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0], [0.5, 0.0, -0.5]])


class Branching(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Decides on what its input holds."""

    def forward(self, x: Any) -> Any:
        if x.sum() > 0:
            return x
        return -x


class Unsupported(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Three operators that Stitch lacks, on three lines."""

    def forward(self, x: Any) -> Any:
        inverse = torch.linalg.inv(x)
        noise = torch.rand(3)
        return inverse + noise + torch.nonzero(x).sum()


def line_of(module: type[Any], text: str) -> str:
    """`file:line` of a line of a class in this file."""
    lines, start = inspect.getsourcelines(module)
    return f"{Path(__file__).name}:{start + next(i for i, row in enumerate(lines) if text in row)}"


def test_control_flow_on_data_names_its_line_and_torch_compile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(CompileError) as caught:
        stitch.compile(Branching(), (X,))
    assert line_of(Branching, "if x.sum()") in str(caught.value)
    assert "torch.compile" in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_examples_that_torch_refuses_too_name_the_layer_and_what_it_got() -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    wrong: list[tuple[nn.Module, Any, str, str]] = [
        (net, (np.zeros((3, 5), np.float32),), "float32[3, 5]", "pass shapes"),
        (net, (np.zeros((3, 4)),), "float64[3, 4]", "array.astype('float32')"),
        (nn.Bilinear(3, 3, 1), (X[:2], X), "float32[2, 3], input2: float32[3, 3]", "same batch"),
    ]  # fmt: skip
    for module, examples, got, remedy in wrong:
        with pytest.raises(CompileError, match="refuses these examples, in torch") as caught:
            stitch.compile(module, examples)
        assert got in str(caught.value.got)
        assert remedy in str(caught.value.remedy)
        assert "torch.compile" not in str(caught.value)
        assert "with parameters float32[" in str(caught.value.expected)
    model = stitch.compile(net, (np.zeros((3, 4), np.float32),))
    with pytest.raises(stitch.LinkError, match="one batch size: pass 3 rows at a time"):
        model(np.zeros((5, 4), np.float32))


def test_unsupported_operators_are_reported_at_once_each_with_its_line() -> None:
    with pytest.raises(CompileError) as caught:
        stitch.compile(Unsupported(), (X,))
    text = str(caught.value)
    assert f"linalg_inv_ex.default is not supported: {line_of(Unsupported, 'inv(x)')}" in text
    assert line_of(Unsupported, "torch.rand(3)") in text and "random" in text
    assert line_of(Unsupported, "torch.nonzero(x)") in text and "depends on data" in text


def test_a_mask_as_index_is_refused_as_its_result_depends_on_data() -> None:
    with pytest.raises(CompileError, match="depends on data"):
        stitch.compile(Applied(lambda x: x[x > 0]), (X,))


def test_dropout_in_training_mode_asks_for_eval() -> None:
    with pytest.raises(CompileError) as caught:
        stitch.compile(nn.Sequential(nn.Dropout(0.5)), (X,))
    assert ".eval()" in str(caught.value)


def test_a_module_that_writes_to_its_inputs_is_refused_by_their_names() -> None:
    class Adds(nn.Module):  # type: ignore[misc]  # torch has no types here
        def forward(self, first: Any, second: Any) -> Any:
            first += 1
            second.zero_()
            return first + second

    with pytest.raises(
        CompileError, match=r"writes to its inputs: first, second(.|\n)*register_buffer"
    ):
        stitch.compile(Adds(), (X, X.clone()))


def test_a_module_that_raises_names_the_line() -> None:
    def faulty(x: Any) -> Any:
        raise ValueError("three is too many")

    with pytest.raises(CompileError) as caught:
        stitch.compile(Applied(faulty), (X,))
    assert "three is too many" in str(caught.value)
    assert f"{Path(__file__).name}:" in str(caught.value)


def test_an_error_of_a_module_without_a_message_is_named() -> None:
    def faulty(x: Any) -> Any:
        raise AssertionError

    with pytest.raises(CompileError, match="cannot capture the module: AssertionError"):
        stitch.compile(Applied(faulty), (X,))


def test_examples_that_the_module_does_not_take_are_a_misuse() -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        stitch.compile(nn.Linear(3, 2), {"no_such": X})


def test_weights_without_data_are_refused() -> None:
    class Lazy(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

        def forward(self, x: Any) -> Any:
            return self.weight.to("meta") * 2

    with pytest.raises(CompileError, match="no dense elements"):
        stitch.compile(Lazy(), (X,))


def test_complex_results_are_refused_with_a_remedy() -> None:
    with pytest.raises(CompileError, match="view_as_real"):
        stitch.compile(nn.Identity(), (X.to(torch.complex64),))


def test_without_torch_the_error_names_the_extra() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import stitch\n"
        "Module = type('Module', (), {'__module__': 'torch.nn.modules.module'})\n"
        "try:\n    stitch.compile(Module(), ())\n"
        "except stitch.errors.CompileError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "stitch-runtime[torch]" in done.stdout, done.stderr


# What is carried over ------------------------------------------------------------------------


def test_operations_have_lines_of_the_module_as_location() -> None:
    graph = stitch.compile(_Doubling(), (X,)).graph
    assert [op.location for op in graph.operations] == [line_of(_Doubling, "x + x")]


class _Doubling(nn.Module):  # type: ignore[misc]  # torch has no types here
    def forward(self, x: Any) -> Any:
        return x + x


def test_operations_of_a_traced_graph_have_their_layer_as_location() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    graph = stitch.compile(traced, (X,)).graph
    assert [op.location for op in graph.operations] == ["layer 0", "layer 1"]


def test_constants_are_named_as_in_the_state_dict_and_inputs_as_the_arguments() -> None:
    graph = stitch.compile(nn.Sequential(nn.Linear(3, 2)), (X,)).graph
    names = [graph.values[constant.value].name for constant in graph.constants]
    assert names == ["0.weight", "0.bias"]
    assert [slot.name for slot in graph.inputs] == ["input"]


def test_weights_changed_after_compiling_leave_the_program_as_it_was() -> None:
    layer = nn.Linear(3, 2)
    graph = stitch.compile(layer, (X,)).graph
    before = layer(X).detach().numpy().copy()
    with torch.no_grad():
        layer.weight.zero_()
    np.testing.assert_allclose(run_graph(graph, (X,))[0], before, rtol=1e-5, atol=1e-6)


def test_an_exported_program_needs_no_examples() -> None:
    program = torch.export.export(_Doubling(), (X,))
    graph = stitch.compile(program).graph
    assert [op.op for op in graph.operations] == ["Add"]


def test_an_exported_program_with_symbolic_sizes_takes_those_of_the_examples() -> None:
    dynamic = {"x": {0: torch.export.Dim("rows", min=2, max=9)}}
    program = torch.export.export(_Doubling(), (X,), dynamic_shapes=dynamic)
    graph = stitch.compile(program, (torch.zeros(7, 3),)).graph
    assert graph.input_type(0).shape == (7, 3)


def test_arrays_serve_as_examples() -> None:
    graph = stitch.compile(_Doubling(), (X.numpy(),)).graph
    assert graph.input_type(0).text() == "3x3xf32"


def test_bfloat16_weights_are_carried_over_bit_by_bit() -> None:
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    graph = stitch.compile(layer, (X.to(torch.bfloat16),)).graph
    held = next(c.data for c in graph.constants if graph.values[c.value].name == "weight")
    wanted = layer.weight.detach().view(torch.int16).numpy()
    np.testing.assert_array_equal(held.view(np.int16), wanted)


def test_the_command_compiles_what_a_factory_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_factory_case.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(3, 2), {'input': torch.zeros(4, 3)}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["--entry=torch_factory_case:make", "-o", "m.ttb"]) == 0
    program = stitch.load(tmp_path / "m.ttb").programs[0]
    assert program.input_desc(0).shape == (4, 3)
    assert program.output_desc(0).shape == (4, 2)


class Keeps(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.total = self.total + x.sum()
        self.seen.append(x)
        return x * self.total + sum(self.seen)


def test_what_forward_keeps_in_attributes_is_warned_of_and_the_module_stays_as_it_was() -> None:
    module, x = Keeps(), torch.ones(2, 3)
    with pytest.warns(UserWarning, match=r"(?s)self\.total.*register_buffer"):
        stitch.compile(module, (x,), target="host")
    assert module.seen == [] and module.total == 0
    torch.testing.assert_close(module(x), x * 7)


class Counts(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Counts its calls in a Python number, or in a buffer."""

    seen = 0

    def __init__(self, start: Any) -> None:
        super().__init__()
        self.settings = {"width": 3, "calls": 1}
        if isinstance(start, torch.Tensor):
            self.register_buffer("k", start)
        else:
            self.k = start

    def forward(self, x: Any) -> Any:
        self.k += 1
        if not isinstance(self.k, torch.Tensor):
            self.seen += 1
            self.settings["calls"] *= 2
        return x * self.k


def test_python_numbers_that_forward_changes_are_warned_of_by_name_and_stay() -> None:
    module, x = nn.Sequential(Counts(0)), torch.ones(2)
    with pytest.warns(UserWarning) as caught:
        model = stitch.compile(module, (x,), target="host")
    lines = [str(warning.message) for warning in caught]
    assert [line.split(" of ")[0] for line in lines] == [
        f"attribute self.0.{name}" for name in ("k", "seen", "settings")
    ]
    assert "from 0 to 1" in lines[0] and "register_buffer('k', " in lines[0]
    assert module[0].k == 0 and module[0].settings["calls"] == 1
    # As the captured call, every time; torch.export does the same and says nothing.
    assert [float(model(x).numpy()[0]) for _ in range(2)] == [1.0, 1.0]


def test_the_remedy_for_a_number_that_forward_changes_counts_as_eager_torch() -> None:
    module, x = Counts(torch.tensor(0)), torch.ones(2)
    model = stitch.compile(module, (x,), target="host")
    compiled = [float(model(x).numpy()[0]) for _ in range(3)]
    assert compiled == [float(module(x)[0]) for _ in range(3)] == [1.0, 2.0, 3.0]


class Grows(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Keeps all that it is given, in a buffer that becomes longer."""

    cache: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(0, 3))

    def forward(self, x: Any) -> Any:
        self.cache = torch.cat([self.cache, x])
        return self.cache.sum(0)


def test_a_buffer_whose_shape_changes_is_refused_by_name() -> None:
    with pytest.raises(CompileError) as caught:
        stitch.compile(nn.Sequential(Grows()), (torch.ones(2, 3),))
    text = str(caught.value)
    assert "'0.cache'" in text and "[0, 3]" in text and "[2, 3]" in text and "[:, position]" in text


def test_without_examples_the_remedy_names_the_arguments() -> None:
    class Two(nn.Module):  # type: ignore[misc]  # torch has no types here
        def forward(self, image: Any, mask: Any, scale: float = 2.0) -> Any:
            return image * mask * scale

    with pytest.raises(UsageError, match=r"compile\(module, \(image, mask,\)\)"):
        stitch.compile(Two())


def test_importing_stitch_torch_nn_without_torch_names_what_to_install() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import stitch.torch.nn\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("CompileError"), done.stderr
    assert "pip install 'stitch-runtime[torch]'" in done.stdout


#: What the error says of each example below.
NOT_DENSE = ("to_dense()", "torch.sparse_csr", "on device meta", "dequantize()", "to_padded_tensor")


def without_elements() -> dict[str, Any]:
    return {
        "to_dense()": X.to_sparse(),
        "torch.sparse_csr": X.to_sparse_csr(),
        "on device meta": X.to("meta"),
        "dequantize()": torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),
        "to_padded_tensor": torch.nested.nested_tensor([X[0], X[1, :2]]),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("said", NOT_DENSE)
@pytest.mark.parametrize("options", [{}, {"loss": "MSELoss", "optimizer": "SGD"}])
def test_an_example_without_dense_elements_is_one_clear_error(
    said: str, options: dict[str, Any]
) -> None:
    example = without_elements()[said]
    for examples in ((example,), {"input": example}):
        with pytest.raises(CompileError, match="an example has no dense elements") as caught:
            stitch.compile(nn.Linear(3, 3), examples, **options)
        assert said in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("said", NOT_DENSE[:3])
@pytest.mark.parametrize("options", [{}, {"loss": "MSELoss", "optimizer": "SGD"}])
def test_a_buffer_without_dense_elements_is_named(said: str, options: dict[str, Any]) -> None:
    module = nn.Linear(3, 3)
    module.register_buffer("mask", without_elements()[said])
    module.forward = lambda x: torch.mm(module.mask, x) + module.weight
    with pytest.raises(CompileError, match=r"'mask' of .* has no dense elements") as caught:
        stitch.compile(module, (X,), **options)
    assert said in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("said", NOT_DENSE)
def test_an_argument_without_dense_elements_says_what_makes_one(said: str) -> None:
    model = stitch.compile(nn.ReLU(), (X,))
    remedies = {"torch.sparse_csr": "to_dense()", "on device meta": "on the CPU"}
    with pytest.raises(LayoutError, match="cannot become an array") as caught:
        model(without_elements()[said])
    assert remedies.get(said, said) in (caught.value.remedy or "")


def test_a_random_operator_in_evaluation_mode_has_a_remedy_too() -> None:
    with pytest.raises(CompileError, match=r"result is random(.|\n)*otherwise use torch\.compile"):
        stitch.compile(torch.nn.RReLU().eval(), (torch.zeros(2),))
