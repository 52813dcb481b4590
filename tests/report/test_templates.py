"""The templates of the pages: what they refuse, when they are loaded, and that they are shipped."""

from __future__ import annotations

import re
import tomllib
from html import unescape
from pathlib import Path

import jinja2
import pytest

from isotype.report.html import environment, render
from tests.processes import printed

ROOT = Path(__file__).parents[2]


def test_a_name_that_python_did_not_prepare_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match=r"'\w+' is undefined"):
        render("check.html.j2", style="", script="", title="")


def test_text_is_escaped_and_fit_for_xml_wherever_a_template_shows_it() -> None:
    macros = environment().get_template("macros.html.j2").module
    hostile = "<i>'\"&\x00_x"
    for name, arguments in (
        ("chip", (hostile,)),
        ("breakable", (hostile,)),
        ("pair_list", ([(hostile, hostile)],)),
        ("text_list", ([hostile], hostile)),
        ("policy_table", ([(hostile, hostile, hostile)],)),
        ("figures", ([(hostile, hostile, hostile)],)),
    ):
        shown = str(getattr(macros, name)(*arguments))
        assert "<i>" not in shown
        assert "\x00" not in shown
        assert "<i>'\"&\N{REPLACEMENT CHARACTER}_x" in unescape(shown.replace("<wbr>", ""))


def test_a_report_in_a_terminal_loads_no_templates() -> None:
    code = (
        "import sys; from tests.report.check_samples import crash; from isotype.report.check.html import to_html;"
        "report = crash(); str(report), report.to_json(), report.to_sarif(); print('jinja2' in sys.modules);"
        "to_html(report); print('jinja2' in sys.modules)"
    )
    assert printed(code).split() == ["False", "True"]


def test_every_file_of_the_package_is_shipped() -> None:
    """A wheel holds the modules and what `package-data` names; a template that is missing there is missed by users only."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package = ROOT / "src" / "isotype"
    patterns = content["tool"]["setuptools"]["package-data"]["isotype"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    others = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert sorted(others - shipped) == []
    assert {path.name for path in shipped} > {"base.html.j2", "check.html.j2", "run.html.j2", "check.js"}


def test_templates_hold_the_markup_and_python_none() -> None:
    folder = ROOT / "src" / "isotype" / "report"
    tagged = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(r"<(div|span|table|tr|td|dl|dt|ul|li|p|section|h[1-6]|code|svg|rect|circle)\b[^\n]*>", path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert tagged == set()
