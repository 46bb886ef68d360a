"""The functions of the C interface that compile and train computation graphs."""

from __future__ import annotations

import io
import math

from stitch.api import compile
from stitch.c_interface.graph_functions import Graph, config_of
from stitch.c_interface.program_functions import copy_result
from stitch.c_interface.table import FunctionTable
from stitch.errors import UsageError
from stitch.model import CompiledModel
from stitch.option_values import DEFAULT_TARGET
from stitch.program import Array, DataType, ValueType
from stitch.training import LABEL, LOSS, Optimizer, TrainingInstance, optimizer_from_config

TABLE = FunctionTable()
_RESULT = "stitch_model_compilation_result_t result"
_INSTANCE = "stitch_model_training_instance_t instance"
_RESULT_OUT = "stitch_model_compilation_result_t *out"
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

    def set_elements(self, name: str, data: Array) -> None:
        """As `set`, for elements in the shape of the tensor."""
        shape = self.type_of(name).shape
        if math.prod(shape) != data.size:
            raise UsageError(f"tensor {name!r} has another number of elements",
                             expected=str(list(shape)), got=str(data.size))  # fmt: skip
        self.set(name, data.reshape(shape))

    def type_of(self, name: str) -> ValueType:
        """Return data type and shape of a tensor."""
        if name in self.types:
            return self.types[name]
        array = self.get(name)
        return ValueType(array.shape, DataType.from_dtype(array.dtype))

    def forward(self) -> None:
        """Queue the forward pass of the batch, and the loss if there are labels."""
        missing = [name for name in self.instance.inputs if name not in self.batch]
        if missing:
            raise UsageError(f"the batch has no {', '.join(missing)}",
                             remedy="set it by stitch_set_tensor_float before")  # fmt: skip
        self.instance.forward(*[self.batch[name] for name in self.instance.inputs])
        if LABEL in self.batch:
            self.instance.compute_loss(self.batch[LABEL])

    def update(self) -> None:
        """Update the parameters and drop the gradients."""
        self.instance.update()
        self.instance.zero_grad()


def compiled(
    graph: Graph, optimizer: Optimizer, algorithm: str | None, target: str | None
) -> CompiledModel:
    """Compile a graph that has a loss."""
    if graph.loss is None:
        raise UsageError("the graph has no loss to train by",
                         remedy="call stitch_computation_graph_set_loss before")  # fmt: skip
    return compile(
        graph.build(), optimizer=optimizer, loss=graph.loss, algorithm=algorithm or "none",
        target=target or DEFAULT_TARGET,
    )  # fmt: skip


TABLE.section = "Optimizers"
TABLE.add(
    "stitch_optimizer_create(const char *optimizer, stitch_optimizer_t *out)",
    "An optimizer by name (`sgd`, `adam`, `adamw`, ...) with PyTorch's defaults, or by a JSON "
    "object with `optimizer` and its settings.",
    lambda optimizer: optimizer_from_config(config_of(optimizer, "optimizer")),
)
TABLE.add(
    "stitch_optimizer_set_lr(stitch_optimizer_t optimizer, double lr)",
    "Set the learning rate for the next updates.",
    # The constructor checks it.
    lambda optimizer, lr: setattr(optimizer, "lr", type(optimizer)(lr=lr).lr),
)
TABLE.add(
    "stitch_optimizer_destroy(stitch_optimizer_t optimizer)",
    "Release an optimizer; trainings that use it go on.", lambda optimizer: None,
)  # fmt: skip

TABLE.section = "Compilation for training"
TABLE.add(
    "stitch_computation_graph_compile(stitch_computation_graph_t graph, "
    "stitch_optimizer_t optimizer, const char *algorithm, const char *target, "
    "stitch_model_compilation_result_t *out)",
    "Compile a graph that has a loss for training on a machine. Algorithm: `none` (also for NULL), "
    "`greedy`, `search`; target: NULL for wormhole_n150. Nothing can be added to the graph "
    "afterwards.",
    compiled, "algorithm", "target",
)  # fmt: skip
TABLE.add(
    "stitch_computation_graph_save(stitch_computation_graph_t graph, const char *target, "
    "const char *path)",
    "Compile a graph for inference and write its `.ttb` file, for stitch_load.",
    lambda graph, target, path: compile(
        graph.build(), target=target or DEFAULT_TARGET).save(path),
    "target",
)  # fmt: skip
TABLE.add(
    f"stitch_model_compilation_result_as_json({_RESULT}, {_TEXT})",
    "The compiled model as JSON, with the current weights and states of its training.",
    lambda result: result.as_json(),
)
TABLE.add(
    f"stitch_model_compilation_result_from_json(const char *json, {_RESULT_OUT})",
    "Read a compiled model from JSON.",
    lambda text: CompiledModel.load(io.StringIO(text)),
)
TABLE.add(
    f"stitch_model_compilation_result_dump({_RESULT}, const char *path)",
    "Write the compiled model as JSON to a file.",
    lambda result, path: result.dump(path),
)
TABLE.add(
    f"stitch_model_compilation_result_load(const char *path, {_RESULT_OUT})",
    "Read a compiled model from a file of JSON.", CompiledModel.load,
)  # fmt: skip
TABLE.add(
    f"stitch_model_compilation_result_destroy({_RESULT})",
    "Release a compiled model; its training goes on.", lambda result: None,
)  # fmt: skip

TABLE.section = "Training"
TABLE.add(
    f"stitch_start_training({_RESULT}, stitch_model_training_instance_t *out)",
    "Start a training on a new device of the machine it was compiled for.",
    lambda result: Training(result.start()),
)
TABLE.add(
    f"stitch_start_training_on({_RESULT}, stitch_device_t device, int64_t seed, "
    "stitch_model_training_instance_t *out)",
    "Start a training on an open device, with a seed of random operators.",
    lambda result, device, seed: Training(result.start(device, seed=seed)),
)
TABLE.add(
    f"stitch_model_training_instance_forward({_INSTANCE})",
    "Queue the forward pass of the batch that was set, and the loss if `label` was set.",
    Training.forward,
)
TABLE.add(
    f"stitch_model_training_instance_backward({_INSTANCE})",
    "Queue the gradients of the last loss, which are added to existing ones.",
    lambda training: training.instance.backward(),
)
TABLE.add(
    f"stitch_model_training_instance_update({_INSTANCE})",
    "Update parameters and optimizer state, and drop the gradients. A loss that is NaN or infinite "
    "is an error that changes nothing.",
    Training.update,
)
TABLE.add(
    f"stitch_stop_training({_INSTANCE})", "Stop a training and release its tensors.",
    lambda training: training.instance.close(),
)  # fmt: skip
for _name, _type in {
    "float": "float", "double": "double", "int32": "int32_t", "int64": "int64_t",
}.items():  # fmt: skip
    TABLE.add(
        f"stitch_get_tensor_{_name}({_INSTANCE}, const char *name, {_type} *data, size_t count)",
        "Read a parameter (`dense.weight`), its gradient (`dense.weight.grad`), an optimizer's "
        f"state, an output, `{LOSS}`, or an activation by the name of its value.",
        lambda training, name, data: copy_result(
            f"tensor {name!r}", training.get(name).reshape(-1), data),
    )  # fmt: skip
    TABLE.add(
        f"stitch_set_tensor_{_name}({_INSTANCE}, const char *name, const {_type} *data, "
        "size_t count)",
        f"Write a parameter or state, or an input or `{LABEL}` of the next forward pass.",
        Training.set_elements,
    )
TABLE.add(
    f"stitch_describe_tensor({_INSTANCE}, const char *name, stitch_array_t *description)",
    "Set data type and shape of a tensor; the shape is valid until the training is stopped.",
    lambda training, name: (name, training.type_of(name)),
)
TABLE.add(
    f"stitch_get_tensor_array({_INSTANCE}, const char *name, stitch_array_t *value)",
    "Read a tensor of any data type; the array has its shape.",
    lambda training, name, value: copy_result(f"tensor {name!r}", training.get(name), value),
)
TABLE.add(
    f"stitch_set_tensor_array({_INSTANCE}, const char *name, const stitch_array_t *value)",
    "Write a tensor of any data type, as stitch_set_tensor_float.", Training.set,
)  # fmt: skip
