"""TTNN binaries of tt-mlir, read-only, as a `Binary`.

`field_history.py` knows the versions. The reader is loaded for the first such file.
"""

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand
from stitch.ttb.ttnn.file_format import is_ttnn

if TYPE_CHECKING:
    from stitch.ttb.ttnn.program_file import read_ttnn
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"program_file": "read_ttnn"})

__all__ = ["is_ttnn", "read_ttnn"]
