"""What a user function is, so that what was traced of it is used again only where that is right.

Comes in: functions, what they are given beside elements. Goes out: their meaning, equal only for
functions that do the same, or why nothing can be said. A meaning is read anew at each call: code,
defaults, and all that is closed over, down to the bytes of arrays. Must not know: functions over
nests, graphs beyond their values.
"""

from stitch.fractal.meanings.array_contents import CONTENTS, ArrayContents
from stitch.fractal.meanings.function_meanings import Meaning, MeaningReader, UnreadableError

__all__ = ["CONTENTS", "ArrayContents", "Meaning", "MeaningReader", "UnreadableError"]
