"""Every overload that torch tags `core` is lowered, taken apart, given a key, or named here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stitch.frontend.torch.decompositions import decompositions
from stitch.frontend.torch.lowering import CHECKS, COMPLEX_LOWERINGS, KEYED, LOWERINGS

#: What torch runs, and why.
LEFT_TO_TORCH = {
    "aten.nonzero.default": "how many results it has depends on data",
    "aten.resize_.default": "it changes the size of memory that is not the graph's",
    "aten._cdist_forward.default": "no network of the zoo has distances of all pairs",
    "aten._pdist_forward.default": "no network of the zoo has distances of all pairs",
    "aten.atan2.out": "aot_autograd makes it atan2 and a copy; it is in no graph",
}


def core_overloads() -> Iterator[Any]:
    """The overloads of this torch that are tagged."""
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten":
            found = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            # torch takes composite operators apart by itself.
            is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
                name, "CompositeImplicitAutograd"
            )
            if found is not None and torch.Tag.core in found.tags and not is_composite:
                yield found


def test_every_core_overload_is_lowered_taken_apart_or_given_a_key() -> None:
    known = {*LOWERINGS, *COMPLEX_LOWERINGS, *decompositions(), *KEYED, *CHECKS}
    core = set(core_overloads())
    assert len(core) > 170
    missing = sorted(map(str, core - known))
    assert missing == sorted(LEFT_TO_TORCH), "the list is that of this test: see its reasons"
    print(f"core overloads run by own programs: {len(core & known)} of {len(core)}")


@pytest.mark.campaign("torch_compile")
def test_an_operator_that_comes_with_inductor_has_its_lowering_whoever_is_loaded_first() -> None:
    program = """
import torch, stitch
from stitch.frontend.torch.lowering import lowering_of
assert not hasattr(torch.ops.prims, "fma"), "inductor is loaded: nothing is shown"
import torch._inductor.lowering
print(lowering_of(torch.ops.prims.fma.default).__name__)
"""
    words = [sys.executable, "-W", "ignore", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "_multiply_add"
