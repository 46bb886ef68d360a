"""Objects that hold tensors, in and out of modules that `stitch.compile` takes; and TorchScript."""

from __future__ import annotations

import collections
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from torch import nn
from torch.utils import _pytree as pytree

import stitch
from stitch.errors import CompileError, UsageError
from stitch.frontend.torch.plain_values import flattened
from tests.support.torch.agreement import Applied, assert_close
from tests.support.torch.zoo.shared import IDS, SMALL, WORDS

# transformers warns of what it will rename.
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
X = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])


@dataclass
class Pair:
    """Two tensors, a number, and what is no tensor."""

    first: Any
    second: Any
    count: int = 2
    note: Any = None


class Bag:
    """Tensors in lists and dictionaries of an object, and a word."""

    def __init__(self, held: Any) -> None:
        self.held, self.word = held, "word"


class Tagged(Bag):
    """One that torch's pytree knows, with names for its parts or without."""


class Named(Bag):
    """The same, with a name."""


class Keyed(dict[str, Any]):
    """A dictionary of a class of its own."""


class Shown(dict[str, Any]):
    """One that has its keys as attributes too."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)
        vars(self).update(held)


class Row(list[Any]):
    """A list of a class of its own."""


class Line(collections.deque[Any]):
    """A deque of a class of its own."""


pytree.register_pytree_node(
    Tagged, lambda bag: ([bag.held, bag.word], None),
    lambda parts, _: tagged(Tagged, *parts), serialized_type_name="tests.Tagged",
)  # fmt: skip
pytree.register_pytree_node(
    Named, lambda bag: ([bag.held, bag.word], None), lambda parts, _: tagged(Named, *parts),
    flatten_with_keys_fn=lambda bag: (
        [(pytree.GetAttrKey("held"), bag.held), (pytree.GetAttrKey("word"), bag.word)], None
    ),
    serialized_type_name="tests.Named",
)  # fmt: skip


def tagged(kind: type[Bag], held: Any, word: Any) -> Bag:
    """An object of one of these classes."""
    bag = kind(held)
    bag.word = word
    return bag


Point = collections.namedtuple("Point", "near far")


def outputs_of(model: stitch.CompiledModel) -> list[str]:
    """The names of its outputs."""
    return [slot.name for slot in model.program.outputs]


def inputs_of(model: stitch.CompiledModel) -> list[str]:
    """The names of its inputs."""
    return [slot.name for slot in model.program.inputs]


def run(model: stitch.CompiledModel, *given: Any, **named: Any) -> list[Any]:
    """What a model gives, as arrays."""
    leaves, _ = flattened(model(*given, **named))
    return [leaf.numpy() for leaf in leaves if isinstance(leaf, stitch.Tensor)]


def tensors_of_cache(cache: Any) -> list[Any]:
    """Keys and values, layer by layer."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def llama() -> Any:
    """One small enough to decode in a test."""
    torch.manual_seed(0)
    config = tr.LlamaConfig(**SMALL, **WORDS, num_key_value_heads=1)
    return tr.LlamaForCausalLM(config).eval()


def test_an_object_of_any_class_goes_in_and_out() -> None:
    module = Applied(lambda bag, x: Bag({"sum": bag.held["a"][0] + x, "all": [bag.held["b"]]}))
    bag = Bag({"a": [X + 5], "b": X + 7})
    model = stitch.compile(module, (bag, X))
    assert len(inputs_of(model)) == 3
    assert outputs_of(model) == ["held_sum", "held_all_0"]
    found = run(model, (X + 5).numpy(), (X + 7).numpy(), X.numpy())
    assert_close(found, [2 * X + 5, X + 7])


def test_a_growing_cache_is_an_output_and_then_an_input() -> None:
    model, layers = llama(), range(2)
    names = [f"layers_{i}_{kind}" for i in layers for kind in ("keys", "values")]
    with torch.no_grad():
        wanted = model(IDS)
    first = stitch.compile(model, (IDS,))
    assert [name.partition("_")[2] for name in outputs_of(first)[1:]] == names
    logits, *cache = run(first, IDS.numpy())
    assert_close([logits, *cache], [wanted.logits, *tensors_of_cache(wanted.past_key_values)])

    step = {"input_ids": IDS[:, :1], "past_key_values": copy.deepcopy(wanted.past_key_values)}
    then = stitch.compile(model, step)
    assert inputs_of(then)[1:] == [f"past_key_values_{name}" for name in names]
    found = run(then, IDS[:, :1].numpy(), *cache)
    with torch.no_grad():
        wanted = model(IDS[:, :1], past_key_values=wanted.past_key_values)
    assert_close(found, [wanted.logits, *tensors_of_cache(wanted.past_key_values)])


def test_examples_in_objects_stay_as_they_are() -> None:
    model, cache = llama(), tr.DynamicCache()
    stitch.compile(model, {"input_ids": IDS, "past_key_values": cache})
    assert not any(layer.is_initialized for layer in cache.layers)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    before = [tensor.clone() for tensor in tensors_of_cache(cache)]
    stitch.compile(model, {"input_ids": IDS[:, :1], "past_key_values": cache})
    assert all(map(torch.equal, before, tensors_of_cache(cache)))


def test_a_cache_that_is_written_in_place_comes_out_as_it_is_then() -> None:
    model = llama()
    cache = tr.StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    step = {"input_ids": IDS[:, :1], "past_key_values": copy.deepcopy(cache)}
    then = stitch.compile(model, step)
    given = [tensor for layer in cache.layers
             for tensor in (layer.cumulative_length, layer.keys, layer.values)]  # fmt: skip
    order = {name: t for t, name in zip(given, sorted(inputs_of(then)[1:]), strict=True)}
    made = run(then, IDS[:, :1].numpy(), **{name: t.numpy() for name, t in order.items()})
    found = dict(zip(outputs_of(then), made, strict=True))
    with torch.no_grad():
        wanted = model(IDS[:, :1], past_key_values=cache)
    keys = [found[name] for name in found if name.endswith(("keys", "values"))]
    assert_close([found["logits"], *keys], [wanted.logits, *tensors_of_cache(cache)])


def test_a_change_that_nobody_would_see_is_refused() -> None:
    def write(bag: Any, x: Any) -> Any:
        bag.held = bag.held + x
        return x * 2

    def write_in_place(bag: Any, x: Any) -> Any:
        bag.held.add_(x)
        return x * 2

    for change in (write, write_in_place):
        bag = Bag(X + 5)
        with pytest.raises(
            CompileError, match=r"changes an argument of class Bag without returning"
        ) as caught:
            stitch.compile(Applied(change), (bag, X))
        assert "return it from forward" in str(caught.value)
        assert torch.equal(bag.held, X + 5)


def test_a_model_with_a_dataclass_can_be_trained() -> None:
    class Wrapped(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return Pair(self.layer(x), None)

    torch.manual_seed(0)
    loss_fn, optimizer = stitch.losses.MSELoss(), stitch.SGD(lr=0.01)
    model = stitch.compile(Wrapped(), (X,), loss=loss_fn, optimizer=optimizer)
    losses = []
    for _ in range(3):
        loss = loss_fn(model(X.numpy()), X.numpy())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "scripted",
    [
        lambda: torch.jit.script(nn.Linear(3, 4)),
        lambda: torch.jit.trace(nn.Linear(3, 4), X),
        lambda: torch.jit.trace(lambda x: x + 1, X),
    ],
    ids=["scripted module", "traced module", "traced function"],
)
def test_torchscript_is_answered_with_what_to_give(scripted: Any) -> None:
    with pytest.warns((DeprecationWarning, FutureWarning)):
        module = scripted()
    with pytest.raises(CompileError, match="TorchScript") as caught:
        stitch.compile(module, (X,))
    assert "pass the module that was scripted" in str(caught.value)


def test_the_remedy_for_a_file_of_torchscript_works(tmp_path: Path) -> None:
    from torch._export.converter import TS2EPConverter

    layer = nn.Linear(3, 4)
    with pytest.warns((DeprecationWarning, FutureWarning)):
        torch.jit.trace(layer, X).save(tmp_path / "m.pt")
        loaded = torch.jit.load(tmp_path / "m.pt")
    program = TS2EPConverter(loaded, (X,)).convert()
    assert_close(run(stitch.compile(program, (X,)), X.numpy()), [layer(X).detach()])


# What a module takes and gives, a model takes and gives ------------------------------------------


@pytest.mark.parametrize("kind", [Tagged, Named])
def test_a_registered_class_goes_in_and_out_with_or_without_names(kind: type[Bag]) -> None:
    module = Applied(lambda bag: kind({"twice": bag.held["x"] * 2, "same": [bag.word]}))
    bag = tagged(kind, {"x": X}, X + 1)
    model = stitch.compile(module, (bag,))
    names = {
        Tagged: ["output_0_twice", "output_0_same_0", "output_1"],
        Named: ["held_twice", "held_same_0", "word"],
    }
    assert outputs_of(model) == names[kind][: len(outputs_of(model))]
    made = model(bag)
    assert type(made) is kind
    assert made.word == "word"
    assert_close([made.held["twice"].numpy(), made.held["same"][0].numpy()], [X * 2, X + 1])


def test_a_class_without_names_within_containers_is_named_by_positions() -> None:
    module = Applied(lambda x: {"all": [Tagged(x), Point(x + 1, Tagged(x + 2))]})
    model = stitch.compile(module, (X,))
    assert outputs_of(model) == ["all_0_0", "all_1_near", "all_1_far_0"]
    made = model(X)
    assert type(made["all"][0]) is Tagged
    assert type(made["all"][1]) is Point
    assert_close(run(model, X), [X, X + 1, X + 2])


STRUCTURES: dict[str, tuple[Any, Any]] = {
    "a dictionary": (lambda d: {"sum": d["a"] + d["b"][1]}, ({"a": X, "b": [X, X + 1]},)),
    "a list": (lambda xs: [xs[0] * 2], ([X, X],)),
    "a named tuple": (lambda p: Point(p.far, p.near + 1), (Point(X, X + 1),)),
    "an ordered dictionary": (
        lambda d: collections.OrderedDict(z=d["z"] * 2, a=d["z"]),
        (collections.OrderedDict(z=X),),
    ),
    "a dataclass": (lambda p: Pair(p.second, p.first + 1, note="told"), (Pair(X, X + 1),)),
    "an object": (lambda b: Bag([b.held * 2]), (Bag(X),)),
    "None": (lambda a, b, c: (a + c if b is None else a, None), (X, None, X)),
    "a number": (lambda a, k: (a * k, k), (X, 3)),
    "a truth value": (lambda a, flag: (a * 2 if flag else a,), (X, True)),
    "a text": (lambda a, text: {"out": a * 2 if text == "twice" else a}, (X, "twice")),
    "names": (lambda a, b=None, flag=False: a + b["z"] if flag else a,
              {"flag": True, "a": X, "b": {"z": X}}),
    "an output of transformers": (
        lambda x: tr.modeling_outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(x, x)),
        (X,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STRUCTURES)
def test_a_model_takes_the_arguments_it_was_compiled_with_and_gives_what_torch_gives(
    case: str,
) -> None:
    function, examples = STRUCTURES[case]
    module = Applied(function)
    model = stitch.compile(module, examples)
    if isinstance(examples, dict):
        wanted, made = module(**examples), model(**dict(reversed(examples.items())))
    else:
        wanted, made = module(*examples), model(*examples)
    (leaves, structure), (mine, same) = flattened(wanted), flattened(made)
    assert same == structure
    for got, want in zip(mine, leaves, strict=True):
        if isinstance(want, torch.Tensor):
            assert_close([got.numpy()], [want])
        else:
            assert got == want


def test_outputs_are_those_of_the_slots_where_inputs_are() -> None:
    model = stitch.compile(Applied(lambda d: {"twice": d["x"] * 2}), ({"x": X},))
    assert isinstance(model(X), stitch.Tensor)
    assert set(model({"x": X})) == {"twice"}


@pytest.mark.parametrize(("given", "other"), [(3, 4), (True, 1), (2, 2.0), (None, 1), ("a", "b")])
def test_another_static_argument_than_that_of_compiling_is_refused(given: Any, other: Any) -> None:
    model = stitch.compile(Applied(lambda x, _: x * 2), (X, given))
    with pytest.raises(UsageError, match="another value") as caught:
        model(X, other)
    assert (caught.value.expected, caught.value.got) == (repr(given), repr(other))


TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_of_every_type_are_taken_however_they_lie(dtype: Any) -> None:
    def forward(*given: Any) -> list[Any]:
        return [torch.view_as_real(x) if dtype.is_complex else x.clone() for x in given]

    whole = (torch.arange(12) % 5).view(3, 4).to(dtype)
    given = (whole, whole.t(), whole[1:, ::2], whole[:1].expand(3, 4), whole[0, 1])
    found = stitch.compile(Applied(forward), given)(*given)
    assert_close(
        [result.numpy().astype("float64") for result in found],
        [result.double() for result in forward(*given)],
    )


def test_tensors_with_gradients_and_views_that_negate_are_taken() -> None:
    weight = nn.Parameter(X.clone())
    imaginary = torch.view_as_complex(torch.stack((X, X + 1), -1)).conj().imag
    for given in (weight, weight * 1, imaginary):
        assert_close(
            run(stitch.compile(Applied(lambda x: x * 2), (given,)), given), [given.detach() * 2]
        )


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_narrow_tensors_are_taken_by_programs_of_other_front_ends(name: str) -> None:
    builder = stitch.ComputationGraphBuilder("narrow")
    x = builder.input("x", (2, 3), name)
    builder.output("y", builder.cast(x, "float32"))
    given = X.to(getattr(torch, name))
    assert_close(run(stitch.compile(builder.build()), given), [given.float()])


def test_the_keys_of_a_dictionary_may_come_in_another_order() -> None:
    model: Any = stitch.compile(Applied(lambda d: d["b"] - d["a"]["k"][0]), (
        {"b": X, "a": {"k": [2 * X], "rest": X}},
    ))  # fmt: skip
    found = model({"a": {"rest": X, "k": [2 * X]}, "b": X})
    assert_close([found], [-X])
    with pytest.raises(UsageError):
        model({"a": {"rest": X, "k": [2 * X]}, "c": X})


def test_a_recurrent_layer_compiles_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    model = stitch.compile(nn.LSTM(4, 4), (torch.zeros(2, 3, 4),), target="host")
    assert model.program.outputs
    assert [str(one.message) for one in recwarn if "during export" in str(one.message)] == []


@pytest.mark.parametrize("kind", [Keyed, Shown, collections.OrderedDict, Row, Line])
def test_a_class_made_of_a_container_holds_the_tensors_in_it(kind: Any) -> None:
    key: Any = 0 if kind in (Row, Line) else "x"

    def held(tensor: Any) -> Any:
        return kind([tensor, "word"] if key == 0 else {"x": tensor, "word": "word"})

    module = Applied(lambda given, y: (given[key] * 2 + y, held(given[key] + 1)))
    model = stitch.compile(module, (held(X), X))
    for x in (X, X * 5):
        total, made = model(held(x), X)
        assert_close([total.numpy(), made[key].numpy()], [x * 2 + X, x + 1])
        assert type(made) is kind and list(made)[-1] == "word"


def test_a_size_is_taken_as_it_was_given() -> None:
    module = Applied(lambda x, size: x.reshape(size) * 2)
    model = stitch.compile(module, (X, torch.Size([3, 2])))
    for size in (torch.Size([3, 2]), (3, 2), (X * 2).reshape(3, 2).shape):
        assert_close([model(X, size).numpy()], [X.reshape(3, 2) * 2])
    with pytest.raises(UsageError, match="another value"):
        model(X, torch.Size([2, 3]))
