"""MkDocs hook: adds pages from outside of docs/ to the site, and resolves links out of docs/.

In the repository a link may lead to any file. On the site, a link to a file that is not a page
becomes the file's name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_pages import filled

ROOT = Path(__file__).resolve().parent.parent
#: Files outside of docs/ that are pages of the site, under these names.
ADDED_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "overview.md",
    "examples/README.md": "examples.md",
    "schema/README.md": "format_versions.md",
}
#: A block of code, a link or code within a line, whichever begins first.
_LINK = re.compile(r"^```.*?^```|\[([^\]]*)\]\(([^)\s]+)\)|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    for source, page in ADDED_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in generated parts, and turn links between files into links between pages."""
    outside = {name: source for source, name in ADDED_PAGES.items()}
    source = outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {file.src_uri for file in files}
    return _LINK.sub(
        lambda link: _site_link(link, source, page.file.src_uri, pages), filled(markdown)
    )


def _site_link(link: re.Match[str], source: str, page: str, pages: set[str]) -> str:
    """The link of a page, whose file is `source`, as it is on the site."""
    text, target = link[1], link[2]
    if target is None:
        return link[0]
    path, mark, anchor = target.partition("#")
    if "://" in target or not path:
        return link[0]
    file = os.path.normpath(Path(source).parent / path)
    name = ADDED_PAGES.get(file, file.removeprefix("docs/"))
    if name == file or name not in pages:
        return text if file in text else f"{text} (`{file}`)"
    return f"[{text}]({os.path.relpath(name, Path(page).parent)}{mark}{anchor})"
