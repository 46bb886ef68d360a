"""`Differentiated`: a forward graph that saves, its backward graph, and how their slots belong."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.graph import ComputationGraph


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A forward graph and its backward graph, and which slots belong together.

    Inputs of `backward` carry the names of the forward slots that they are: inputs keep theirs,
    `saved` are outputs of `forward`. `seeds` pairs forward outputs with the backward inputs for
    their gradients; `gradients` pairs forward inputs with the backward outputs.
    """

    forward: ComputationGraph
    backward: ComputationGraph
    saved: tuple[str, ...]
    seeds: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
