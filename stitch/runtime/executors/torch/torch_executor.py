"""The torch executor: as the automatic one, with PyTorch's kernels beside NumPy's.

Comes in: a program. Goes out: its prepared form, each operation by ATen, NumPy or ONNX Runtime,
where each is fastest (`division`). It imports torch, which takes seconds and some 200 MiB; a
process that has it already pays nothing.
"""

from __future__ import annotations

import torch

from stitch.runtime.executors.automatic import AutomaticExecutor
from stitch.runtime.executors.torch.aten_kernels import AtenKernels


class TorchExecutor(AutomaticExecutor):
    """Chooses among PyTorch's kernels too, on as many threads as `torch.set_num_threads` said.

    ONNX Runtime, which gets little here, has one: its threads would wait in loops for their next
    call, on the cores on which PyTorch's then run.
    """

    name = "torch"

    def __init__(self) -> None:
        super().__init__(1)
        self.library = AtenKernels(torch.get_num_threads())
