"""Files damaged at random: bits, bytes, words that break things, offsets that lead elsewhere."""

from __future__ import annotations

import random
import struct

#: Values that break things: extremes, signs, small counts, and offsets that point back.
NASTY = (0, 1, 2, 4, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4)


def damaged_bytes(draw: random.Random, sound: bytes, nbytes: int | None = None) -> bytearray:
    """A file with one to four changes to its first `nbytes` (all)."""
    file = bytearray(sound)
    nbytes = len(file) if nbytes is None else nbytes
    for _ in range(draw.randint(1, 4)):
        kind, at = draw.randrange(5), draw.randrange(nbytes)
        word = draw.randrange(nbytes // 4) * 4
        if kind == 0:
            file[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            file[at] = draw.randrange(256)
        elif kind == 2:
            struct.pack_into("<I", file, word, draw.choice(NASTY))
        elif kind == 3:
            near = struct.unpack_from("<I", file, word)[0] + draw.choice((-8, -4, -1, 1, 4, 8))
            struct.pack_into("<I", file, word, near % 2**32)
        else:
            source = draw.randrange(nbytes // 4) * 4
            file[word : word + 4] = file[source : source + 4]
    return file
