"""Matching of GPU names in any spelling: `rtx-4090`, `RTX 4090`, `4090`, `NVIDIA GeForce RTX 4090`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Words shared by many cards.
_MAKERS = frozenset({"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "radeon", "gpu"})
_CARDS = ("cuda", "rocm")
_CAPACITY = re.compile(r"(\d+)\s*gi?b?\b")
_SPELLING = re.compile(r"[a-z0-9 _-]*")
_WORDS = re.compile(r"\d+g\b|[a-z]+\d*[a-z]*|\d+[a-z]*")
# Words of a series or a board, which alone name no card.
_SHARED = re.compile(r"rtx|gtx|sxm\d*|pcie|hbm\d*\w*|\d+g")
# Words that, after a number, name another card: an RTX 5070 is no RTX 5070 Ti.
_VARIANTS = frozenset({"ti", "super"})
_ATTACHED = re.compile(r"(\d)(ti|super)\b")
# Bounds of the advertised memory over the usable one, in GiB: the driver takes a share of the advertised memory.
_LEAST, _MOST = 0.97, 1.12


def words_of(name: str) -> tuple[str, ...]:
    """Return a card's name as lower-case words, without the maker, memory as `80g`; () if this is not a card's name."""
    if not _SPELLING.fullmatch(name.lower()):
        return ()
    text = _CAPACITY.sub(r"\1g", name.lower()).replace("rtx", "rtx ").replace("gtx", "gtx ")
    text = _ATTACHED.sub(r"\1 \2", text)
    return tuple(word for word in _WORDS.findall(text) if word not in _MAKERS)


def cards_named(name: str, records: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return (names of the profiles that `name` matches, True if some word of `name` identifies a card)."""
    words = words_of(name)
    is_card = not all(_SHARED.fullmatch(word) for word in words)
    fitting = tuple(key for key, record in records.items() if words and _fits(words, key, record, is_card))
    return fitting, is_card


def _fits(words: tuple[str, ...], key: str, record: Mapping[str, Any], is_card: bool) -> bool:
    if record["kind"] not in _CARDS:
        return False
    texts = (key, record["title"], *record["driver_names"], *record.get("aliases", ()))
    owned = {word for text in texts for word in words_of(text)}
    if is_card and not owned & _VARIANTS <= set(words):
        return False
    return all(word in owned or _is_memory(word, record["memory_gib"]) for word in words)


def _is_memory(word: str, gib: float | None) -> bool:
    capacity = re.fullmatch(r"(\d+)g", word)
    return capacity is not None and gib is not None and _LEAST * gib <= int(capacity[1]) <= _MOST * gib
