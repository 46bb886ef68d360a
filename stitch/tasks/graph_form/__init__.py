"""Task graphs as text: JSON that reads back, lines for people, a picture for `dot`.

The JSON form (version 1) is an object with `format` ("stitch.task_graph"), `version`, `name`,
`inputs` [{name, desc}], `programs` [{name, inputs [{name, desc, donate}], outputs [{name, desc}]}],
`functions` [{name, parameters [{name, permission}], returns [desc], writes, updates}], `tasks` and
`outputs` [{name, value}]. Values have numbers: the inputs 0, 1, ..., then the outputs of the tasks,
in order. A task has `inputs` and `outputs` (numbers) and one of `program` (a name), `function` (a
name; with `arguments` and `named`), `copy` (a desc) or `merged` (tasks over numbers of
their own, the inputs of the whole first; with `kept`). A desc is {shape, data_type, space} and,
where they are not plain, tile_shape, memory_layout, shard_spec, address. Programs and functions
are not in the text, only what they are known by: the reader is given them by name.
"""

from stitch.tasks.graph_form.agent_names import AgentNames
from stitch.tasks.graph_form.graph_picture import table_dot, table_text
from stitch.tasks.graph_form.graph_reader import table_from_json
from stitch.tasks.graph_form.graph_writer import table_as_json

__all__ = ["AgentNames", "table_as_json", "table_dot", "table_from_json", "table_text"]
