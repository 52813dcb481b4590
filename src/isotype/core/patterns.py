"""Validation of regular expressions from files and flags, before a library matches module names with them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping

from isotype.core.errors import Problem

_SECONDS = 5
_TRY = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    print(number, flush=True)
    for name in names:
        re.fullmatch(pattern, name), re.match(rf"(.*\\\\.)?({pattern})$", name)
"""
_NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.gate_up_proj", "lm_head")


def pattern_problems(
    patterns: Mapping[str, Iterable[str]], names: Collection[str] = _NAMES
) -> Iterator[Problem]:
    """Yield the problems of regular expressions (place -> expressions): invalid syntax, matching without end.

    Beginnings of `names` and names with one more letter are matched too, since failing matches are slowest.
    """
    slow: dict[str, str] = {}
    for place, each in patterns.items():
        for pattern in each:
            try:
                re.compile(pattern)
                if place.endswith("_pattern"):  # PEFT embeds it in this one
                    re.compile(rf"(.*\.)?({pattern})$")
            except (re.error, RecursionError, OverflowError) as error:
                yield Problem(f"{place} {pattern!r:.80}: {error}", "a regular expression", "correct it")
                continue
            if re.search(r"[*+{]", pattern):
                slow[pattern] = place
    parts = {name[: dot.start()] for name in names for dot in re.finditer(r"\.|$", name)}
    tried = [text for part in sorted(parts)[:400] for text in (part, f"{part}!")]
    command = [sys.executable, "-I", "-S", "-c", _TRY]  # only another process can be stopped during a match
    try:
        if slow:
            subprocess.run(
                command, input=json.dumps([list(slow), tried]).encode(), capture_output=True, timeout=_SECONDS
            )
    except subprocess.TimeoutExpired as late:
        pattern = list(slow)[int((late.stdout or b"0").split()[-1])]
        expected = f"one that names are matched by in less than {_SECONDS} seconds"
        yield Problem(
            f"{slow[pattern]} {pattern!r:.80}", expected, "leave out repeats of repeats, such as (.*)*"
        )
