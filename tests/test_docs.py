"""The code in README and docs runs as it stands, and the commands in them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isotype.cli.main import TRAINING

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
]
COMMANDS = {*TRAINING, "demo", "doctor", "merge", "chat", "check", "run", "inspect", "explain", "completion"}


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_named_exists(page):
    named = set(re.findall(r"`isotype ([a-z]+)", page.read_text(encoding="utf-8")))
    assert named <= COMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_there_are_blocks_to_run():
    assert len(BLOCKS) >= 4
