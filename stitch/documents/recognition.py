"""Recognize the kind of a YAML file by its keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stitch.files import read_text
from stitch.forms import read_yaml

PIPELINE, MODULE, MACHINE = "pipeline", "module", "machine"


def kind_of(path: str | Path, default: str = PIPELINE) -> str:
    """Return the kind that knows most keys of a file; `default` for none or an unreadable file.

    Raises `FormatError` for text that is not YAML.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError):
        return default  # The reader of that kind reports the error.
    # The readers are imported when there is a file to recognize.
    from stitch.documents.pipeline_form import PIPELINE_KEYS
    from stitch.frontend import MODULE_KEYS
    from stitch.machine import MACHINE_KEYS

    kinds = {PIPELINE: PIPELINE_KEYS, MODULE: MODULE_KEYS, MACHINE: MACHINE_KEYS}
    root, _ = read_yaml(text, Path(path).name)
    keys = set(root.data) if isinstance(root.data, Mapping) else set()
    return max(kinds, key=lambda kind: (len(keys & set(kinds[kind])), kind == default))
