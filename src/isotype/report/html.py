"""Pages by Jinja2 templates, and what more than one of them needs.

The templates hold the markup, Python prepares what stands in it: text, numbers as text, lists of them. Every text is
escaped unless a template says `safe`, which is for the package's own files and for what `report.charts` has drawn.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.errors import SaveError
from isotype.core.files import write_whole
from isotype.report.charts import xml_text
from isotype.report.palette import dtype_class

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **content: object) -> str:
    """A page of `report/templates` with its content.

    Raises:
        jinja2.UndefinedError: the template names something that the content lacks.
    """
    return _environment().get_template(template).render(content)


def package_file(name: str) -> str:
    """The text of a style sheet or script of this package, `"style.css"`."""
    return resources.files("isotype.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    # Only pages need it: a report in a terminal starts without.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("isotype.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_fit,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.filters |= {"digest": _digest, "joints": _joints, "dtype_class": dtype_class}
    return environment


def _fit(value: Any) -> Any:
    # Markup is a `str` of its own type: what lies in it has been here before.
    return xml_text(value) if type(value) is str else value


def _digest(text: str) -> str:
    """What a content security policy knows a style sheet or script by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _joints(text: str) -> list[str]:
    """Text in pieces that end behind the joints of its words (`_ / = , . : -`), where a line may break."""
    return re.split(r"(?<=[_/=,.:-])(?=[^\s\d])", text)


def write_report(path: Path, text: str) -> Path:
    """Write a report whole, in a folder that is made if need be.

    Raises:
        SaveError: the file cannot be written; a former one is untouched.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, text)
    except OSError as error:
        what = f"{path}: {error.strerror or error}"
        expected = "a path that can be written to, with room for the report"
        raise SaveError.of(
            "the report could not be written",
            what,
            expected,
            "free the path or give another one",
        ) from error
