"""What `tools/generate_schema` makes of `schema/program.fbs`: the one table that drives the file.

Comes in: nothing. Goes out: tables, unions, enums and the identifier, for `stitch.ttb` only.
"""

from stitch.ttb.generated.tables import (
    ENUMS,
    FILE_IDENTIFIER,
    ROOT,
    SCHEMA_SHA256,
    TABLES,
    UNIONS,
)

__all__ = ["ENUMS", "FILE_IDENTIFIER", "ROOT", "SCHEMA_SHA256", "TABLES", "UNIONS"]
