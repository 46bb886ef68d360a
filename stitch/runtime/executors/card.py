"""A card as a machine: its own memory, and the rates of its paths as measured."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from time import perf_counter

import torch

from stitch.machine import Machine, Path
from stitch.program import Space

#: The part of the free memory that a device takes; the rest stays for PyTorch. JAX allocates the
#: same part (its page "GPU memory allocation").
PART_OF_FREE = 0.75
#: Bytes of a copy that is timed for its rate; a copy of few bytes is timed for its latency.
LARGE_NBYTES, SMALL_NBYTES = 32 << 20, 64
ROUNDS = 3


def machine_of_card(
    machine: Machine, device: torch.device, free_nbytes: int, max_memory: int | None
) -> Machine:
    """Return the machine `cuda` with the DRAM of a card that is free and the rates of its copies.

    Args:
        machine: The machine `cuda`.
        device: The card.
        free_nbytes: Its free memory.
        max_memory: A limit in bytes.

    >>> from stitch.machine import load_machine
    >>> machine_of_card(load_machine("cuda"), torch.device("cpu"), 1 << 30, None).shape.dram.limit
    805306368
    """
    dram = machine.shape.dram
    assert dram is not None, "the machine cuda has DRAM"
    nbytes = int(PART_OF_FREE * free_nbytes)
    nbytes = nbytes if max_memory is None else min(nbytes, max_memory)
    limit = nbytes // dram.granule * dram.granule
    paths = dict(_paths(device))
    return replace(
        machine,
        shape=replace(machine.shape, dram=replace(dram, limit=limit)),
        paths=tuple([(a, b, paths.get((a, b), path)) for a, b, path in machine.paths]),
    )


@cache
def _paths(device: torch.device) -> tuple[tuple[tuple[Space, Space], Path], ...]:
    """Return the paths to, from and in a device's memory, as copies of pinned memory take."""
    is_card = device.type == "cuda"
    host = torch.empty(LARGE_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=is_card)
    here, there = (torch.empty(LARGE_NBYTES, dtype=torch.uint8, device=device) for _ in range(2))
    ends = {
        (Space.HOST, Space.DRAM): (here, host),
        (Space.DRAM, Space.HOST): (host, here),
        (Space.DRAM, Space.DRAM): (there, here),
    }
    found = []
    for spaces, (target, source) in ends.items():
        latency, whole = (
            min(_seconds(target[:nbytes], source[:nbytes], device) for _ in range(ROUNDS))
            for nbytes in (SMALL_NBYTES, LARGE_NBYTES)
        )
        rate = LARGE_NBYTES / max(whole - latency, 1e-9)
        found.append((spaces, Path(latency, ((1, rate),))))
    return tuple(found)


def _seconds(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """Return the time of a copy until it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    target.copy_(source)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start
