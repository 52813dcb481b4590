"""The code in README and docs runs as it stands; the commands, rooms, files and names in them exist."""

from __future__ import annotations

import ast
import functools
import io
import posixpath
import re
import subprocess
import sys
import textwrap
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tools.site_pages import BESIDE, moved, on_page_markdown

import isotype
from isotype import Damages, Ranges, rules
from isotype.checkpoint import checkpoint
from isotype.cli import main
from isotype.core import VERSION
from isotype.data.methods import METHODS
from isotype.planning import from_request
from isotype.precision import policy
from isotype.report.check import json
from isotype.report.run import record
from tests.checkpoint.test_gguf_export import byte_level, tiny, write_gguf
from tests.planning.conftest import by_formula

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "isotype"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted(set((ROOT / ".github").rglob("*.*")) - set(WORKFLOWS))
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
]
COMMANDS = {*METHODS, *main.COMMANDS, "demo"}


def _name(page: Path) -> str:
    return page.name


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A GGUF file like SmolLM2's with one layer of random weights."""
    path = tmp_path_factory.mktemp("embedded") / "small.gguf"
    write_gguf(tiny("llama", num_hidden_layers=1), byte_level(), path, "q8_0", "small")
    return path


_run_program = subprocess.run


def _here(command, *, check=False, **options):
    """`python -m isotype …` of a block in this process, as its result says: most of a process would be imports.

    Only the compiler of the loops is really run, if no other test has compiled them yet.
    """
    if Path(command[0]).name in ("c++", "g++", "clang++"):
        return _run_program(command, check=check, **options)
    assert command[:3] == [sys.executable, "-m", "isotype"]
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        status = main.main(command[3:])
    assert not (check and status), errors.getvalue()
    return subprocess.CompletedProcess(command, status, output.getvalue(), errors.getvalue())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", _here)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(block, folder, monkeypatch, small_model):
    """With a small model in the place of the real one, and a formula in the place of a plan's traces."""
    by_formula(monkeypatch)
    monkeypatch.setattr(checkpoint, "embedded_file", lambda name: small_model)
    _run(block)


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.id.startswith("README")])
def test_the_readme_runs_with_the_real_model(block, folder):
    _run(block)


def _run(block):
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", [*PAGES, *TEMPLATES], ids=_name)
def test_every_command_named_exists(page):
    named = set(re.findall(r"`isotype ([a-z]+)", page.read_text(encoding="utf-8")))
    # A method that does not exist is what the page on adding one is about.
    assert named <= COMMANDS | ({"orpo"} if page == ARCHITECTURE else set())


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_there_are_blocks_to_run():
    assert len(BLOCKS) >= 4


def _floors() -> dict[str, int]:
    """The floor of each room from the top down, as import-linter holds them; rooms of several wings can share one."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = [contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers"]
    return {room: floor for floor, layer in enumerate(layers) for room in layer.split(" | ")}


def test_the_page_lists_every_room_from_the_top_down_wing_by_wing():
    floors = _floors()
    assert set(floors) == {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    parts = ARCHITECTURE.read_text(encoding="utf-8").split("\n\n")
    wings = [re.findall(r"^(\w+)/(?:\w+/)? +", part, re.M) for part in parts]
    assert {name for wing in wings for name in wing} == set(floors)
    for wing in wings:
        assert wing == sorted(wing, key=floors.__getitem__)


NOT_HERE = {
    "src/isotype/rules/ist807_second_moment.py",
    "tests/rules/test_ist807.py",
    "trl/scripts/orpo.py",
    "cuda-sm75-torch2.13.json",
}
"""What the worked changes would add, another package's file, and a table that is still to be measured."""


@functools.cache
def _defined(file: Path) -> set[str]:
    """Names of a module's functions, classes, their methods and constants."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


@pytest.mark.parametrize("page", [ARCHITECTURE, ROOT / "CONTRIBUTING.md"], ids=_name)
def test_every_file_and_name_in_code_marks_exists(page):
    """`train/preflight/step_plan.py:plan_of` is a file of the package (or of the repository) and a name that it defines."""
    marks = re.findall(
        r"`([\w./-]+\.(?:py|json|toml|md|css|yaml))(?::(\w+))?`", page.read_text(encoding="utf-8")
    )
    missing = []
    for path, name in marks:
        file = next((root / path for root in (SOURCE, ROOT) if (root / path).is_file()), None)
        known = path in NOT_HERE or (file is not None and (not name or name in _defined(file)))
        missing += [] if known else [f"{path}:{name}"]
    assert len(marks) > 3
    assert not missing


@pytest.fixture
def rule_folder(tmp_path, monkeypatch):
    """A folder whose files are rules of isotype for one test."""
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])
    rules.all_rules.cache_clear()
    yield tmp_path
    rules.all_rules.cache_clear()
    for file in tmp_path.glob("ist*.py"):
        monkeypatch.delitem(sys.modules, f"{rules.__name__}.{file.stem}")


def test_the_worked_rule_does_what_its_test_says(rule_folder):
    blocks = re.findall(r"^ *```py\n(.*?)^ *```", ARCHITECTURE.read_text(encoding="utf-8"), re.S | re.M)
    rule, test = map(textwrap.dedent, blocks[:2])
    (rule_folder / "ist807_second_moment.py").write_text(rule, encoding="utf-8")
    names: dict[str, object] = {"__name__": "docs"}
    exec(compile(test, "test", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_") and callable(value)]
    assert len(tests) == 2
    for each in tests:
        each()


def test_pre_commit_runs_what_make_test_runs_before_the_tests():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0][
        "hooks"
    ]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^static:.*\n((?:\t.*\n)+)", makefile, re.M)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert [hook["entry"] for hook in hooks] == commands


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=_name)
def test_every_step_of_a_workflow_is_a_pinned_action_or_a_make_target(workflow):
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        rows = [*matrix.get("include", ()), *({"target": each} for each in matrix.get("target", ()))]
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
                continue
            make, target, *_ = step["run"].split()
            assert make == "make"
            targets = {row["target"] for row in rows} if target == '"$TARGET"' else {target}
            assert targets
            assert targets <= _targets()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_make_target_named_exists(page):
    named = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M))
    assert named <= _targets()


def _pages_of(nav):
    for entry in nav:
        for value in entry.values():
            yield from _pages_of(value) if isinstance(value, list) else [value]


def test_the_navigation_of_the_site_has_every_page_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(_pages_of(site["nav"])) == sorted(["rules/README.md", *(page.name for page in PAGES)])


def test_links_between_the_root_and_docs_stay_inside_of_the_site():
    assert (
        moved("[a](docs/plan.md#time) [b](CHANGELOG.md) `docs/`")
        == "[a](plan.md#time) [b](CHANGELOG.md) `docs/`"
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="plan.md"))
    rule = SimpleNamespace(file=SimpleNamespace(src_uri="rules/IST101.md"))
    assert on_page_markdown("[a](../README.md)", page) == "[a](README.md)"
    assert on_page_markdown("[a](../plan.md)", rule) == "[a](../plan.md)"


def test_every_link_of_the_site_leads_to_one_of_its_files():
    """As `make docs` checks with MkDocs: pages of docs/, and those that the hook adds beside them."""
    beside = [*sorted(ROOT.glob("*.md")), *(ROOT / name for name in BESIDE)]
    pages = {path.relative_to(ROOT).as_posix(): moved(path.read_text(encoding="utf-8")) for path in beside}
    for path in (ROOT / "docs").rglob("*.*"):
        uri = path.relative_to(ROOT / "docs").as_posix()
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
        text = path.read_text(encoding="utf-8") if path.suffix == ".md" else ""
        pages[uri] = on_page_markdown(text, page)
    broken = [
        (uri, link)
        for uri, text in pages.items()
        if uri.endswith(".md")
        for link in re.findall(r"\]\(([^)#\s]+)", re.sub(r"^```.*?^```|`[^`]*`", "", text, flags=re.M | re.S))
        if not link.startswith(("http", "mailto:"))
        and posixpath.normpath(posixpath.join(posixpath.dirname(uri), link)) not in pages
    ]
    assert broken == []


def test_the_reference_has_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: (\S+)\.(\w+)$", page, re.M)
    assert sorted(name for _, name in names) == sorted(isotype.__all__)
    for module, name in names:
        assert getattr(import_module(module), name) is getattr(isotype, name)


def test_one_version_stands_everywhere():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", changelog, re.M)
    assert newest
    assert {project["version"], citation["version"], newest[1]} == {VERSION}
    assert citation.get("date-released", "unreleased") == newest[2]


def test_the_page_on_file_versions_has_the_versions_that_are_written():
    page = (ROOT / "docs" / "deprecations.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (?:`|measured )([a-z_]+(?:\.json| check| plan)?).*?\| `(\w+)` \| (\d+)", page, re.M
    )
    assert [(name, key, int(number)) for name, key, number in rows] == [
        ("precision_policy.json", "format_version", policy.FORMAT_VERSION),
        ("run_report.json", "schema_version", record.SCHEMA_VERSION),
        ("isotype check", "schema_version", json.SCHEMA_VERSION),
        ("isotype plan", "schema_version", from_request.SCHEMA_VERSION),
        ("ranges", *Ranges.layout),
        ("damages", *Damages.layout),
    ]


@pytest.mark.parametrize("form", [each for each in TEMPLATES if each.suffix == ".yml"], ids=_name)
def test_issue_forms_are_whole(form):
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert content["name"]
    assert content["description"]
    identifiers = [field["id"] for field in content["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(field["attributes"]["label"] for field in content["body"])


@pytest.mark.parametrize("name", ["bug.yml", "finding.yml", "pull_request_template.md"])
def test_templates_ask_for_the_machine_and_a_report(name):
    (template,) = [each for each in TEMPLATES if each.name == name]
    text = template.read_text(encoding="utf-8")
    assert "isotype doctor" in text
    assert re.search(r"isotype check [^`]*--json", text)
