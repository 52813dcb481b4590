"""Names of modules and parameters, counts, and amounts of memory, for messages and reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from isotype.compat.wrappers import BETWEEN, WRAPPERS
from isotype.core.errors import Problem

if TYPE_CHECKING:
    import torch


def starred(name: str) -> str:
    """Return a name in which `*` replaces layer numbers and list positions (`layers.0.mlp`, `targets[0]['boxes']`)."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|(?<=\[)\d+(?=\])", "*", name)


def distinct_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names, with `*` for layer numbers."""
    return tuple(dict.fromkeys(map(starred, names)))


def listed(names: Iterable[str], shown: int = 3) -> str:
    """Return names as `a, b, c and 4 more`. The root module is called `the model`."""
    modules = [named(name) for name in names]
    rest = len(modules) - shown
    return ", ".join(modules[:shown]) + (f" and {rest:,} more" if rest > 0 else "")


def alternatives(names: Iterable[str]) -> str:
    """Return one or more names as `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


_COPIES = re.compile(r"\.(token_adapter|modules_to_save\.default|default)(?=\.|$)")


def plain_name(name: str) -> str:
    """Return the name of a module in the source of the model, without the parts of wrappers (PEFT, DDP)."""
    while f"{name}.".startswith(("base_model.model.", "module.")):
        name = f"{name}.".removeprefix("base_model.model.").removeprefix("module.").removesuffix(".")
    return ".".join(part for part in unparametrized(name).split(".") if part not in BETWEEN)


def unwrapping(name: str) -> str:
    """Return advice for a saved tensor whose name contains the name of a model wrapper (`module.`); "" for other names."""
    parts = name.split(".")
    part = "module" if parts[0] == "module" else next((part for part in parts if part in WRAPPERS), "")
    again = "save the model inside of the wrapper (accelerator.unwrap_model(model))"
    remove = f"remove `{part}.`, which a wrapper of the model added, from the names in the file, or {again}"
    return remove if part else ""


def unparametrized(name: str) -> str:
    """Return a parameter's name without the parts of `torch.nn.utils.parametrize`."""
    return _PARAMETRIZED.sub(r"\1", name)


_PARAMETRIZED = re.compile(r"(?:^|(?<=\.))parametrizations\.(\w+)\.original(?=\.|$)")


def base_name(name: str) -> str:
    """Return the name that a module or parameter of a PEFT model or adapter file has in the base model."""
    return _COPIES.sub("", plain_name("" if name == "base_model" else name))


def with_parents(module: str) -> tuple[str, ...]:
    """Return the names of a module and of the modules around it. The innermost is first, and the outermost is ""."""
    parts = module.split(".") if module else []
    return tuple(".".join(parts[:end]) for end in range(len(parts), -1, -1))


def in_module(name: str, module: str) -> bool:
    """Return True if `name` is the name of `module`, or of a module or parameter inside of it."""
    return f"{name}.".startswith(f"{module}.")


def names_one_of(name: str, modules: Iterable[str]) -> bool:
    """Return True if `name` has one of `modules` (names or their ends) as a part, as `modules_to_save` of PEFT does."""
    return any(f".{module}." in f".{name}." for module in modules)


def named(module: str) -> str:
    """Return a module's fully qualified name, or `the model` for the root."""
    return module or "the model"


def short(source: str) -> str:
    """Return a source line without its folder: `modeling_llama.py:64`."""
    return source.rpartition("/")[2]


def plural(count: int, noun: str) -> str:
    """Return a count with a noun: `1 error`, `2 errors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def epochs_text(epochs: float) -> str:
    """Return a number of epochs with three digits: `1 epoch`, `0.125 epochs`."""
    return f"{epochs:.3g} {'epoch' if epochs == 1 else 'epochs'}"


EXPERT = re.compile(r"expert|moe(?![a-z])", re.IGNORECASE)


def stacked(names: Iterable[str]) -> str:
    """Return `stacked expert weight` if all names belong to experts, else `3-D weight` (Conv1d, projector)."""
    return "stacked expert weight" if all(map(EXPERT.search, names)) else "3-D weight"


def agree(count: int, noun: str, verb: str) -> str:
    """Return a count with a noun and a verb: `3 weights hold`, `1 weight holds`."""
    return f"{plural(count, noun)} {_SINGULAR.get(verb, f'{verb}s') if count == 1 else verb}"


_SINGULAR = {"are": "is", "have": "has", "can": "can"}


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
    """Yield a problem for each regular expression in `patterns` that is invalid or takes too long.

    Each expression is matched with all names and their beginnings, alone and followed by `!`. With `!`, the match
    fails, and a failing match takes longest.
    """
    slow: dict[str, str] = {}
    for place, expressions in patterns.items():
        for pattern in expressions:
            try:
                re.compile(pattern)
                if place.endswith("_pattern"):  # PEFT embeds the expression in this one
                    re.compile(rf"(.*\.)?({pattern})$")
            except (re.error, RecursionError, OverflowError) as error:
                yield Problem(f"{place} {pattern!r:.80}: {error}", "a regular expression", "correct it")
                continue
            if re.search(r"[*+{]", pattern):
                slow[pattern] = place
    parts = {name[: dot.start()] for name in names for dot in re.finditer(r"\.|$", name)}
    tried = [text for part in sorted(parts)[:400] for text in (part, f"{part}!")]
    command = [sys.executable, "-I", "-S", "-c", _TRY]  # a match can only be ended with its process
    try:
        if slow:
            text = json.dumps([list(slow), tried]).encode()
            subprocess.run(command, input=text, capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as late:
        pattern = list(slow)[int((late.stdout or b"0").split()[-1])]
        expected = f"an expression that matches names in less than {_SECONDS} seconds"
        fix = "omit repeats of repeats, such as (.*)*"
        yield Problem(f"{slow[pattern]} {pattern!r:.80}", expected, fix)


K = TypeVar("K")
V = TypeVar("V")


def grouped(items: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Group the items by key, in order of first appearance."""
    groups: dict[K, list[V]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def format_bytes(amount: float) -> str:
    """Return an amount as `512 B`, `1.50 KiB`, `34.5 MiB` or `1.84 GiB`."""
    if abs(amount) < 1024:
        return f"{amount:,.0f} B"
    value, unit = amount / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if abs(value) >= 1024:
            value, unit = value / 1024, larger
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def parse_size(text: str) -> int | None:
    """Return the bytes of an amount of memory: `20GiB` and `20G` (binary), `20GB` or `8e9`; None below 1 KiB."""
    parts = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if parts is None:
        return None
    base = 1000 if parts[3] == "b" else 1024
    size = int(float(parts[1]) * base ** ("", "k", "m", "g", "t").index(parts[2]))
    return size if size >= 1024 else None  # `--max-memory 10` most likely means GiB


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a CUDA device or the CPU; None for other devices, or without psutil."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)
