"""Whether a task graph can run: everything that is wrong with it, at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import islice

from stitch.errors import Problem, TaskError, UsageError
from stitch.program import TensorDesc, link_problem
from stitch.tasks.agents import CopyAgent, MergedAgent, ProgramAgent, TaskRow
from stitch.tasks.task_table import NamedValue, TaskTable

# --------------------------------------------------------------------------------------------------
# Dependencies between tasks, and cycles.


def producers_of(tasks: Sequence[TaskRow]) -> dict[int, int]:
    """The task that makes each value; what comes from outside has none."""
    return {number: i for i, task in enumerate(tasks) for number in task.outputs}


def edges_of(tasks: Sequence[TaskRow]) -> list[dict[int, bool]]:
    """For each task those that must have run before it, and whether a value passes between them.

    Takes time linear in what the tasks read.
    """
    producers = producers_of(tasks)
    consumed = {task.inputs[i] for task in tasks for i in task.gone if i < len(task.inputs)}
    readers: dict[int, list[int]] = {}
    before: list[dict[int, bool]] = []
    for index, task in enumerate(tasks):
        found: dict[int, bool] = {}
        if consumed:
            for i in task.gone:
                if i < len(task.inputs):
                    found |= dict.fromkeys(readers.get(task.inputs[i], ()), False)
            for number in task.inputs:
                if number in consumed:
                    readers.setdefault(number, []).append(index)
        for number in task.inputs:
            maker = producers.get(number)
            if maker is not None:
                found[maker] = True
        found.pop(index, None)
        before.append(found)
    return before


def cycle_of(before: Sequence[Collection[int]]) -> tuple[int, ...]:
    """Tasks that wait for each other in a circle; nothing where there is none."""
    try:
        TopologicalSorter(dict(enumerate(before))).prepare()
    except CycleError as error:
        return tuple(error.args[1][:-1])
    return ()


#: More than these are not worth listing.
MAX_PROBLEMS = 50
#: So many tasks of a circle are named.
MAX_NAMED = 20


def problems_of(table: TaskTable) -> tuple[Problem, ...]:
    """What keeps a graph from running, the first `MAX_PROBLEMS` of it."""
    return tuple(islice(_problems(table), MAX_PROBLEMS))


def check_table(table: TaskTable) -> TaskTable:
    """The table; raises one `TaskError` with everything that keeps it from running."""
    problems = problems_of(table)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        name = f" {table.name!r}" if table.name else ""
        raise TaskError(f"task graph{name} cannot run:{listed}")
    return table


def _problems(table: TaskTable) -> Iterator[Problem]:
    found = 0
    for problem in _own_problems(table):
        found += 1
        yield problem
    if not found:  # Only then are members of merged tasks where they say.
        flat = table.flattened()
        if flat is not table:
            yield from _own_problems(flat)


def _own_problems(table: TaskTable) -> Iterator[Problem]:
    yield from order_problems(table)
    descs = table.descs
    links: dict[tuple[int, int], str] = {}
    # Of many tasks, few differ in agent and values.
    sound: set[tuple[int, ...]] = set()
    is_sound = True
    for index, task in enumerate(table.tasks):
        agent, inputs, outputs = task
        try:
            described = [id(descs[number]) for number in inputs + outputs]
        except IndexError:  # Somebody reads or makes a value that is none.
            described = []
        key = (id(agent), len(inputs), *described)
        if key in sound:
            continue
        wrong = list(_signature(table, index, task, links))
        yield from wrong
        is_sound = is_sound and not wrong
        if described and not wrong:
            sound.add(key)
    if is_sound:  # What a merged task takes over can only be told where its members make sense.
        yield from _overwritten(table)


def run_problems(table: TaskTable) -> Iterator[Problem]:
    """What keeps a sound graph from being prepared on any device."""
    flat = table.flattened()
    if not flat.tasks:
        yield Problem("no_tasks", "tasks", "it has no task: graph.call(program, x) adds one")
        return
    read = {number for task in flat.tasks for number in task.inputs}
    made = {number for task in flat.tasks for number in task.outputs}
    for name, number in flat.inputs:
        if number not in read:
            yield Problem("unread_input", f"input {name!r}",
                          "no task reads it: leave it out, or add the task that does")  # fmt: skip
    for name, number in flat.outputs:
        if number not in made:
            yield Problem(
                "passed_input", f"output {name!r}", "it is one of the inputs, which no task makes: "
                "make it of a copy, graph.output(graph.copy(x, layout))",
            )  # fmt: skip


def check_can_run(table: TaskTable, title: str) -> None:
    """Raise `UsageError` with the first of the `run_problems` of a graph, which `title` names."""
    problem = next(run_problems(table), None)
    if problem is not None:
        raise UsageError(
            f"{title} cannot be prepared: {problem.where}: {problem.detail}",
            remedy="TaskGraph.validate() lists everything that keeps a graph from running",
        )  # fmt: skip


def order_problems(table: TaskTable) -> Iterator[Problem]:
    """Yield problems that do not depend on agents: names, undefined values, order."""
    yield from _names(table.inputs, "input")
    yield from _names(table.outputs, "output")
    if _is_in_order(table):
        return
    producers = producers_of(table.tasks)
    inputs = {value.value for value in table.inputs}
    yield from _unknown(table, producers, inputs)
    backward = list(_direction(table, producers))
    yield from backward
    if backward:
        circle = cycle_of(edges_of(table.tasks))
        if circle:
            names = [table.task_name(index) for index in (*circle, circle[0])]
            if len(names) > MAX_NAMED + 1:
                names[MAX_NAMED:-1] = [f"{len(names) - MAX_NAMED - 1} more"]
            yield Problem("cycle", names[0], f"tasks wait for each other: {' -> '.join(names)}")


def _is_in_order(table: TaskTable) -> bool:
    """Whether values are numbered in order, and read only after that: nothing is left to find."""
    known = len(table.inputs)
    if [value.value for value in table.inputs] != list(range(known)):
        return False
    for _, inputs, outputs in table.tasks:
        for number in inputs:
            if not 0 <= number < known:
                return False
        for number in outputs:
            if number != known:
                return False
            known += 1
    return all(0 <= value.value < known for value in table.outputs)


def agent_problems(task: TaskRow, where: str) -> Iterator[Problem]:
    """Inputs and outputs that are not as many as its agent has, members that make no sense."""
    agent = task.agent
    if len(task.inputs) != agent.takes:
        yield Problem("signature", where, f"it takes {agent.takes} inputs, not {len(task.inputs)}")
    if len(task.outputs) != agent.makes:
        yield Problem("signature", where, f"it makes {agent.makes} values, not {len(task.outputs)}")
    if type(agent) is MergedAgent:
        yield from _members(agent, where)


def _names(values: Iterable[NamedValue], side: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for i, value in enumerate(values):
        if not value.name or value.name in seen:
            why = f"another {side} has the name {value.name!r}" if value.name else "it has no name"
            yield Problem("bad_name", f"{side} {i}", why)
        seen.add(value.name)


def _unknown(table: TaskTable, producers: dict[int, int], inputs: set[int]) -> Iterator[Problem]:
    """Yield values without a producer."""
    for index, task in enumerate(table.tasks):
        for i, number in enumerate(task.inputs):
            if number not in producers and number not in inputs:
                yield Problem("unknown_value", _slot(table, index, i),
                              f"value {number} is no input, and no task makes it")  # fmt: skip
    for name, number in table.outputs:
        if number not in producers and number not in inputs:
            yield Problem("unknown_value", f"output {name!r}",
                          f"value {number} is no input, and no task makes it")  # fmt: skip


def _direction(table: TaskTable, producers: dict[int, int]) -> Iterator[Problem]:
    """Futures that do not point at an earlier task."""
    for index, task in enumerate(table.tasks):
        for i, number in enumerate(task.inputs):
            maker = producers.get(number, -1)
            if maker >= index:
                which = "itself" if maker == index else f"the later {table.task_name(maker)}"
                yield Problem("direction", _slot(table, index, i), f"it reads what {which} makes")


def _signature(
    table: TaskTable, index: int, task: TaskRow, links: dict[tuple[int, int], str]
) -> Iterator[Problem]:
    """Inputs and outputs that are not those of the agent."""
    agent, where = task.agent, table.task_name(index)
    wrong = list(agent_problems(task, where))
    yield from wrong
    if wrong:
        return
    known = range(len(table.descs))
    if any(number not in known for number in task.inputs):
        return
    if type(agent) is ProgramAgent:
        for i, (number, wanted) in enumerate(
            zip(task.inputs, agent.transformation.inputs, strict=True)
        ):
            given = table.descs[number]
            if given is wanted:
                continue
            key = id(given), id(wanted)
            if key not in links:
                links[key] = _misfit(given, wanted)
            if links[key]:
                yield Problem("shape_or_type", _slot(table, index, i), links[key])
    elif type(agent) is CopyAgent:
        shape = table.descs[task.inputs[0]].shape
        if shape != agent.desc.shape:
            what = f"a copy of shape {list(shape)} has not {list(agent.desc.shape)}"
            yield Problem("shape_or_type", where, what)
    made = agent.outputs([table.descs[number] for number in task.inputs])
    said = tuple([table.descs[n] if n in known else None for n in task.outputs])
    if made != said:
        shown = ", ".join("nothing" if desc is None else desc.text() for desc in said)
        yield Problem("signature", where,
                      f"it makes {', '.join(d.text() for d in made) or 'nothing'}, "
                      f"not {shown or 'nothing'}")  # fmt: skip


def _members(agent: MergedAgent, where: str) -> Iterator[Problem]:
    """Members that read what is not made before them, and outputs without a producer."""
    known = agent.takes
    for i, member in enumerate(agent.members):
        name = f"{where}, member {i} ({member.agent.name})"
        if type(member.agent) is MergedAgent:
            yield Problem("signature", name, "a member of a merged task is no merged task")
        if any(not 0 <= number < known for number in member.inputs):
            yield Problem("direction", name, f"it reads values {list(member.inputs)}, and "
                          f"{known} are known before it")  # fmt: skip
        else:
            yield from agent_problems(member, name)
        made = tuple(range(known, known + len(member.outputs)))
        if member.outputs != made:
            yield Problem(
                "signature", name, f"its outputs are {list(member.outputs)}, not {list(made)}"
            )
        known += len(made)
    if any(not 0 <= number < known for number in agent.kept):
        yield Problem("unknown_value", where, f"it keeps values {list(agent.kept)} of {known}")


def _misfit(given: TensorDesc, wanted: TensorDesc) -> str:
    problem = link_problem(given, wanted)
    return "" if problem is None else f"{problem[0]} ({given.text()} for {wanted.text()})"


def _overwritten(table: TaskTable) -> Iterator[Problem]:
    """Values that are read or overwritten after they are gone."""
    gone: dict[int, int] = {}
    consumed_by: dict[int, frozenset[int]] = {}
    for index, task in enumerate(table.tasks):
        consumes = consumed_by.get(id(task.agent))
        if consumes is None:
            consumes = consumed_by[id(task.agent)] = task.agent.consumes
        if gone:
            for i, number in enumerate(task.inputs):
                if number in gone:
                    again = "overwrites" if i in consumes else "reads"
                    kind = "write_after_write" if i in consumes else "read_after_overwrite"
                    yield Problem(kind, _slot(table, index, i), f"it {again} a value that "
                                  f"{table.task_name(gone[number])} has taken over")  # fmt: skip
        for i in consumes:
            if i < len(task.inputs):
                number = task.inputs[i]
                if task.inputs.count(number) > 1:
                    yield Problem("write_after_read", _slot(table, index, i),
                                  "it takes over a value that it reads beside that")  # fmt: skip
                gone.setdefault(number, index)
    for name, number in table.outputs:
        if number in gone:
            yield Problem("read_after_overwrite", f"output {name!r}",
                          f"{table.task_name(gone[number])} has taken its value over")  # fmt: skip


def _slot(table: TaskTable, index: int, i: int) -> str:
    return f"{table.task_name(index)}, {table.tasks[index].agent.input_name(i)!r}"
