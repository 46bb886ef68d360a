"""Texts are read alike by libyaml, and by PyYAML's own parser where that is not there."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from types import ModuleType

import pytest
import yaml

from stitch.errors import FormatError
from stitch.forms import nodes

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(file for file in (ROOT / "stitch").rglob("*.yaml"))
TEXTS = {
    "scalars": "a: 1\nb: 0x10\nc: 1e-5\nd: .inf\ne: yes\nf: ~\ng: '1e-5'\nh: \"\\u00e9\"\n",
    "dates": "a: 2001-01-01\nb: !!str 1e-5\n",
    "flow": "a: {b: [1, 2, {c: d}], e: f}\n# a remark\ng: [ ]\n",
    "blocks": "a: |\n  two\n  lines\nb: >-\n  folded\n  text\nc:\n- 1\n- - 2\n  - 3\n",
    "aliases": "a: &x {b: 1}\nc: *x\nd: [*x, *x]\n",
    "twice": "a: 1\nb: 2\na: 3\n",
    "tags": "a: !!python/name:os.system x\nb: !own 1\n",
    "keys": "? [a, b]\n: 1\nc: 2\n",
    "merge": "a: &x {b: 1}\nc:\n  <<: *x\n",
    "numbers": "a: 0b12\nb: 1_000\nc: 0o17\nd: 1:30\n",
    "nothing": "# no more\n",
    "open": "a: [\n",
    "closed": "a: ]\n",
    "tab": "a:\n\t- 1\n",
    "no alias": "a: *nowhere\n",
    "two": "a: 1\n---\nb: 2\n",
    "indented": "a: 1\n  b: 2\n",
    "quote": "a: 'never ends\n",
    "control": "a: \x01\n",
    "surrogate": "a: \ud800\n",
    "deep": "a: " + "[" * 40 + "]" * 40,
    "deeper": "a: " + "[" * 5000 + "]" * 5000,
    "deep blocks": "".join(f"{' ' * level}a:\n" for level in range(40)),
    "many": "a: [" + "1, " * 100_001 + "]",
    "laughs": "a: &a [x, x]\n" + "".join(
        f"{now}: &{now} [*{before}, *{before}]\n" for before, now in pairwise(ascii_lowercase)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def in_python() -> ModuleType:
    """The same module, as it is where PyYAML has no libyaml."""
    before = sys.modules.get("yaml.cyaml")
    sys.modules["yaml.cyaml"] = None  # type: ignore[assignment]  # so imports of it fail
    try:
        spec = importlib.util.spec_from_file_location("nodes_in_python", nodes.__file__)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        del sys.modules["yaml.cyaml"], sys.modules["nodes_in_python"]
        if before is not None:
            sys.modules["yaml.cyaml"] = before
    return module


def found(module: ModuleType, text: str) -> tuple[object, ...]:
    """What a text gives, or where and how it is refused: the words are the parser's."""
    try:
        node, log = module.read_yaml(text, "f.yaml")
    except FormatError as error:
        said = str(error).splitlines()[0]
        return ("not YAML", error.where) if said.startswith("not YAML") else (said, error.where)
    return repr(node), [(p.kind, p.where, p.detail) for p in log.problems]


def test_libyaml_reads_where_it_is(in_python: ModuleType) -> None:
    assert yaml.__with_libyaml__
    assert nodes._Loader.__mro__[-2].__module__ == "yaml._yaml"
    assert "yaml.scanner" in [kind.__module__ for kind in in_python._Loader.__mro__]


@pytest.mark.parametrize("name", TEXTS)
def test_both_parsers_find_the_same_in_a_text(name: str, in_python: ModuleType) -> None:
    assert found(nodes, TEXTS[name]) == found(in_python, TEXTS[name])


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_both_parsers_find_the_same_in_what_is_shipped(file: Path, in_python: ModuleType) -> None:
    text = file.read_text(encoding="utf-8")
    assert found(nodes, text) == found(in_python, text)
