"""Trainings in stages on a mesh: the bits of one device on every schedule, carrier and fault."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.errors import TaskError, UsageError
from stitch.machine import Machine, load_machine
from stitch.mesh import (
    CompiledStages,
    MachineSpecification,
    Mesh,
    ParallelOptions,
    StagedTraining,
    compile_stages,
)
from stitch.mesh.carrier import Sending
from stitch.mesh.local_carrier import LocalCarrier
from stitch.mesh.messages import Failure, Write
from stitch.mesh.schedules import SCHEDULES
from stitch.mesh.server import DeviceServer
from stitch.program import DataType, TensorDesc, host_layout
from stitch.training import (
    Checkpoint,
    CheckpointFolder,
    Trainable,
    TrainingInstance,
    TrainingOptions,
    compile_model,
    read_checkpoint,
    with_weights,
)
from tests.support import placed_graphs
from tests.support.placed_graphs import FUNCTIONS, SHAPE
from tests.support.training.models import batches, mlp, values_of
from tests.support.training.staged_models import MODELS, drawn, drawn_batches, model_of

MICRO_BATCHES = 4
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "digits.npz"


def mesh_of(devices: int, seed: int | None = None, faults: Mapping[int, str] | None = None) -> Mesh:
    """Return a mesh in this process."""

    def open_server(name: str) -> DeviceServer:
        return DeviceServer(name, stitch.open_device("host"), [placed_graphs.__name__])

    return Mesh(
        MachineSpecification.of(devices, "host"), LocalCarrier(open_server, seed, faults),
        functions=[placed_graphs.__name__],
    )  # fmt: skip


def messages_of(mesh: Mesh) -> int:
    """Return how many messages were sent."""
    carrier = mesh.client.carrier
    assert isinstance(carrier, LocalCarrier)
    return carrier.messages


def optimizer() -> stitch.AdamW:
    return stitch.AdamW(lr=0.01, schedule=stitch.schedules.StepLR(2))


def compiled_stages(
    model: Trainable, parallel: Mapping[str, Any],
    devices: Machine | MachineSpecification | None = None, **options: Any,
) -> CompiledStages:  # fmt: skip
    chosen = ParallelOptions(**{"micro_batches": MICRO_BATCHES, **parallel})
    settings = TrainingOptions(accumulation_steps=chosen.micro_batches, **options)
    devices = devices or load_machine("host")
    return compile_stages(model, "mse", optimizer(), settings, chosen, devices)


def staged(
    model: Trainable, mesh: Mesh, parallel: Mapping[str, Any], seed: int = 0, **options: Any
) -> StagedTraining:
    compiled = compiled_stages(model, parallel, mesh.specification, **options)
    return compiled.start(mesh, seed=seed)


def unsplit(model: Trainable, micro_batches: int = MICRO_BATCHES, **options: Any) -> Any:
    """Start the training on one device."""
    settings = TrainingOptions(accumulation_steps=micro_batches, **options)
    compiled = compile_model(model, "mse", optimizer(), settings, load_machine("host"))
    return compiled.start(stitch.open_device("host"), owns_device=True)


def trained(
    training: StagedTraining | TrainingInstance, model: Trainable, steps: range,
    micro_batches: int = MICRO_BATCHES,
) -> list[Any]:  # fmt: skip
    """Train some steps; return their losses."""
    return [training.step(drawn_batches(model, micro_batches, step)) for step in steps]


def assert_equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Assert that arrays by name have equal bits."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        other = right[name]
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        assert array.tobytes() == other.tobytes(), name


CASES = [
    ("mlp", {"stages": 2}, {}),
    ("skips", {"stages": 4}, {"clip_grad_norm": 0.05}),
    ("statistics", {"stages": 3, "schedule": "gpipe"}, {}),
    ("dropped", {"stages": 2}, {}),
    ("tied", {"stages": 3}, {"precision": DataType.BFLOAT16, "clip_grad_norm": 0.05}),
    ("embedding", {"stages": 4, "schedule": "interleaved", "chunks": 2}, {}),
    ("attention", {"stages": 4}, {"recompute": "all"}),
    ("unread", {"stages": 2}, {}),
]


@pytest.mark.parametrize(("name", "parallel", "options"), [
    pytest.param(
        *case, id=case[0],
        marks=pytest.mark.campaign("mesh") if case[0] not in ("tied", "embedding") else (),
    )
    for case in CASES
])  # fmt: skip
def test_a_training_in_stages_has_the_bits_of_one_device(
    name: str, parallel: dict[str, Any], options: dict[str, Any]
) -> None:
    model = model_of(MODELS[name]())
    stages, chunks = parallel["stages"], parallel.get("chunks", 1)
    with mesh_of(stages // chunks, seed=1) as mesh, unsplit(model, **options) as instance:
        training = staged(model, mesh, parallel, **options)
        assert_equal(training.state_dict(), instance.state_dict())
        assert trained(training, model, range(3)) == trained(instance, model, range(3))
        assert_equal(training.state_dict(), instance.state_dict())
        assert_equal(training.parameters(), instance.parameters())
        gradients = {n: instance.get_tensor(f"{n}.grad") for n in training.gradients()}
        assert_equal(training.gradients(), gradients)
        if options.get("clip_grad_norm"):
            assert training.gradient_norm == instance.get_tensor("gradient_norm")


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_with_one_micro_batch_each_have_the_bits_of_one_device(replicas: int) -> None:
    model = model_of(MODELS["tied"]())
    parallel = {"stages": 2, "replicas": replicas, "micro_batches": replicas}
    with (
        mesh_of(2 * replicas, seed=2) as mesh,
        unsplit(model, replicas, clip_grad_norm=0.05) as instance,
    ):
        training = staged(model, mesh, parallel, clip_grad_norm=0.05)
        losses = trained(training, model, range(3), replicas)
        assert losses == trained(instance, model, range(3), replicas)
        assert_equal(training.state_dict(), instance.state_dict())


def test_replicas_with_several_micro_batches_add_sums_of_sums_in_the_order_of_their_numbers() -> (
    None
):
    model = model_of(MODELS["mlp"]())
    states = []
    for seed in (None, 1):
        with mesh_of(4, seed) as mesh:
            training = staged(model, mesh, {"stages": 2, "replicas": 2})
            trained(training, model, range(2))
            gradients, state = training.gradients(), training.state_dict()
            states.append(state)
    for state in states[1:]:
        assert_equal(state, states[0])
    with unsplit(model) as instance:
        trained(instance, model, range(2))
        for name, gradient in gradients.items():
            # Unit roundoff times the number of addends, of sums of about this size.
            expected = instance.get_tensor(f"{name}.grad")
            tolerance = 64 * 2.0**-24 * np.abs(expected).max()
            np.testing.assert_allclose(gradient, expected, atol=tolerance)


@pytest.mark.parametrize("at", [0, 3])
def test_nan_in_any_micro_batch_leaves_all_stages_as_before_the_step(at: int) -> None:
    model = model_of(MODELS["statistics"]())
    with mesh_of(3, seed=3) as mesh, unsplit(model) as instance:
        training = staged(model, mesh, {"stages": 3})
        trained(training, model, range(1))
        before = training.state_dict()
        batches = drawn_batches(model, MICRO_BATCHES, 7)
        batches[at] = batches[at][0], np.full_like(batches[at][1], np.nan)
        with pytest.raises(TaskError, match="the loss of step 1 is nan"):
            training.step(batches)
        assert_equal(training.state_dict(), before)
        trained(instance, model, range(1))
        assert trained(training, model, range(1, 3)) == trained(instance, model, range(1, 3))
        assert_equal(training.state_dict(), instance.state_dict())


def test_a_checkpoint_does_not_know_the_plan_that_wrote_it(tmp_path: Path) -> None:
    """Written by 4 stages, resumed on 1 device, by 2 stages and by 2 stages of 2 replicas, each of
    them with equal bits, and resumed by 4 stages again."""
    model, folder = model_of(MODELS["tied"]()), CheckpointFolder(tmp_path)
    with unsplit(model, 2) as instance:
        wanted = [(trained(instance, model, range(k, k + 1), 2), instance.state_dict())
                  for k in range(3)]  # fmt: skip
    four, two = {"stages": 4}, {"stages": 2}
    for step, plan in [(0, four), (1, None), (1, two), (1, {**two, "replicas": 2}), (2, four)]:
        with ExitStack() as stack:
            if plan is None:
                training: Any = stack.enter_context(unsplit(model, 2))
            else:
                mesh = stack.enter_context(mesh_of(plan["stages"] * plan.get("replicas", 1)))
                training = staged(model, mesh, {**plan, "micro_batches": 2}, seed=step)
            if step:
                training.load_state_dict(read_checkpoint(folder.files[step - 1]).state)
            assert trained(training, model, range(step, step + 1), 2) == wanted[step][0], plan
            assert_equal(training.state_dict(), wanted[step][1])
            folder.save(Checkpoint(training.steps, training.state_dict()))
    folder.close()


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    model = model_of(MODELS["mlp"]())
    with mesh_of(2) as mesh:
        training = staged(model, mesh, {"stages": 2})
        sent = messages_of(mesh)
        good = drawn_batches(model, MICRO_BATCHES)
        with pytest.raises(UsageError, match="as many micro-batches"):
            training.step(good[:3])
        with pytest.raises(UsageError, match="micro-batch"):
            training.step([*good[:3], ({"z": good[0][0]["x"]}, good[0][1])])
        with pytest.raises(stitch.LinkError, match="'x' of micro-batch 3"):
            training.step([*good[:3], (np.zeros((3, 3), np.float32), good[0][1])])
        twice = [(np.concatenate([x["x"]] * 2), np.concatenate([y] * 2)) for x, y in good]
        with pytest.raises(
            stitch.LinkError, match=r"'x' of micro-batch 0 .*\n.*expected: \[8, 16\]"
        ):
            training.step(twice)
        assert messages_of(mesh) == sent


def test_plans_that_cannot_be_are_refused() -> None:
    model = model_of(MODELS["statistics"]())
    with mesh_of(2) as mesh:
        with pytest.raises(UsageError, match="needs more devices") as caught:
            staged(model, mesh, {"stages": 3})
        assert "3: 3 for each of 1 replicas" in str(caught.value)
        with pytest.raises(UsageError, match="replicas of a model with states"):
            staged(model, mesh, {"stages": 1, "replicas": 2})
        with pytest.raises(UsageError, match="there is no schedule 'zigzag'"):
            staged(model, mesh, {"stages": 2, "schedule": "zigzag"})
        with pytest.raises(UsageError, match="the same number of micro-batches"):
            staged(model, mesh, {"stages": 1, "replicas": 3})
        with pytest.raises(UsageError, match="micro_batches must be at least 1"):
            staged(model, mesh, {"micro_batches": 0})


def test_compile_trains_in_stages_on_the_devices_of_a_specification(tmp_path: Path) -> None:
    graph, label = mlp(8), "mse"
    (tmp_path / "two.yaml").write_text(
        "devices: {left: {machine: host}, right: {machine: host}}\n", encoding="utf-8"
    )
    model = stitch.compile(
        graph, optimizer="adam", loss=label, devices=tmp_path / "two.yaml",
        parallel={"stages": 2, "micro_batches": 2},
    )  # fmt: skip
    assert "device 1: 1F0 1B0 1F1 1B1" in str(model)
    data = batches(2, 8)
    whole = stitch.compile(graph, optimizer="adam", loss=label, target="host", accumulation_steps=2)
    with model.start() as training, whole.start() as instance:
        assert [*training.mesh.devices] == ["left", "right"]
        assert [training.step(data) for _ in range(3)] == [instance.step(data) for _ in range(3)]
        assert_equal(training.state_dict(), instance.state_dict())
        trained_model = with_weights(model.model.evaluation, training.state_dict())
        predicted = stitch.compile(trained_model, target="host")(data[0][0])
        np.testing.assert_array_equal(values_of(predicted), instance.predict(data[0][0]).numpy())
    assert training.mesh.is_closed


def test_options_that_do_not_go_with_stages_are_refused() -> None:
    def compiled(**options: Any) -> Any:
        return stitch.compile(mlp(8), optimizer="adam", loss="mse", **options)

    with pytest.raises(UsageError, match="parallel= takes no stage") as caught:
        compiled(parallel={"stage": 2})
    assert "did you mean" in str(caught.value)
    with pytest.raises(UsageError, match="devices= takes parallel=, or an algorithm"):
        compiled(devices=2)
    two = stitch.MachineSpecification.of(devices=2, machine="tiny")
    with pytest.raises(UsageError, match="target= names another machine than devices="):
        compiled(parallel={"stages": 2}, devices=two, target="host")
    with pytest.raises(UsageError, match="algorithm= only without parallel="):
        compiled(parallel={"stages": 2}, algorithm="greedy")
    with pytest.raises(UsageError, match="accumulation_steps is the number of micro-batches"):
        compiled(parallel={"stages": 2}, accumulation_steps=3)
    with pytest.raises(UsageError, match="only with optimizer= and loss="):
        stitch.compile(mlp(8), parallel={"stages": 2})  # type: ignore[call-overload]
    with pytest.raises(stitch.CompileError, match="cannot be split into 40 parts"):
        compiled(parallel={"stages": 40})


def test_a_stage_that_fails_leaves_all_stages_as_before_the_step() -> None:
    model = model_of(MODELS["embedding"]())
    with mesh_of(2, seed=6) as mesh, unsplit(model) as instance:
        training = staged(model, mesh, {"stages": 2})
        trained(training, model, range(1))
        before = training.state_dict()
        batches = drawn_batches(model, MICRO_BATCHES, 7)
        batches[1] = {"x": np.full(8, 99)}, batches[1][1]
        with pytest.raises(stitch.StitchError, match=r"(?s)99"):
            training.step(batches)
        assert_equal(training.state_dict(), before)
        trained(instance, model, range(1))
        assert trained(training, model, range(1, 3)) == trained(instance, model, range(1, 3))
        assert_equal(training.state_dict(), instance.state_dict())


def test_a_failed_call_of_another_graph_on_the_mesh_concerns_no_training() -> None:
    model = model_of(MODELS["mlp"]())
    graph = stitch.TaskGraph("other")
    desc = TensorDesc(SHAPE, host_layout(DataType.FLOAT32))
    h, x = graph.input(desc, "h"), graph.input(desc, "x")
    with graph.on("device0"):
        graph.output(graph.host(FUNCTIONS["checked"][0], h, x, 0), "after")
    with mesh_of(2, seed=1) as mesh, unsplit(model) as instance:
        run = mesh.prepare(graph, carry={"h": "after"})
        training = staged(model, mesh, {"stages": 2})
        run.write(h=np.ones(SHAPE, np.float32))
        run(np.zeros(SHAPE, np.float32))
        assert trained(training, model, range(2)) == trained(instance, model, range(2))
        with pytest.raises(TaskError):
            run.read("h")
        assert_equal(training.state_dict(), instance.state_dict())


def test_an_update_that_failed_is_told_until_all_tensors_are_loaded() -> None:
    model = model_of(MODELS["mlp"]())
    with mesh_of(2) as mesh, unsplit(model) as instance:
        training, client = staged(model, mesh, {"stages": 2}), mesh.client
        assert trained(training, model, range(1)) == trained(instance, model, range(1))
        state, first = training.state_dict(), training._first[0]
        # A state of the optimizer, which only the update reads.
        name = max(first.descs.keys() - {slot.name for slot in first.stage.forward.inputs})
        message = Write((first.buffer(name),), client._turn(client._devices[first.device]))
        failure = client.carrier.put(Failure("TaskError", "broken"))
        client.carrier.send(first.device, Sending(message, [failure]))
        trained(training, model, range(1, 2))
        for act in (training.state_dict, lambda: trained(training, model, range(2, 3))):
            with pytest.raises(TaskError, match=r"an update of this training failed .*broken"):
                act()
        training.load_state_dict(state)
        assert trained(training, model, range(1, 3)) == trained(instance, model, range(1, 3))
        assert_equal(training.state_dict(), instance.state_dict())


def test_an_interrupt_while_a_step_runs_leaves_it_undone_or_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(MODELS["statistics"]())
    with mesh_of(2) as mesh:
        training = staged(model, mesh, {"stages": 2})
        states = [training.state_dict()]
        for step in range(3):
            trained(training, model, range(step, step + 1))
            states.append(training.state_dict())
    for number in (9, 14, 22):
        with mesh_of(2) as mesh:
            training = staged(model, mesh, {"stages": 2})
            handled, handle = [0], DeviceServer.handle

            def interrupted(server: Any, *message: Any, handled: Any = handled,
                            handle: Any = handle, at: int = number) -> object:  # fmt: skip
                handled[0] += 1
                if handled[0] == at:
                    raise KeyboardInterrupt
                return handle(server, *message)

            with monkeypatch.context() as patch:
                patch.setattr(DeviceServer, "handle", interrupted)
                with suppress(KeyboardInterrupt):
                    trained(training, model, range(2))
            assert_equal(training.state_dict(), states[training.steps])
            for step in range(training.steps, 3):
                trained(training, model, range(step, step + 1))
            assert_equal(training.state_dict(), states[3])


@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 60), marks=pytest.mark.campaign("mesh"))]
)
def test_drawn_plans_of_drawn_models_have_the_bits_of_one_device(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        model = model_of(drawn(seed), seed)
        kind, micro_batches = draw.choice(SCHEDULES), draw.randint(1, 5)
        chunks = draw.randint(1, 2) if kind == "interleaved" else 1
        stages = chunks * draw.randint(1, 2)
        parallel = {
            "stages": stages, "schedule": kind, "chunks": chunks, "micro_batches": micro_batches
        }  # fmt: skip
        options: dict[str, Any] = {"clip_grad_norm": draw.choice([None, 0.05]),
                   "recompute": draw.choice(["none", "cheap", "all"])}  # fmt: skip
        with (
            mesh_of(stages // chunks, seed) as mesh,
            unsplit(model, micro_batches, **options) as instance,
        ):
            training = staged(model, mesh, parallel, **options)
            losses = trained(training, model, range(2), micro_batches)
            assert losses == trained(instance, model, range(2), micro_batches), seed
            assert_equal(training.state_dict(), instance.state_dict())


class Digits(torch.nn.Module):  # type: ignore[misc]
    """Digits by an embedding of their grey values, which scores them as well; a layer that two
    stages run; dropout, BatchNormalization, and a skip from the first stage to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.greys = torch.nn.Embedding(17, 4)
        self.first = torch.nn.Linear(256, 24)
        self.shared = torch.nn.Linear(24, 24)
        self.middle = torch.nn.Linear(24, 24)
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(24) for _ in range(3)])
        self.last = torch.nn.Linear(24, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(self.greys(x).flatten(1))
        h = torch.relu(self.norms[0](first))
        for norm, layer in zip(self.norms[1:], (self.shared, self.middle), strict=True):
            h = torch.nn.functional.dropout(torch.tanh(norm(layer(h))), 0.2, self.training)
        h = torch.tanh(self.shared(h)) + first
        return (self.last(h).reshape(-1, 10, 4) @ self.greys.weight.T).amax(-1)


PLANS_OF_DIGITS = [
    (stages, kind, chunks)
    for stages in (2, 3, 4)
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 3 if stages == 3 else 2))
]


@pytest.mark.parametrize(("stages", "kind", "chunks", "steps"), [
    (4, "1f1b", 1, 2),
    *[pytest.param(*plan, 20, marks=pytest.mark.campaign("mesh")) for plan in PLANS_OF_DIGITS],
])  # fmt: skip
def test_digits_are_trained_in_stages_from_the_state_of_an_optimizer_as_on_one_device(
    stages: int, kind: str, chunks: int, steps: int
) -> None:
    with np.load(DIGITS) as data:
        images = torch.tensor(data["images"][data["train"]]).long().split(12)
        labels = torch.tensor(data["labels"][data["train"]]).long().split(12)
    torch.manual_seed(0)
    net = Digits()
    stepped = torch.optim.Adam(net.parameters(), lr=0.01)
    torch.nn.functional.cross_entropy(net(images[-2]), labels[-2]).backward()
    stepped.step()
    goal: dict[str, Any] = {"loss": torch.nn.CrossEntropyLoss(), "optimizer": stepped,
                            "target": "host", "clip_grad_norm": 0.5}  # fmt: skip
    parallel = {"stages": stages, "schedule": kind, "chunks": chunks, "micro_batches": 4}
    parts = stitch.compile(net, (images[0],), parallel=parallel, **goal)
    whole = stitch.compile(net, (images[0],), accumulation_steps=4, **goal)
    assert isinstance(parts, CompiledStages) and isinstance(whole, stitch.CompiledModel)
    skips = [
        (k - each.source, each.slot)
        for k, each_stage in enumerate(parts.staged.stages) for each in each_stage.arriving
    ]  # fmt: skip
    assert max(skips)[0] == stages - 1, "a value goes from the first stage to the last"
    with parts.start(seed=3) as training, whole.start(seed=3) as instance:
        assert_equal(training.state_dict(), instance.state_dict())
        losses = []
        for step in range(steps):
            batch = [(images[4 * step + i], labels[4 * step + i]) for i in range(4)]
            losses.append(training.step(batch))
            assert losses[-1] == instance.step(batch)
            assert training.gradient_norm == instance.get_tensor("gradient_norm")
        assert_equal(training.state_dict(), instance.state_dict())
    assert steps < 20 or sum(losses[-1]) < 0.7 * sum(losses[0])


@pytest.mark.parametrize(
    "name", ["statistics", pytest.param("tied", marks=pytest.mark.campaign("mesh"))]
)
def test_tensors_are_written_between_gradients_and_update_as_on_one_device(name: str) -> None:
    model = model_of(MODELS[name]())
    pairs = drawn_batches(model, MICRO_BATCHES, 7)
    options: dict[str, Any] = {"precision": DataType.BFLOAT16} if name == "tied" else {}
    with mesh_of(3) as mesh, unsplit(model, **options) as instance:
        training = staged(model, mesh, {"stages": 3}, **options)
        assert trained(training, model, range(1)) == trained(instance, model, range(1))
        first, *others = training.parameters()
        losses = training.compute_gradients(pairs)
        instance.zero_grad()
        for (inputs, target), loss in zip(pairs, losses, strict=True):
            instance.forward(**inputs)
            assert instance.compute_loss(target).item() == loss
            instance.backward()
        value = training.tensors([first])[first] + 1
        training.set_tensors({first: value})
        assert_equal(training.tensors([first]), {first: value})
        instance.set_tensor(first, value)
        training.update()
        instance.update()
        assert_equal(training.state_dict(), instance.state_dict())
        before = training.state_dict()
        with pytest.raises(UsageError, match="no tensor 'wv'"):
            training.set_tensors({first: value, "wv": value})
        with pytest.raises(UsageError, match="another shape"):
            training.set_tensors({first: value, others[0]: np.zeros((3, 3, 3))})
        with pytest.raises(UsageError, match="without gradients"):
            training.update()
        training.compute_gradients(pairs)
        training.load_state_dict(before)
        with pytest.raises(UsageError, match="without gradients"):
            training.update()
        assert_equal(training.state_dict(), before)
