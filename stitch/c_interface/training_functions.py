"""The functions of the C interface that compile and train computation graphs."""

from __future__ import annotations

import io

import numpy as np

from stitch.api import compile
from stitch.c_interface.graph_functions import Graph, config_of
from stitch.c_interface.program_functions import copy_result
from stitch.c_interface.table import FunctionTable
from stitch.errors import UsageError
from stitch.model import CompiledModel
from stitch.option_values import DEFAULT_TARGET
from stitch.program import Array, DataType, ValueType
from stitch.report import Device
from stitch.training import LABEL, LOSS, Optimizer, TrainingInstance, optimizer_from_config

TABLE = FunctionTable()
_RESULT = "stitch_model_compilation_result_t result"
_INSTANCE = "stitch_model_training_instance_t instance"
_TEXT = "char *text, size_t capacity, size_t *needed"


class Training:
    """A running training, and the batch that was set for its next forward pass."""

    def __init__(self, instance: TrainingInstance) -> None:
        self.instance = instance
        self.batch: dict[str, Array] = {}
        programs = instance.programs
        #: Types of the batch and of the labels, by name.
        self.types: dict[str, ValueType] = {
            slot.name: program.values[slot.value].type
            for program, names in ((programs.forward, instance.inputs), (programs.loss, (LABEL,)))
            for slot in program.inputs if slot.name in names
        }  # fmt: skip

    def get(self, name: str) -> Array:
        """Return a tensor, or what was set for the next batch."""
        return self.batch[name] if name in self.batch else self.instance.get_tensor(name)

    def set(self, name: str, array: Array) -> None:
        """Overwrite a tensor, or set a part of the next batch; the array is copied."""
        if name in self.types:
            self.batch[name] = array.copy()
        else:
            self.instance.set_tensor(name, array)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, for elements that come without one."""
        known = self.types.get(name)
        return self.instance.get_tensor(name).shape if known is None else known.shape


TABLE.section = "Optimizers"


@TABLE.function("stitch_optimizer_create(const char *optimizer, stitch_optimizer_t *out)")
def create_optimizer(optimizer: str) -> Optimizer:
    """An optimizer by name (`sgd`, `adam`, `adamw`, ...) with PyTorch's defaults, or by a JSON
    object with `optimizer` and its settings."""
    return optimizer_from_config(config_of(optimizer, "optimizer"))


@TABLE.function("stitch_optimizer_set_lr(stitch_optimizer_t optimizer, double lr)")
def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate for the next updates."""
    optimizer.lr = lr


@TABLE.function("stitch_optimizer_destroy(stitch_optimizer_t optimizer)")
def destroy_optimizer(optimizer: Optimizer) -> None:
    """Release an optimizer; trainings that use it go on."""


TABLE.section = "Compilation for training"


@TABLE.function(
    "stitch_computation_graph_compile(stitch_computation_graph_t graph, "
    "stitch_optimizer_t optimizer, const char *algorithm, const char *target, "
    "stitch_model_compilation_result_t *out)",
    "algorithm", "target",
)  # fmt: skip
def compile_graph(
    graph: Graph, optimizer: Optimizer, algorithm: str | None, target: str | None
) -> CompiledModel:
    """Compile a graph that has a loss for training on a machine. Algorithm: `none` (also for
    NULL), `greedy`, `search`; target: NULL for wormhole_n150. Nothing can be added to the graph
    afterwards."""
    if graph.loss is None:
        raise UsageError("the graph has no loss to train by",
                         remedy="call stitch_computation_graph_set_loss before")  # fmt: skip
    return compile(
        graph.build(), optimizer=optimizer, loss=graph.loss, algorithm=algorithm or "none",
        target=target or DEFAULT_TARGET,
    )  # fmt: skip


@TABLE.function(
    "stitch_computation_graph_save(stitch_computation_graph_t graph, const char *target, "
    "const char *path)",
    "target",
)
def save_graph(graph: Graph, target: str | None, path: str) -> None:
    """Compile a graph for inference and write its `.ttb` file, for stitch_load."""
    compile(graph.build(), target=target or DEFAULT_TARGET).save(path)


@TABLE.function(f"stitch_model_compilation_result_as_json({_RESULT}, {_TEXT})")
def as_json(result: CompiledModel) -> str:
    """The compiled model as JSON, with the current weights and states of its training."""
    return result.as_json()


@TABLE.function(
    "stitch_model_compilation_result_from_json(const char *json, "
    "stitch_model_compilation_result_t *out)"
)
def from_json(text: str) -> CompiledModel:
    """Read a compiled model from JSON."""
    return CompiledModel.load(io.StringIO(text))


@TABLE.function(f"stitch_model_compilation_result_dump({_RESULT}, const char *path)")
def dump(result: CompiledModel, path: str) -> None:
    """Write the compiled model as JSON to a file."""
    result.dump(path)


@TABLE.function(
    "stitch_model_compilation_result_load(const char *path, stitch_model_compilation_result_t *out)"
)
def load(path: str) -> CompiledModel:
    """Read a compiled model from a file of JSON."""
    return CompiledModel.load(path)


@TABLE.function(f"stitch_model_compilation_result_destroy({_RESULT})")
def destroy_result(result: CompiledModel) -> None:
    """Release a compiled model; its training goes on."""


TABLE.section = "Training"


@TABLE.function(f"stitch_start_training({_RESULT}, stitch_model_training_instance_t *out)")
def start_training(result: CompiledModel) -> Training:
    """Start a training on a new device of the machine it was compiled for."""
    return Training(result.start())


@TABLE.function(
    f"stitch_start_training_on({_RESULT}, stitch_device_t device, int64_t seed, "
    "stitch_model_training_instance_t *out)"
)
def start_training_on(result: CompiledModel, device: Device, seed: int) -> Training:
    """Start a training on an open device, with a seed of random operators."""
    return Training(result.start(device, seed=seed))


@TABLE.function(f"stitch_model_training_instance_forward({_INSTANCE})")
def forward(training: Training) -> None:
    """Queue the forward pass of the batch that was set, and the loss if `label` was set."""
    instance = training.instance
    missing = [name for name in instance.inputs if name not in training.batch]
    if missing:
        raise UsageError(f"the batch has no {', '.join(missing)}",
                         remedy="set it by stitch_set_tensor_float before")  # fmt: skip
    instance.forward(*[training.batch[name] for name in instance.inputs])
    if LABEL in training.batch:
        instance.compute_loss(training.batch[LABEL])


@TABLE.function(f"stitch_model_training_instance_backward({_INSTANCE})")
def backward(training: Training) -> None:
    """Queue the gradients of the last loss, which are added to existing ones."""
    training.instance.backward()


@TABLE.function(f"stitch_model_training_instance_update({_INSTANCE})")
def update(training: Training) -> None:
    """Update parameters and optimizer state, and drop the gradients. A loss that is NaN or
    infinite is an error that changes nothing."""
    training.instance.update()
    training.instance.zero_grad()


@TABLE.function(f"stitch_stop_training({_INSTANCE})")
def stop_training(training: Training) -> None:
    """Stop a training and release its tensors."""
    training.instance.close()


for _name, _type in (
    ("float", "float"), ("double", "double"), ("int32", "int32_t"), ("int64", "int64_t"),
):  # fmt: skip

    def _get(training: Training, name: str, data: Array) -> None:
        array = training.get(name).reshape(-1)
        copy_result(f"tensor {name!r}", array, data)

    def _set(training: Training, name: str, data: Array) -> None:
        shape = training.shape(name)
        if np.prod(shape, dtype=np.int64) != data.size:
            raise UsageError(f"tensor {name!r} has another number of elements",
                             expected=str(list(shape)), got=str(data.size))  # fmt: skip
        training.set(name, data.reshape(shape))

    TABLE.add(
        f"stitch_get_tensor_{_name}({_INSTANCE}, const char *name, {_type} *data, size_t count)",
        "Read a parameter (`dense.weight`), its gradient (`dense.weight.grad`), an optimizer's "
        f"state, an output, `{LOSS}`, or an activation by the name of its value.",
        _get,
    )
    TABLE.add(
        f"stitch_set_tensor_{_name}({_INSTANCE}, const char *name, const {_type} *data, "
        "size_t count)",
        f"Write a parameter or state, or an input or `{LABEL}` of the next forward pass.",
        _set,
    )


@TABLE.function(
    f"stitch_describe_tensor({_INSTANCE}, const char *name, stitch_array_t *description)"
)
def describe_tensor(training: Training, name: str) -> tuple[str, ValueType]:
    """Set data type and shape of a tensor; the shape is valid until the training is stopped."""
    if name in training.types:
        return name, training.types[name]
    array = training.get(name)
    return name, ValueType(array.shape, DataType.from_dtype(array.dtype))


@TABLE.function(f"stitch_get_tensor_array({_INSTANCE}, const char *name, stitch_array_t *value)")
def get_tensor(training: Training, name: str, value: Array) -> None:
    """Read a tensor of any data type; the array has its shape."""
    copy_result(f"tensor {name!r}", training.get(name), value)


@TABLE.function(
    f"stitch_set_tensor_array({_INSTANCE}, const char *name, const stitch_array_t *value)"
)
def set_tensor(training: Training, name: str, value: Array) -> None:
    """Write a tensor of any data type, as stitch_set_tensor_float."""
    training.set(name, value)
