"""Options that several commands share, and how their values are written."""

from __future__ import annotations

from stitch.cli.parser import Option
from stitch.option_values import WIRE_FORM

SLOT_FORM = "SLOT: a name, an index, or MODULE.SLOT (MODULE: file without suffix, program, index)"
INPUT_FORM = (
    "[SLOT=]@file.npy, @file.npz (by name), [SLOT=]2x2xf32=1 2 3 4, [SLOT=]2x2xf32=@raw.bin; "
    + SLOT_FORM
)
OUTPUT_FORM = f"[SLOT=] before '' (ignore), - (print), @file.npy or @file.npz; {SLOT_FORM}"
EXPECTED_FORM = f"[SLOT=] before (ignored), @file.npy, @file.npz or 2x2xf32=1 2 3 4; {SLOT_FORM}"

FUNCTION_OPTION: Option = ("--function", {
    "action": "append", "default": [], "metavar": "NAME",
    "help": "the program of a module, by name or index; the k-th for the k-th module (default: "
    "the first program)"})  # fmt: skip
WIRE_OPTION: Option = ("--wire", {
    "action": "append", "default": [], "metavar": "A.Y=B.X",
    "help": f"connect slots by name instead of by position: {WIRE_FORM}"})  # fmt: skip
