"""ONNX Runtime: a session per program by `run`, the same bound, and one session of all programs.

Bound sessions read the input where it lies and write buffers that exist before; nothing is bound
anew from pass to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import onnxruntime

from peer_ways.cases import Case, Program, Way
from stitch.program import Array


def make_session(program: Program) -> Any:
    """A session over a program's model, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        program.onnx_model(), options, providers=["CPUExecutionProvider"]
    )


def bound_way(name: str, sessions: Sequence[Any], case: Case, stitched: bool) -> Way:
    """Sessions whose values lie at fixed places, each reading what the one before wrote."""
    value = onnxruntime.OrtValue.ortvalue_from_numpy(case.x)
    calls = []
    for session in sessions:
        binding = session.io_binding()
        binding.bind_ortvalue_input(session.get_inputs()[0].name, value)
        made = session.get_outputs()[0]
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty(made.shape, np.float32))
        binding.bind_ortvalue_output(made.name, value)
        calls.append((session.run_with_iobinding, binding))

    def run(result: Any) -> Any:
        for call, binding in calls:
            call(binding)
        return result

    return Way(name, run, value, lambda found: np.array(found.numpy()), stitched=stitched)


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """Three ways: unbound, bound, merged and bound.

    Each has sessions of its own: shared ones would lie in the caches when the second way begins.
    """
    named = [(s, s.get_inputs()[0].name) for s in map(make_session, case.programs)]

    def run(x: Array) -> Array:
        for session, name in named:
            (x,) = session.run(None, {name: x})
        return x

    apart = [make_session(program) for program in case.programs]
    merged = [make_session(case.merged)]
    return [
        Way("onnxruntime, a session each, run", run, case.x),
        bound_way("onnxruntime, a session each, bound", apart, case, True),
        bound_way("onnxruntime, merged, bound", merged, case, False),
    ]
