"""Tasks: what is to be done, in which order, with which values; never where or how.

Words follow FlexFlow: an agent defines a task, a backend executes it. Task graphs are loaded when
they are asked for.
"""

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.tasks.task_sequence import SHORTEST, Cut, NumberedTask, TaskSequence, cuts_of
from stitch.tasks.transformation import Transformation, TransformationKind, transformation_of

if TYPE_CHECKING:
    from stitch.tasks.agents import (
        Agent,
        CopyAgent,
        HasProgram,
        MergedAgent,
        ProgramAgent,
        ProgramSource,
        TaskRow,
        program_agent,
    )
    from stitch.tasks.composition import aggregate, compose
    from stitch.tasks.future import OUTSIDE, Future, Task
    from stitch.tasks.host_calls import HostCall, InputPlace, OutputPlace, host_call
    from stitch.tasks.host_functions import Handle, HostFunction, Permission, host_function, task
    from stitch.tasks.task_graph import TaskGraph, tasks_without
    from stitch.tasks.task_table import NamedValue, TaskTable
    from stitch.tasks.validation import check_can_run, edges_of, problems_of
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "composition": "aggregate compose",
            "agents": "Agent CopyAgent HasProgram MergedAgent ProgramAgent ProgramSource TaskRow "
            "program_agent",
            "host_calls": "HostCall InputPlace OutputPlace host_call",
            "host_functions": "Handle HostFunction Permission host_function task",
            "future": "OUTSIDE Future Task",
            "task_graph": "TaskGraph tasks_without",
            "task_table": "NamedValue TaskTable",
            "validation": "check_can_run edges_of problems_of",
        },
    )

__all__ = [
    "OUTSIDE", "SHORTEST", "Agent", "CopyAgent", "Cut", "Future", "Handle", "HasProgram",
    "HostCall", "HostFunction", "InputPlace", "MergedAgent", "NamedValue", "NumberedTask",
    "OutputPlace", "Permission", "ProgramAgent", "ProgramSource", "TaskSequence", "Task",
    "TaskGraph", "TaskRow", "TaskTable", "Transformation", "TransformationKind", "aggregate",
    "check_can_run", "compose", "cuts_of", "edges_of", "host_call", "host_function", "problems_of",
    "program_agent", "task", "tasks_without", "transformation_of",
]  # fmt: skip
