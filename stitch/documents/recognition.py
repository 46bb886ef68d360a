"""Recognise the kind of a YAML file: the one that knows most of its keys.

A new kind of file is one more line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from stitch.files import read_text
from stitch.forms import read_yaml

PIPELINE, MODULE, MACHINE = "pipeline", "module", "machine"


def _keys_of_forms() -> dict[str, Iterable[str]]:
    """Every form and its keys; what reads them is loaded when there is a file to recognize."""
    from stitch.documents.pipeline_form import PIPELINE_KEYS
    from stitch.frontend import MODULE_KEYS
    from stitch.machine import MACHINE_KEYS

    return {PIPELINE: PIPELINE_KEYS, MODULE: MODULE_KEYS, MACHINE: MACHINE_KEYS}


def form_of(path: str | Path, otherwise: str = PIPELINE) -> str:
    """The form of a file; `otherwise` where none knows more keys, or nothing can be read.

    Raises `FormatError` for a text that is no YAML.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError):
        return otherwise  # Its reader says what is wrong with the file.
    return form_of_text(text, Path(path).name, otherwise)


def form_of_text(text: str, file: str, otherwise: str = PIPELINE) -> str:
    """The form of a text.

    >>> form_of_text("name: x\\ninputs: {}\\noperations: []", "a.yaml")
    'module'
    """
    root, _ = read_yaml(text, file)
    keys = set(root.data) if isinstance(root.data, Mapping) else set()
    forms = _keys_of_forms()
    return max(forms, key=lambda form: (len(keys & set(forms[form])), form == otherwise))
