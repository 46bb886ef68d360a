"""The documentation's generated parts (tools/site_pages.py), its API pages and its glossary."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import stitch
from stitch.cli.stitch_command import MAINS

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    page.relative_to(ROOT / "docs").as_posix(): page.read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md"))
}
MAX_TERMS = 40


def tool(name: str) -> ModuleType:
    """A module of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    return tool("site_pages")


def test_every_generated_part_is_on_a_page_and_every_mark_names_one(
    site_pages: ModuleType,
) -> None:
    marks = [name for page in PAGES.values() for name in site_pages.MARK.findall(page)]
    assert sorted(marks) == sorted(site_pages.PARTS)
    assert "<!-- generated" not in site_pages.filled(PAGES["reference/commands.md"])


@pytest.mark.parametrize("command", MAINS)
def test_the_page_of_commands_has_every_option_that_help_lists(
    site_pages: ModuleType, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = MAINS[command]
    assert main(["--help"]) == 0
    listed = set(re.findall(r"^  (?:-\w[^,]*, )?(--\w+)", capsys.readouterr().out, re.MULTILINE))
    assert "--debug" in listed
    text = site_pages.commands().partition(f"## {main.name}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| <code>(?:-\w, )?(--\w+)", text, re.MULTILINE)
    assert set(rows) == listed
    assert f"{main.name} " in text.partition("Examples:")[2]


def test_the_page_of_errors_has_every_error_and_exit_code_of_the_package(
    site_pages: ModuleType,
) -> None:
    text = site_pages.errors()
    for name in stitch.__all__:
        value = getattr(stitch, name)
        if isinstance(value, type) and issubclass(value, stitch.StitchError):
            assert re.search(rf"^\| `{name}` \|.*\| {value.exit_code} \|", text, re.MULTILINE), name
    assert re.findall(r"^\| (\d+) \|", site_pages.exit_codes(), re.MULTILINE)[:7] == list("0123456")


def test_the_page_of_the_python_api_has_every_name_that_stitch_exports() -> None:
    named = re.findall(r"^::: stitch\.(?:training\.)?(\w+)$", PAGES["reference/python.md"], re.M)
    assert sorted([*named, "__version__"]) == sorted(stitch.__all__)


def test_the_glossary_has_at_most_40_terms_and_each_is_used_on_another_page() -> None:
    terms = re.findall(r"^\| (?!term|-)([^|]+) \| [^|]+ \|$", PAGES["glossary.md"], re.MULTILINE)
    assert terms == sorted(terms, key=str.lower)
    assert 1 <= len(terms) <= MAX_TERMS
    others = "\n".join(
        text for name, text in PAGES.items() if not name.startswith(("glossary", "decisions/"))
    )
    text = re.sub(r"\s+", " ", others)
    unused = [t for t in terms if not re.search(rf"\b{t}s?\b", text, re.IGNORECASE)]
    assert unused == []


def test_the_picture_of_the_readme_is_what_its_command_draws() -> None:
    picture = tool("picture")
    assert picture.FILE == ROOT / "docs" / "images" / "stitch.svg"
    assert picture.picture() == picture.FILE.read_text(encoding="utf-8")
