"""The hook by which MkDocs builds the site: pages of the repository's root beside those of docs/.

`make docs` runs MkDocs with mkdocs.yml, which names this file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BESIDE = ("benchmarks/NOTES.md", "benchmarks/results.jsonl", "LICENSE")
"""What pages link to outside of docs/, beside the pages in the root."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root; `README.md` is the home page."""
    from mkdocs.structure.files import File

    for path in [*sorted(ROOT.glob("*.md")), *(ROOT / name for name in BESIDE)]:
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=moved(text) if name.endswith(".md") else text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page of docs/ to the root stay inside of the site."""
    return markdown if "/" in page.file.src_uri else re.sub(r"\]\(\.\./", "](", markdown)


def moved(text: str) -> str:
    """A page from outside of docs/ with links as they are from its folder of the site, whose root docs/ becomes."""
    return re.sub(r"\]\((\.\./)?docs/", r"](\1", text)
