"""The `.ttb` file: programs to bytes and back; the only room that knows flatbuffers.

Comes in: `Binary`, or whatever bytes a caller hands over. Goes out: the same bytes for the same
binary, or a `Binary` whose constants are mapped, or a `FormatError` with every defect. Must not
know: operators, devices, plans. The format is specified in `envelope.py` and `docs/format.md`.
Files of others are read by the same verifier (`foreign.py`): `.ttnn` as a `Binary`, `.ttsys` as
machines.
"""

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.ttb.binary import CURRENT, FEATURES, OPSET, Binary, Origin, TensorLife, Version
from stitch.ttb.envelope import metadata_crc32, metadata_nbytes, recognize
from stitch.ttb.file import (
    SOURCE,
    FileSizes,
    ProgramSize,
    content_of,
    encode,
    inspect_sizes,
    load,
    save,
)

if TYPE_CHECKING:
    from stitch.ttb.system_machines import Chip, System, load_system
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"system_machines": "Chip System load_system"})

__all__ = [
    "CURRENT", "FEATURES", "OPSET", "SOURCE", "Binary", "Chip", "FileSizes", "Origin",
    "ProgramSize", "System", "TensorLife", "Version", "content_of", "encode", "inspect_sizes",
    "load", "load_system", "metadata_crc32", "metadata_nbytes", "recognize", "save",
]  # fmt: skip
