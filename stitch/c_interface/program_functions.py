"""The functions of the C interface on devices, programs and pipelines.

Each implementation gets Python values for its C arguments: objects for handles, strings, NumPy
arrays over the caller's memory. What it returns goes into the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stitch.api import Pipeline, open_device
from stitch.c_interface.table import FunctionTable
from stitch.errors import UsageError
from stitch.planner import Copy, Plan
from stitch.program import Array, ValueType
from stitch.report import Device
from stitch.runtime import LoadedProgram

TABLE = FunctionTable()


def check_count(what: str, expected: int, got: int) -> None:
    """Raise `UsageError` if another number of arrays was passed."""
    if expected != got:
        raise UsageError(f"a wrong number of {what}", expected=str(expected), got=str(got))


def copy_result(name: str, source: Any, target: Array) -> None:
    """Copy a result into an array of the caller; raise `UsageError` for another shape or type."""
    array = np.asarray(source)
    if array.shape != target.shape or array.dtype != target.dtype:
        raise UsageError(
            f"{name} has another shape or data type",
            expected=f"{array.dtype}{list(array.shape)}",
            got=f"{target.dtype}{list(target.shape)}",
            remedy="ask for it with stitch_describe_output or stitch_describe_tensor",
        )
    target[...] = array


class Program:
    """A loaded program; `views` has arrays over memory of C by the bytes of its addresses."""

    def __init__(self, loaded: LoadedProgram) -> None:
        self.loaded: Callable[..., Any] = loaded
        self.name = loaded.name
        self.views: dict[tuple[bytes, bytes], tuple[list[Array], list[Array]]] = {}
        self.inputs = [(port.name, port.type) for port in loaded.ports]
        slots = loaded.program.outputs
        self.outputs = [(slot.name, loaded.program.values[slot.value].type) for slot in slots]
        self.takes, self.gives = len(self.inputs), len(self.outputs)

    def slot(self, slots: Sequence[tuple[str, ValueType]], index: int) -> tuple[str, ValueType]:
        """Return name and type of an input or output; raise `UsageError`."""
        if index >= len(slots):
            raise UsageError(
                f"program {self.name!r} has no such slot",
                expected=f"0 to {len(slots) - 1}" if slots else "no slots", got=str(index),
            )  # fmt: skip
        return slots[index]


def tensors_of(results: Any) -> tuple[Any, ...]:
    """Return the results of a call as a tuple."""
    return results if isinstance(results, tuple) else (results,)


def on_plan(device: Device, callback: Callable[[Any, int, int], None], context: Any) -> None:
    """Call a C function with the numbers of each new plan."""

    def call(plan: Plan) -> None:
        callback(context, len(plan.steps), sum(isinstance(step, Copy) for step in plan.steps))

    device.on_plan(call)


def count_slots(program: Program, inputs: Any, outputs: Any) -> None:
    """Set the numbers of inputs and outputs through pointers."""
    inputs[0], outputs[0] = program.takes, program.gives


def run(program: Program, inputs: list[Array], outputs: list[Array]) -> None:
    """Run a program; convert its results to float32."""
    results = program.loaded(*inputs)
    if len(outputs) == 1:
        outputs[0][...] = results.numpy()
        return
    for result, target in zip(tensors_of(results), outputs, strict=True):
        target[...] = result.numpy()


def run_into(
    call: Callable[..., Any], names: Sequence[str], inputs: list[Array], outputs: list[Array]
) -> None:
    """Call a program or pipeline; copy its results."""
    check_count("outputs", len(names), len(outputs))
    for name, result, target in zip(names, tensors_of(call(*inputs)), outputs, strict=True):
        copy_result(f"output {name!r}", result.numpy(), target)


TABLE.section = "Devices"
TABLE.add(
    "stitch_open_device(const char *name, const char *executor, stitch_device_t *out)",
    "Open a machine by name or file; executor: `numpy`, `onnxruntime`, ...; NULL: the default.",
    lambda name, executor: open_device(name, executor=executor or None), "executor",
)  # fmt: skip
TABLE.add(
    "stitch_close_device(stitch_device_t device)",
    "Run the queued work and release all memory of a device.",
    lambda device: device.close(),
)
TABLE.add(
    "stitch_explain(stitch_device_t device, char *text, size_t capacity, size_t *needed)",
    "Each copy of a device with its reason, and the contents of its memory.",
    lambda device: device.explain(),
)
TABLE.add(
    "stitch_on_plan(stitch_device_t device, stitch_plan_callback_t callback, void *context)",
    "Call a function with each plan of a device when it is made, until the device is closed. It "
    "may call Stitch; what would wait for the running plan is an error.",
    on_plan, "context",
)  # fmt: skip

TABLE.section = "Programs: .ttb files"
_SLOT = "size_t index, const char **name, stitch_array_t *description"
_ARRAYS = "const stitch_array_t *inputs, size_t n_inputs, stitch_array_t *outputs, size_t n_outputs"
TABLE.add(
    "stitch_load(stitch_device_t device, const char *path, stitch_program_t *out)",
    "Load the first program of a `.ttb` file.",
    lambda device, path: Program(device.load(path)),
)
TABLE.add(
    "stitch_load_program(stitch_device_t device, const char *path, const char *program, "
    "stitch_program_t *out)",
    "Load the program of a `.ttb` file that has a name.",
    lambda device, path, program: Program(device.load(path, program)),
)
TABLE.add(
    "stitch_program_destroy(stitch_program_t program)", "Unload a program.", lambda program: None
)
TABLE.add(
    "stitch_count_slots(stitch_program_t program, size_t *inputs, size_t *outputs)",
    "Set the numbers of inputs and outputs of a program.",
    count_slots,
)
TABLE.add(
    f"stitch_describe_input(stitch_program_t program, {_SLOT})",
    "Set name, data type and shape of an input. Name and shape are valid until the program is "
    "destroyed; `data` is NULL.",
    lambda program, index: program.slot(program.inputs, index), "name",
)  # fmt: skip
TABLE.add(
    f"stitch_describe_output(stitch_program_t program, {_SLOT})",
    "Set name, data type and shape of an output, as stitch_describe_input.",
    lambda program, index: program.slot(program.outputs, index), "name",
)  # fmt: skip
TABLE.add(
    "stitch_run(stitch_program_t program, const float *const *inputs, size_t n_inputs, "
    "float *const *outputs, size_t n_outputs)",
    "Run a program on float32 arrays in the order of its slots, whose shapes they have; outputs of "
    "other types are converted.",
    run,
)
TABLE.add(
    f"stitch_run_arrays(stitch_program_t program, {_ARRAYS})",
    "Run a program on arrays of any data type; outputs have the shapes and types of the slots.",
    lambda program, inputs, outputs: run_into(
        program.loaded, [name for name, _ in program.outputs], inputs, outputs
    ),
)

TABLE.section = "Pipelines: YAML files"
TABLE.add(
    "stitch_pipeline_from_yaml(stitch_device_t device, const char *path, stitch_pipeline_t *out)",
    "Read a pipeline file and prepare it on a device.",
    lambda device, path: Pipeline.from_yaml(path, device=device),
)
TABLE.add(
    f"stitch_run_pipeline(stitch_pipeline_t pipeline, {_ARRAYS})",
    "Run a pipeline on arrays in the order of its inputs and outputs.",
    lambda pipeline, inputs, outputs: run_into(pipeline, pipeline.output_names, inputs, outputs),
)
TABLE.add(
    "stitch_pipeline_destroy(stitch_pipeline_t pipeline)", "Release a pipeline.",
    lambda pipeline: pipeline.forget(),
)  # fmt: skip
