"""Control: operators whose body runs in rounds.

Comes in: states, sequences, a body. Goes out: the last states, and what each round gives.
"""

from stitch.ops.control.scan import OPERATORS

__all__ = ["OPERATORS"]
