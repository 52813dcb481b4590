"""Finds the training in a command line of another program, such as `accelerate launch -m axolotl.cli.train FILE`."""

from __future__ import annotations

import os
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
_COUNTS = ("--num_processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus", "NPROC_PER_NODE")


def refuse_program(words: Sequence[str]) -> None:
    """Raise UsageError if `words` begin with another program. The fix is isotype's command for the same training."""
    line = separated(words)
    start = next((at for at, word in enumerate(line) if not re.match(r"env$|\w+=", word)), len(line))
    named = line[start] if line[start + 1 :] else ""  # a single word may be a model
    expected = "MODEL, or a training command of isotype"
    if (script := "".join(line[start : start + 1])).endswith(".py"):
        rest = line[start:]
        at = rest.index("--device") if "--device" in rest else len(rest)
        run = ("run", *rest[at : at + 2], *rest[:at], *rest[at + 2 :])
        fix = f"isotype run {script} runs it; isotype check {Path(script).stem}:FUNCTION checks a function in it that returns (model, inputs)"
        problem = Problem(f"the script {script}", expected, fix, (("check", *line), run))
        raise UsageError("not a model", [problem])
    if named not in (*LAUNCHERS, *TRAINERS, "isotype"):
        return
    problem = Problem(named, expected, "begin with the method; isotype run starts a Python script")
    for at, (word, after) in enumerate(pairwise(line[start:]), start):
        module = after.partition(".")[0] if word == "-m" else None
        trains = _MODULES.get(module) if module else Path(word).name in _MODULES and Path(word).name
        if trains:
            end, kept = _kept(line, at + 1 + (word == "-m"), trains)
            variables = (word.split("=") for word in line[:at] if word.count("=") == 1)
            pairs = (*variables, *pairwise(line[:at]), *os.environ.items())
            counts = [count for name, count in pairs if name in _COUNTS and count.isdigit()]
            known = bool(kept) or trains in _NAMING
            if known:
                kept += ("--devices", counts[0]) if counts else ()
                kept += ("--use_peft", "False") if trains == "trl" and not _says_use_peft(line) else ()
            fix = f"write {' '.join(kept)} instead" if kept else "remove it"
            swap = (tuple(line[:end]), kept) if known else None
            problem = Problem(" ".join(line[:end]), expected, fix, swap)
            break
        if named in LAUNCHERS and (module or after.endswith(".py")):
            end = at + (word != "-m") if named.startswith("python") else start
            script = "isotype run starts a Python script"
            problem = Problem(named, expected, script, (("check", *line[:end]), ("run",)))
            break
    raise UsageError("the command begins with another program", [problem])


def _kept(line: Sequence[str], at: int, program: str) -> tuple[int, tuple[str, ...]]:
    """Return (number of words before arguments of `program`, words kept for isotype's command: a method or file)."""
    word = "".join(line[at : at + 1])
    if program in _NAMING:
        at += word == "train"
        word = "".join(line[at : at + 1])
        return (at + 1, (word,)) if word.endswith((".yaml", ".yml", ".json")) else (at, ())
    if word.startswith("--"):
        return at, ("sft",)
    if word == "rlhf":
        word = next((value for name, value in pairwise(line) if name == "--rlhf_type"), "")
    method = SAME_METHODS.get(word, word)
    return (at + 1, (method,)) if method in METHODS else (at, ())


def _says_use_peft(line: Sequence[str]) -> bool:
    """Return True if the words or their `--config` file set `use_peft`. Without it, `trl` trains every weight."""
    files = [Path(value) for name, value in pairwise(line) if name == "--config" and Path(value).is_file()]
    texts = (*line, *(file.read_text(encoding="utf-8", errors="replace") for file in files))
    return any("use_peft" in text.replace("-", "_") for text in texts)
