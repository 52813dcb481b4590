"""All code bases by name."""

from __future__ import annotations

from foreign_code.case import CodeBase
from foreign_code.language import LANGUAGE
from foreign_code.science import SCIENCE

CODE_BASES: dict[str, CodeBase] = {each.name: each for each in (*LANGUAGE, *SCIENCE)}
