"""Names of devices: the profile in `profiles.json` for a name such as `rtx-4090` or `NVIDIA GeForce RTX 4090`.

This module does not import torch, so that a command refuses an unknown name quickly.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from isotype.core.arguments import did_you_mean
from isotype.core.errors import PrecisionError, Problem
from isotype.core.tables import table

# Words shared by many cards.
_MAKERS = frozenset({"nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "intel", "apple", "gpu"})
_CAPACITY = re.compile(r"(\d+)\s*gi?b?\b")
_SPELLING = re.compile(r"[a-z0-9 _+-]*")
_WORDS = re.compile(r"\d+g\b|[a-z]+\d*[a-z]*|\d+[a-z]*")
# Words of a series or a board, which alone name no card.
_SHARED = re.compile(r"rtx|gtx|sxm\d*|pcie|hbm\d*\w*|\d+g")
# Words that name another card after a number: an RTX 5070 is no RTX 5070 Ti.
_VARIANTS = frozenset({"ti", "super", "d", "laptop", "max", "server", "xt", "xtx"})
_ATTACHED = re.compile(r"(\d)(ti|super|d|laptop)")
_APPLE = re.compile(r"(m\d)-?(pro|max|ultra)?")
# Bounds of the advertised memory divided by the usable memory. The driver uses a part of the memory.
_LEAST, _MOST = 0.97, 1.12


@cache
def records() -> dict[str, Any]:
    entries = table(__file__, "profiles.json").items()
    return {key: {"driver_names": [record["title"]], "aliases": [], **record} for key, record in entries}


def profile_names() -> tuple[str, ...]:
    return tuple(sorted({name for key, record in records().items() for name in (key, *record["aliases"])}))


@cache
def names() -> dict[str, str]:
    """Return a dict from each name and alias, written without separators (`rtx4090`), to the key of its record."""
    return {"".join(words_of(n)): key for key, record in records().items() for n in (key, *record["aliases"])}


def require_device(name: str) -> None:
    """Raise PrecisionError unless `name` is the name of a profile or one of torch's device names (`cuda:1`)."""
    folded = name.strip().lower()
    if not re.fullmatch(r"auto|(cpu|cuda|gpu|xpu|mps)(:\d+)?", folded) and not apple_chip(folded):
        card_of(folded, number="")


def apple_chip(name: str) -> tuple[str, ...]:
    """Return the parts of the name of an Apple chip (`M3 Max`: `m3`, `max`); () for other names and for names in `names()`."""
    text = "".join(words_of(name))
    chip = None if text in names() else _APPLE.fullmatch(text)
    return tuple(part for part in chip.groups() if part) if chip else ()


def card_of(name: str, number: str = " --devices {}") -> str:
    """Return the key of the record that `name` names. Raise PrecisionError if no record or several records match.

    For `2x4090`, the error suggests `4090`, followed by `number`: the format of the argument for several devices.
    """
    cards = _cards(name)
    if len(cards) == 1:
        return cards[0]
    if cards:
        fix = f"use one of {', '.join(cards)}"
        raise PrecisionError.of("a name of several devices", f"device {name!r}", "the name of one card", fix)
    fix, swap = did_you_mean(name, profile_names(), "see docs/devices.md, which lists all names"), None
    if (several := re.fullmatch(r"(\d+) ?x ?(.+)", name)) and len(_cards(several[2])) == 1:
        fix = f"--device {several[2]}" + number.format(several[1])
        swap = (("--device", name), fix.split())
    expected = "auto, cpu, cuda, cuda:N, mps, xpu, or the name of a GPU in docs/devices.md (t4, rtx4090, mi300x, m3-max)"
    raise PrecisionError("unknown device", [Problem(f"device {name!r}", expected, fix, swap)])


def _cards(name: str) -> list[str]:
    """Return the keys of all records that `name` may mean: a card, or an architecture (`gfx942`, `sm_90`, `pvc`)."""
    words = words_of(name)
    if key := names().get("".join(words)):
        return [key]
    is_card = not all(_SHARED.fullmatch(word) for word in words)
    cards = [key for key, record in records().items() if words and _fits(words, key, record, is_card)]
    return cards if is_card or len(cards) > 1 else []


@cache
def words_of(name: str) -> tuple[str, ...]:
    """Split the name of a card into lower-case words without the maker. `80 GiB` becomes `80g`. Return () for other text."""
    name = name.lower().replace("(r)", "").replace("(tm)", "")
    if not _SPELLING.fullmatch(name):
        return ()
    text = _CAPACITY.sub(r"\1g", name).replace("rtx", "rtx ").replace("gtx", "gtx ")
    text = _ATTACHED.sub(r"\1 \2 ", text.replace("mobile", "laptop"))
    return tuple(word for word in _WORDS.findall(text) if word not in _MAKERS)


def _fits(words: tuple[str, ...], key: str, record: Mapping[str, Any], is_card: bool) -> bool:
    architecture = record.get("arch", "sm{}{}".format(*record.get("capability", "--")))
    if record["kind"] == "cpu" or "".join(words) == architecture:
        return bool(record["kind"] != "cpu")
    texts = (key, record["title"], *record["driver_names"], *record["aliases"])
    owned = {word for text in texts for word in words_of(text)}
    variants = owned & _VARIANTS if is_card else set[str]()
    return variants <= {*words} and all(w in owned or _is_memory(w, record["memory_gib"]) for w in words)


def _is_memory(word: str, gib: float | None) -> bool:
    capacity = re.fullmatch(r"(\d+)g", word)
    return capacity is not None and gib is not None and _LEAST * gib <= int(capacity[1]) <= _MOST * gib
