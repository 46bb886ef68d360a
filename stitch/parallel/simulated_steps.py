"""The stages of a plan as they are compiled: a step of them simulated, and their memory.

A program is priced once for each machine, so further orders of devices only cost a simulation.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

from stitch.graph import ComputationGraph
from stitch.machine import Machine
from stitch.mesh import ParallelOptions, Step, Timeline, schedule, simulate
from stitch.parallel.costs import SegmentCosts
from stitch.parallel.plans import Plan
from stitch.parallel.stage_memory import StageMemory, types
from stitch.parallel.tensor_training import divided_stages
from stitch.program import InputKind, Space
from stitch.training import Stage, stages_of


def simulate_plan(plan: Plan) -> Timeline[Any]:
    """Simulate a step of a plan on its specification, with the times of its cost estimator.

    Each stage is one program, and each value crosses its link when it is ready. This is the
    estimate of plans that divide weights; that of others adds the costs of segments.
    """
    return PricedStages(plan.costs, plan.cuts, plan.degree, plan.axes).run(plan)


class PricedStages:
    """The stages of plans that differ in devices, replicas, schedule and micro-batches.

    Raises:
        CompileError: A weight cannot be divided so, or the graph cannot be cut so.
    """

    def __init__(
        self, costs: SegmentCosts, cuts: Sequence[str], degree: int = 1,
        axes: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.costs, self._divided = costs, None
        if degree > 1:
            chosen = ParallelOptions(tensor=degree, divide=axes or {})
            self._divided = divided = divided_stages(*costs.training, chosen)
            self._stages, self._places = divided.staged.stages, divided.devices
        else:
            self._stages = stages_of(*costs.training, cuts).stages
            self._places = tuple(range(len(self._stages)))
        self._seconds: dict[tuple[int, Machine], float] = {}

    # -- memory ------------------------------------------------------------------------------------

    @cached_property
    def _memory(self) -> list[tuple[StageMemory, list[Stage[ComputationGraph]]]]:
        """The memory of each device of a replica with divided weights, and its stages."""
        costs, found = self.costs, []
        for place in range(max(self._places) + 1):
            own = [s for s, home in zip(self._stages, self._places, strict=True) if home == place]
            memory = StageMemory(own, costs.graph, costs.spaces, costs.recompute, is_merged=False)
            found.append((memory, own))
        return found

    def needed(self, plan: Plan) -> list[tuple[str, Machine, dict[Space, int]]]:
        """Return what each device of a plan that divides weights needs, in bytes per bank."""
        return [
            (device, machine, memory.needed(0, len(own), machine, 1))
            for place, (memory, own) in enumerate(self._memory)
            for device, machine in zip(plan.devices(place), plan.machines[place], strict=True)
        ]

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan that divides weights fits its devices, as far as is known."""
        return all(
            nbytes <= machine.shape.space(space).capacity
            for _, machine, needed in self.needed(plan) for space, nbytes in needed.items()
        )  # fmt: skip

    def check_memory(self, plan: Plan) -> bool:
        """Return whether it fits, with the programs of devices for which that is not sure."""
        if not self.fits(plan):
            return False
        for (memory, own), machines in zip(self._memory, plan.machines, strict=True):
            for machine in dict.fromkeys(machines):
                if not memory.is_sure(0, len(own), machine, 1):
                    memory.compile(0, len(own), machine, own)
        return self.fits(plan)

    # -- seconds -----------------------------------------------------------------------------------

    def run(self, plan: Plan) -> Timeline[Any]:
        """Simulate a step."""
        specification, stages = plan.costs.specification, self._stages
        replicas, share = plan.replicas, plan.micro_batches // plan.replicas
        orders = (
            schedule(plan.schedule, len(stages), share) if self._divided is None
            else self._divided.schedule(share)
        )  # fmt: skip
        places = [plan.devices(place) for place in self._places]
        sizes = [
            {n: kind.nbytes for graph in (stage.forward, stage.backward) if graph
             for n, kind in types(graph).items()}
            for stage in stages
        ]  # fmt: skip
        homes = {p.name: k for k, each in enumerate(stages) for p in each.parameters}
        steps: dict[str, list[Step[Any]]] = {device: [] for device in specification.devices}
        passes: list[Hashable] = []

        def seconds(graph: ComputationGraph | None, device: str) -> float:
            machine = specification.devices[device].machine
            if graph is None:
                return 0.0
            key = id(graph), machine
            if key not in self._seconds:
                self._seconds[key] = plan.costs.graph_seconds(graph, machine, plan.costs.spaces)
            return self._seconds[key]

        for replica in range(replicas):
            for order in orders:
                for k, batch, is_backward in order:
                    stage, device = stages[k], places[k][replica]
                    passed = stage.returning if is_backward else stage.arriving
                    reads = [(replica, batch, is_backward, v.source, v.output) for v in passed]
                    graph = stage.backward if is_backward else stage.forward
                    taken = seconds(graph, device)
                    if is_backward and batch:
                        taken += seconds(stage.accumulation, device)
                    elif not is_backward:
                        taken += seconds(stage.loss, device)
                    made = {slot.name for slot in graph.outputs} if graph else set()
                    key = replica, batch, is_backward, k
                    makes = tuple([((*key, name), sizes[k][name]) for name in made])
                    steps[device].append(Step(key, taken, tuple(reads), makes))
                    passes.append(key)
        for k, stage in enumerate(stages):
            first, *others = places[k]
            gradients = [(p.gradient, p.type.nbytes) for p in stage.parameters]
            for replica, device in enumerate(others, 1):
                sums = tuple([((replica, name), nbytes) for name, nbytes in gradients])
                steps[device].append(Step(("sum", replica, k), 0.0, (), sums, tuple(passes)))
                added = seconds(stage.accumulation, first)
                read = tuple([value for value, _ in sums])
                steps[first].append(Step(("add", replica, k), added, read, (), tuple(passes)))
            taken = seconds(stage.squares, first) + seconds(stage.update, first)
            shared = tuple([(("new", p.name), p.type.nbytes) for p in stage.parameters])
            steps[first].append(Step(("update", k), taken, (), shared, tuple(passes)))
        for k, stage in enumerate(stages):
            parameters = {s.name for s in stage.forward.inputs if s.kind is InputKind.PARAMETER}
            for replica, device in enumerate(places[k]):
                names = sorted(name for name in parameters if replica or homes[name] != k)
                copies = tuple([("new", name) for name in names])
                steps[device].append(Step(("copies", replica, k), 0.0, copies))
        return simulate(steps, specification, plan.costs.movement)
