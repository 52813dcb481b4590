"""The parts of a model that takes pictures or sound: its towers, what brings their output into the language model, and that model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from isotype.core.names import listed
from isotype.model.walk import FoldedList, lists_of_blocks

LANGUAGE, PROJECTOR, VISION, AUDIO = "language", "projector", "vision", "audio"
PARTS = (LANGUAGE, PROJECTOR, VISION, AUDIO)
"""In reading order."""
ALL = "all"
_TOWERS = {VISION: "image", AUDIO: "audio"}
"""Part -> transformers' word for what its tower takes; a config has `vision_config` or `audio_config` where there is one."""

_MERGER = re.compile(r"(^|\.)\w*merger\w*(\.|$)")
"""What Qwen's and GLM's towers hold of the projector: layers behind the blocks that write in the language model's size."""


class Parts:
    """Which part of a transformers model each of its modules is.

    A model without towers is all language.

    Args:
        base: a transformers model without PEFT's wrapper; adapters and boundaries inside do not matter.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        names = {id(module): name for name, module in base.named_modules()}
        self.towers = {names[id(tower)]: part for part, tower in towers_of(base)}
        """Name of a tower -> its part."""
        decoder = base.get_decoder() if self.towers else base
        head = base.get_output_embeddings() if self.towers else None
        self._language = tuple(names[id(each)] for each in (decoder, head) if id(each) in names)

    def of(self, name: str) -> str:
        """Return the part that the module, or parameter, `name` belongs to."""
        for tower, part in self.towers.items():
            if f"{name}.".startswith(f"{tower}."):
                return PROJECTOR if _MERGER.search(name[len(tower) :]) else part
        inside = not self.towers or any(f"{name}.".startswith(f"{each}.") for each in self._language)
        return LANGUAGE if inside else PROJECTOR

    def outside_of_language(self) -> Iterator[str]:
        """The outermost modules with weights that are no part of the language model; nothing of a model without towers."""
        last = ""
        for name, module in self._base.named_modules() if self.towers else ():
            around = any(f"{each}.".startswith(f"{name}.") for each in self._language)
            if not name or around or f"{name}.".startswith(f"{last}.") or self.of(name) == LANGUAGE:
                continue
            last = name
            if next(module.parameters(), None) is not None:
                yield name


def read_parts(given: str | Iterable[str]) -> tuple[str, ...]:
    """Parts that are written `language,projector` or listed, in reading order; `all` is every part.

    Raises:
        ValueError: a word that is none.
    """
    words = {each.strip() for each in (given.split(",") if isinstance(given, str) else given)}
    if unknown := sorted(words - {*PARTS, ALL}):
        raise ValueError(unknown[0])
    return PARTS if ALL in words else tuple(part for part in PARTS if part in words)


def unread_layers(base: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of the parts of each tower whose output the model does not read: blocks behind the
    layer that its config names.

    LLaVA takes a picture's features from `vision_feature_layer`, which counts the tower's hidden states: 0 is
    what enters its blocks.
    """
    taken = getattr(getattr(base, "config", None), "vision_feature_layer", None)
    layers = [taken] if isinstance(taken, int) else list(taken or ())
    names = {id(module): name for name, module in base.named_modules()}
    for _, tower in towers_of(base) if layers else ():
        for _, blocks in lists_of_blocks(tower, 1):
            if isinstance(blocks, FoldedList):
                continue  # a block stands for others
            count = len(list(blocks.children()))
            last = max(layer if layer >= 0 else count + 1 + layer for layer in layers)
            reason = f"the model reads the tower's layer {listed(map(str, layers))}, before them"
            yield from ((names[id(block)], reason) for block in list(blocks.children())[last:])


def entrances(base: Any) -> Iterator[Any]:
    """The modules that float inputs enter a transformers model by: its towers, and the encoder of one that takes sound alone (Whisper)."""
    yield from (tower for _, tower in towers_of(base))
    if getattr(base, "main_input_name", "input_ids") == "input_features" and hasattr(base, "get_encoder"):
        encoder = base.get_encoder()
        if encoder is not base:
            yield encoder


def towers_of(base: Any) -> Iterator[tuple[str, Any]]:
    """(part, module) of each tower of a transformers model; nothing of a model of text alone, or of one that is a tower itself."""
    config = getattr(base, "config", None)
    for part, modality in _TOWERS.items():
        if getattr(config, f"{part}_config", None) is None or not hasattr(base, "get_encoder"):
            continue
        tower = base.get_encoder(modality=modality)
        if tower is not None and tower is not base and tower is not base.base_model:
            yield part, tower
