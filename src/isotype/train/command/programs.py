"""Finds the training in a command line of another program, such as `accelerate launch -m axolotl.cli.train FILE`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from isotype.core.arguments import separated
from isotype.core.errors import Problem, UsageError
from isotype.data.methods import METHODS, SAME_METHODS

LAUNCHERS = ("python", "python3", "accelerate", "torchrun", "deepspeed")
"""Commands that start a Python script."""
TRAINERS = ("axolotl", "llamafactory-cli", "swift", "trl")
"""Commands of other programs that train."""
_MODULES = {"llamafactory": "llamafactory-cli"} | {name: name for name in (*TRAINERS, "isotype")}
_NAMING = ("axolotl", "llamafactory-cli")
"""Programs whose files or flags name the method."""
_COUNTS = ("--num_processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus")


def refuse_program(words: Sequence[str]) -> None:
    """Raise UsageError if `words` begin with another program. The fix is isotype's command for the same training."""
    line = separated(words)
    start = next((at for at, word in enumerate(line) if not re.match(r"[A-Z_]+=", word)), len(line))
    named = line[start] if line[start + 1 :] else ""  # a single word may be a model
    if named not in (*LAUNCHERS, *TRAINERS, "isotype"):
        return
    expected = "MODEL, or a training command of isotype"
    problem = Problem(named, expected, "begin with the method; isotype run starts a Python script")
    for at, (word, after) in enumerate(pairwise(line[start:]), start):
        module = after.partition(".")[0] if word == "-m" else None
        trains = _MODULES.get(module) if module else Path(word).name in _MODULES and Path(word).name
        if trains:
            end, kept = _kept(line, at + 1 + (word == "-m"), trains)
            counts = [count for name, count in pairwise(line[:at]) if name in _COUNTS and count.isdigit()]
            devices = ("--devices", counts[0]) if counts else ()
            fix = "remove it; --devices N sets the number of processes"
            swap = (tuple(line[:end]), (*kept, *devices)) if kept or trains in _NAMING else None
            problem = Problem(" ".join(line[:end]), expected, fix, swap)
            break
        if named in LAUNCHERS and (module or after.endswith(".py")):
            end = at + (word != "-m") if named.startswith("python") else start
            problem = Problem(
                named, expected, "isotype run starts a Python script", (("check", *line[:end]), ("run",))
            )
            break
    raise UsageError("the command begins with another program", [problem])


def _kept(line: Sequence[str], at: int, program: str) -> tuple[int, tuple[str, ...]]:
    """Return (number of words before arguments of `program`, words kept for isotype's command: a method or file)."""
    word = "".join(line[at : at + 1])
    if program in _NAMING:
        at += word == "train"
        word = "".join(line[at : at + 1])
        return (at + 1, (word,)) if word.endswith((".yaml", ".yml", ".json")) else (at, ())
    if word == "rlhf":
        method = next((value for name, value in pairwise(line) if name == "--rlhf_type"), "")
        return (at + 1, (SAME_METHODS.get(method, method),))
    method = SAME_METHODS.get(word, word)
    return (at + 1, (method,)) if method in METHODS else (at, ())
