"""Control: operators whose body runs in rounds."""

from stitch.ops.control.scan import OPERATORS

__all__ = ["OPERATORS"]
