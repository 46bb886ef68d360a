"""The function that calls programs and torch's operators one after the other, written out.

Comes in: the steps of a graph that was cut, and what runs its parts. Goes out: a boxed function of
the graph's arguments: straight-line code in which every operator is the function that torch binds
to its overload, and every value is let go of after its last reader. The names of values are
generated, objects reach the text as arguments, and so do the names of keywords that are no
identifiers. Must not know: devices, why a node is torch's.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from stitch.frontend.torch.compile.graph_cut import GraphPart, Step
from stitch.frontend.torch.compile.graph_outputs import restrided, storage_of, unusual_strides
from stitch.frontend.torch.compile.graph_program import boxed
from stitch.frontend.torch.compile.symbolic_sizes import has_symbols

#: The name of the file in which tracebacks show the code.
FILE = "<stitched graph>"


class OuterGraph:
    """Writes the function of one graph. `is_backward`: other programs may have made what it is
    given."""

    def __init__(self, module: Any, *, is_backward: bool) -> None:
        self._module, self._is_backward = module, is_backward
        #: The statements, each with the names that it reads.
        self._lines: list[tuple[str, set[str]]] = []
        self._read: set[str] = set()
        self._objects: list[Any] = []
        #: The names of values, of those that programs make, and of those in promised strides.
        self._names: dict[Any, str] = {}
        self._of_programs: set[Any] = set()
        self._promised: dict[Any, str] = {}

    def run(self, steps: Sequence[Step], runs: Sequence[Any]) -> Any:
        """The function; `runs` are those of the parts among the steps, in their order."""
        nodes = list(self._module.graph.nodes)
        given = [self._named(node) for node in nodes if node.op == "placeholder"]
        if given:
            self._say(f"{', '.join(given)}, = arguments")
        self._say("arguments.clear()")
        rest = iter(runs)
        for step in steps:
            if isinstance(step, GraphPart):
                self._call_part(step, next(rest))
            else:
                self._call(step, promised=True)
        results = self._text(list(nodes[-1].args[0]), promised=False)
        self._say(f"return {results}")
        names = ", ".join(f"c{number}" for number in range(len(self._objects)))
        body = "".join(f"        {line}\n" for line in self._with_ends())
        text = f"def bind({names}):\n    def run(arguments):\n{body}    return run\n"
        made: dict[str, Any] = {}
        exec(compile(text, FILE, "exec"), made)
        return boxed(made["bind"](*self._objects))

    # -- statements --------------------------------------------------------------------------------

    def _call_part(self, part: GraphPart, run: Any) -> None:
        if not part.outputs:
            return
        inputs = self._text(list(part.inputs), promised=False)
        results = [self._named(node) for node in part.outputs]
        self._of_programs.update(part.outputs)
        self._say(f"{', '.join(results)}, = {self._object(run)}({inputs})")

    def _call(self, node: Any, *, promised: bool) -> None:
        target = node.target
        if node.op == "get_attr":
            self._names[node] = self._object(attrgetter(target)(self._module))
            return
        # What calls it is a function in Python that does no more.
        if type(target) is torch._ops.OpOverload:
            target = target._op
        operands = [self._text(value, promised=promised) for value in node.args]
        for name, value in node.kwargs.items():
            text = self._text(value, promised=promised)
            if name.isidentifier() and not keyword.iskeyword(name):
                operands.append(f"{name}={text}")
            else:
                operands.append(f"**{{{self._object(name)}: {text}}}")
        if target is operator.getitem:
            call = f"{operands[0]}[{operands[1]}]"
        else:
            call = f"{self._object(target)}({', '.join(operands)})"
        self._say(f"{self._named(node)} = {call}")

    def _say(self, line: str) -> None:
        """A statement, which reads what was named since the last."""
        self._lines.append((line, self._read))
        self._read = set()

    def _with_ends(self) -> list[str]:
        """The statements, each followed by the end of what nobody reads after it."""
        last = {name: at for at, (_, read) in enumerate(self._lines) for name in read}
        lines: list[str] = []
        for at, (line, read) in enumerate(self._lines):
            lines.append(line)
            gone = sorted(name for name in read if last[name] == at)
            if gone and not line.startswith("return"):
                lines.append(f"del {', '.join(gone)}")
        return lines

    # -- values ------------------------------------------------------------------------------------

    def _named(self, node: Any) -> str:
        """The name of what a statement gives from here on; it ends there if nobody reads it."""
        name = self._names[node] = f"v{len(self._names)}"
        self._read.add(name)
        return name

    def _object(self, value: Any) -> str:
        self._objects.append(value)
        return f"c{len(self._objects) - 1}"

    def _text(self, value: Any, *, promised: bool) -> str:
        """An operand; `promised`: as torch's operators read it."""
        if isinstance(value, torch.fx.Node):
            return self._as_promised(value) if promised else self._name(value)
        if isinstance(value, list | tuple):
            items = [self._text(item, promised=promised) for item in value]
            if isinstance(value, list):
                return f"[{', '.join(items)}]"
            return f"({''.join(f'{item}, ' for item in items)})"
        if isinstance(value, Mapping):
            pairs = [f"{self._object(k)}: {self._text(v, promised=promised)}"
                     for k, v in value.items()]  # fmt: skip
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            ends = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._text(end, promised=promised) for end in ends)})"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._object(value)

    def _name(self, node: Any) -> str:
        if node not in self._names:
            # Constants, and what is made of nothing, come into being where they are read: before
            # the statement that is being written.
            read, self._read = self._read, set()
            self._call(node, promised=False)
            self._read = read
        name = self._names[node]
        if name.startswith("v"):
            self._read.add(name)
        return name

    def _as_promised(self, node: Any) -> str:
        """A value in the strides that torch's operators were traced with."""
        name = self._name(node)
        if not self._may_differ(node):
            return name
        if node not in self._promised:
            read, self._read = self._read, {name}
            strides = self._object(tuple(node.meta["val"].stride()))
            made = self._promised[node] = f"p{len(self._promised)}"
            self._read.add(made)
            self._say(f"{made} = {self._object(restrided)}({name}, {strides})")
            self._read = read
        self._read.discard(name)
        self._read.add(self._promised[node])
        return self._promised[node]

    def _may_differ(self, node: Any) -> bool:
        kind = node.meta.get("val")
        if storage_of(node) is None or has_symbols(kind) or kind.is_contiguous():
            return False
        if node.op == "placeholder":
            # A program of the forward pass may have made it, which promises no strides.
            return self._is_backward
        return node in self._of_programs and unusual_strides(kind) is None
