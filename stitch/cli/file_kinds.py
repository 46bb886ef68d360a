"""What kinds of files the commands write, and which of them an existing file is.

Comes in: a path. Goes out: the name of a kind. Must not know: why it is asked.
"""

from __future__ import annotations

import re
from pathlib import Path

from stitch.files import head_of
from stitch.ttb import recognize

TTB = "a .ttb module"
NPY = "a NumPy array (.npy)"
NPZ = "NumPy arrays (.npz)"
SAFETENSORS = "a safetensors file"
RESULT = "the results of a run"
LINES = "the results of a training"
TRACE = "a Chrome trace"
RECORD = "a record of a run"
JSON = "JSON text"
TEXT = "text (YAML, source code, ...)"
#: By suffix; what has no form of its own is told from other files only.
_PICTURES = {
    "png": "a PNG image", "jpg": "a JPEG image", "jpeg": "a JPEG image", "pdf": "a PDF document",
    "svg": "an SVG image", "svgz": "gzip-compressed data", "gif": "a GIF image",
    "eps": "PostScript", "ps": "PostScript", "tif": "a TIFF image", "tiff": "a TIFF image",
    "webp": "a WebP image", "pgf": "a PGF picture",
}  # fmt: skip
_RAW = "data of an unknown kind"

_HEAD_NBYTES = 4096
_FORMS = (
    (RESULT, rb'\s*\{\s*"result":'),
    (TRACE, rb'\s*\{\s*"traceEvents":'),
    (RECORD, rb'\s*\{\s*"stitch":\s*"run"'),
    (LINES, rb'\{"kind": "(?:step|epoch|final)"'),
    (TTB, rb"(?s:.{8})STCH"),
    # A zip archive whose first member is an array, or that has none.
    (NPZ, rb"(?s:PK\x03\x04.{26}[^\0]{0,200}?\.npy|PK\x05\x06)"),
    ("an SVG image", rb"(?s:<\?xml.{0,500}?<svg|<!DOCTYPE svg|<svg|<\?xml.{0,200}?DOCTYPE svg)"),
    ("PostScript", rb"%!PS"),
    ("a TIFF image", rb"II\*\0|MM\0\*"),
    ("a WebP image", rb"(?s:RIFF.{4}WEBP)"),
    ("a PGF picture", rb"%% Creator: Matplotlib, PGF"),
)
_KINDS = tuple((name, re.compile(form)) for name, form in _FORMS)


def picture_kind(path: str | Path) -> str:
    """The kind of a picture, by the suffix of its file.

    >>> picture_kind("loss.png")
    'a PNG image'
    """
    return _PICTURES.get(Path(path).suffix.lower().removeprefix("."), _RAW)


def array_kind(path: str | Path) -> str:
    """`.npz` or `.npy`."""
    return NPZ if Path(path).suffix.lower() == ".npz" else NPY


def model_kind(path: str | Path) -> str:
    """`.safetensors` or `.ttb`."""
    return SAFETENSORS if Path(path).suffix.lower() == ".safetensors" else TTB


def kind_of_file(path: Path) -> str | None:
    """The kind of a regular file, None for an empty one; raises `OSError`."""
    head = head_of(path, _HEAD_NBYTES)
    if not head:
        return None
    for name, form in _KINDS:
        if form.match(head):
            return name
    return recognize(head, path.stat().st_size)[0]
