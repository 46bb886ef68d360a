"""Stages of a training whose weights are divided among the devices of a group.

Each weight is one array outside, as in the training on one device, and one for each shard inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stitch.mesh.schedules import Action, Schedule
from stitch.program import Array, TensorDesc
from stitch.training import StagedGraphs


class Shards(NamedTuple):
    """The shards of a parameter: the axis along which it is divided, and their names."""

    axis: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DividedStages:
    """Stages of which several are on one device.

    Attributes:
        staged: The stages, in an order in which each follows those that it reads.
        devices: The number of the device of each stage.
        shards: The divided parameters by name.
    """

    staged: StagedGraphs
    devices: tuple[int, ...]
    shards: Mapping[str, Shards]

    def schedule(self, micro_batches: int) -> Schedule:
        """Return the order of actions of each device: micro-batches follow one another.

        All devices compute on one micro-batch, so that none waits for the values of an earlier one.
        """
        orders = []
        for device in range(max(self.devices) + 1):
            own = [stage for stage, home in enumerate(self.devices) if home == device]
            both_ways = [(stage, False) for stage in own]
            both_ways += [(stage, True) for stage in reversed(own)]
            orders.append(tuple([
                Action(stage, m, back) for m in range(micro_batches) for stage, back in both_ways
            ]))  # fmt: skip
        return tuple(orders)


class DividedSlots:
    """Parameters, states and gradients as whole arrays, and as the shards that devices have."""

    def __init__(self, shards: Mapping[str, Shards]) -> None:
        #: The parameter, the number of the shard, and all shards, by the name of a shard.
        self._places = {
            shard: (name, number, each)
            for name, each in shards.items() for number, shard in enumerate(each.names)
        }  # fmt: skip

    def _place(self, slot: str) -> tuple[str, int, Shards | None]:
        """Return the name of the whole of a slot of a stage (`{parameter}`, `{parameter}.m`)."""
        parameter = slot if slot in self._places else slot.rpartition(".")[0]
        if parameter not in self._places:
            return slot, 0, None
        name, number, shards = self._places[parameter]
        return f"{name}{slot[len(parameter) :]}", number, shards

    def whole(self, slot: str) -> str:
        """Return the name of the whole of a slot."""
        return self._place(slot)[0]

    def part(self, slot: str, wholes: Mapping[str, Array]) -> Array:
        """Return the array of a slot from those of the wholes; raise `KeyError` if it is missing.

        A state without axes is the same in all shards.
        """
        name, number, shards = self._place(slot)
        array = np.asarray(wholes[name])
        if shards is None or not array.ndim:
            return array
        return np.split(array, len(shards.names), shards.axis)[number]

    def joined(self, parts: Mapping[str, Array]) -> dict[str, Array]:
        """Return whole arrays from those of all slots."""
        found: dict[str, tuple[Shards | None, dict[int, Array]]] = {}
        for slot, array in parts.items():
            name, number, shards = self._place(slot)
            found.setdefault(name, (shards, {}))[1][number] = array
        return {
            name: arrays[0] if shards is None or not arrays[0].ndim
            else np.concatenate([arrays[i] for i in range(len(arrays))], shards.axis)
            for name, (shards, arrays) in found.items()
        }  # fmt: skip

    def descs(self, parts: Mapping[str, TensorDesc]) -> dict[str, TensorDesc]:
        """Return the descriptions of whole arrays from those of all slots."""
        found = {}
        for slot, desc in parts.items():
            name, _, shards = self._place(slot)
            shape = list(desc.shape)
            if shards is not None and shape:
                shape[shards.axis] *= len(shards.names)
            found[name] = replace(desc, shape=tuple(shape))
        return found
