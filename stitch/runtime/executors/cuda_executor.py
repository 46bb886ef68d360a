"""The CUDA executor: PyTorch's kernels on tensors of the memory where DRAM lies.

Device DRAM is one tensor of PyTorch (`TorchBytes`), on a CUDA card or, as a stand-in with the same
code, on the processor (`torch:cpu`). See `tensor_programs` for how programs are bound, and
`cuda_graphs` for how what they launch is captured. Needs the extra `torch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from stitch.errors import TaskError, UsageError
from stitch.linker import expanded
from stitch.machine import Machine, MachineShape, SpaceShape, footprint, load_machine
from stitch.memory import SpaceBytes
from stitch.option_values import INDUCTOR
from stitch.program import Program, Space
from stitch.runtime.executors.card import machine_of_card
from stitch.runtime.executors.cuda_graphs import CardGraphs, Graphs, with_graphs
from stitch.runtime.executors.executor import (
    Executor,
    PreparedProgram,
    ProgramBytes,
    Thunk,
    Workspace,
)
from stitch.runtime.executors.host import program_bytes
from stitch.runtime.executors.index_faults import IndexFaults
from stitch.runtime.executors.inductor_functions import check_compiler
from stitch.runtime.executors.tensor_programs import PreparedTensors
from stitch.runtime.executors.torch_bytes import TorchBytes


def torch_device_of(name: str) -> torch.device:
    """Return PyTorch's device of a name of `open_device`.

    Args:
        name: `torch:cpu`, or `cuda:0` with the number of a card.

    Raises:
        UsageError: There is no such device.

    >>> torch_device_of("torch:cpu")
    device(type='cpu')
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["torch:cpu", *(f"cuda:{i}" for i in range(found))]
    if name not in known:
        lacks_card = name.startswith("cuda:") and not found
        without = f": PyTorch {torch.__version__} finds no CUDA card" if lacks_card else ""
        remedy = (
            "install PyTorch for CUDA and the card's driver, or open 'torch:cpu', which runs the "
            "same code on the processor"
        )
        raise UsageError(
            f"there is no device {name!r}{without}",
            expected=" or ".join(known),
            remedy=remedy if lacks_card else None,
        )
    return torch.device("cpu" if name == "torch:cpu" else name)


class CudaExecutor(Executor):
    """Computes on tensors of a PyTorch device, in whose memory DRAM lies.

    Args:
        device: The device: a CUDA card, or the processor as a stand-in.
        tf32: Whether products may round their operands to TF32.
        inductor: Whether consecutive operations are functions that inductor compiles.

    Raises:
        UsageError: Inductor lacks a compiler for the device.
    """

    def __init__(
        self, device: torch.device, *, tf32: bool = False, inductor: bool = False
    ) -> None:  # fmt: skip
        if inductor:
            check_compiler(device)
        self.inductor = inductor
        self.device, self.precision = device, "tf32" if tf32 else "ieee"
        try:
            self.graphs = Graphs() if device.type == "cpu" else CardGraphs(device)
            self.graphs.finish()
            self.faults = IndexFaults(device)
        except RuntimeError as error:
            raise TaskError(
                f"{device} takes no work of this process: {str(error).partition(chr(10))[0]}",
                remedy="start another process: after an error in a kernel CUDA refuses everything",
            ) from error
        #: `torch:cpu` or `cuda:0`, as `make_executor` takes it.
        self.name = str(device) if device.type == "cuda" else f"torch:{device}"
        self.name += INDUCTOR if inductor else ""
        self.left_to_numpy: set[str] = set()
        self.captures = True
        self.place = f"PyTorch's device {str(device)!r}"

    def machine(self, described: Machine, max_memory: int | None) -> Machine:
        if self.device.type == "cpu" or described != load_machine("cuda"):
            return described
        free, _ = torch.cuda.mem_get_info(self.device)
        return machine_of_card(described, self.device, free, max_memory)

    def space_bytes(self, space: Space, shape: SpaceShape) -> SpaceBytes | None:
        if space is Space.HOST:
            return None
        nbytes = max(1, shape.banks * shape.limit)
        return TorchBytes(space, nbytes, self.device, self.graphs, self.faults)

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        self.check_foreign(program)
        return PreparedTensors(
            expanded(program), machine, self.device, self.left_to_numpy, self.precision,
            self.faults, inductor=self.inductor,
        )  # fmt: skip

    def captured(self, steps: Sequence[Sequence[Thunk]]) -> Sequence[Sequence[Thunk]] | None:
        with torch.inference_mode(False):
            done, errors = with_graphs(steps, self.graphs)
        captured = errors.count(None)
        self.graphs_captured += captured
        self.graphs_failed += len(errors) - captured
        return done if captured else None

    def left_to_host(self, program: Program, machine: MachineShape) -> tuple[str, ...]:
        device, found, whole = torch.device("meta"), set[str](), expanded(program)

        def region(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        inputs, outputs = (
            tuple([region(footprint(whole.values[s.value].desc, machine).nbytes) for s in slots])
            for slots in (whole.inputs, whole.outputs)
        )
        # Bound to tensors without memory.
        prepared = PreparedTensors(whole, machine, device, found, "ieee", IndexFaults(device))
        scratch = whole.scratch.size_per_bank * machine.space(whole.scratch.space).banks
        prepared.bind(inputs, outputs, region(scratch))
        return tuple(sorted(found))

    def finish(self) -> None:
        self.graphs.finish()
        self.faults.check()

    def is_lost(self) -> bool:
        # After an error of its context CUDA refuses everything.
        try:
            self.graphs.finish()
        except RuntimeError:
            return True
        return False

    def clock(self) -> float:
        self.graphs.finish()
        return perf_counter()

    # For runs that are completed after an interrupt.
    clock.is_repeatable = True  # type: ignore[attr-defined]

    def host_bytes(self, program: Program) -> ProgramBytes:
        return program_bytes(expanded(program))
