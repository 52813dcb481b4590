"""The parts of a multimodal model: towers, projectors and the language model."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from isotype.core.names import in_module, listed
from isotype.model.walk import lists_of_blocks

LANGUAGE, PROJECTOR, VISION, AUDIO = "language", "projector", "vision", "audio"
PARTS = (LANGUAGE, PROJECTOR, VISION, AUDIO)
"""The parts of a multimodal model, in the order in which reports list them."""
ALL = "all"
_TOWERS = {VISION: "image", AUDIO: "audio"}
"""Maps a tower to the name of the tower's input in transformers. The tower's config is `vision_config` or `audio_config`."""
_MERGER = re.compile(r"(^|\.)\w*merger\w*(\.|$)")
"""Names of the projector after the blocks of Qwen's and GLM's towers. Its output has the language model's width."""
_HEADS = ("score", "classifier", "qa_outputs")
"""Names of heads in transformers' classifiers and reward models. These heads belong to the part `language`."""


class Parts:
    """The parts of a transformers model (without PEFT's wrapper). Without towers, the only part is `language`."""

    def __init__(self, base: Any) -> None:
        self._base = base
        names = {id(module): name for name, module in base.named_modules()}
        self.towers = {names[id(tower)]: part for part, tower in towers_of(base)}
        decoder = base.get_decoder() if self.towers else base
        heads = [getattr(base, name, None) for name in _HEADS] if self.towers else []
        head = base.get_output_embeddings() if self.towers else None
        self._language = tuple(names[id(each)] for each in (decoder, head, *heads) if id(each) in names)

    def of(self, name: str) -> str:
        for tower, part in self.towers.items():
            if in_module(name, tower):
                return PROJECTOR if _MERGER.search(name[len(tower) :]) else part
        inside = not self.towers or any(in_module(name, module) for module in self._language)
        return LANGUAGE if inside else PROJECTOR

    def outside_of_language(self) -> Iterator[str]:
        """If the model has towers, yield the outermost modules that have weights and are outside of the language model."""
        last = ""
        for name, module in self._base.named_modules() if self.towers else ():
            around = any(in_module(inner, name) for inner in self._language)
            if not name or around or in_module(name, last) or self.of(name) == LANGUAGE:
                continue
            last = name
            if next(module.parameters(), None) is not None:
                yield name


def read_parts(parts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the parts in a list or a text such as `language,projector` or `all`. Raise ValueError for an unknown part."""
    words = {word.strip() for word in (parts.split(",") if isinstance(parts, str) else parts)}
    if unknown := sorted(words - {*PARTS, ALL}):
        raise ValueError(unknown[0])
    return PARTS if ALL in words else tuple(part for part in PARTS if part in words)


def feature_layers(base: Any) -> list[int]:
    """Return the indices of the hidden states that a model reads of its tower, as LLaVA. Index 0 is the input of the first block."""
    config = getattr(base, "config", None)
    of_tower = getattr(getattr(config, "vision_config", None), "feature_layer", None)  # Phi-4 multimodal
    indices = getattr(config, "vision_feature_layer", of_tower)
    return [indices] if isinstance(indices, int) else list(indices or ())


def unread_layers(base: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of each block of a tower if the model does not use the block's output."""
    layers = feature_layers(base)
    names = {id(module): name for name, module in base.named_modules()}
    for _, tower in towers_of(base) if layers else ():
        for _, blocks in lists_of_blocks(tower, 1):
            count = len(list(blocks.children()))
            last = max(layer if layer >= 0 else count + 1 + layer for layer in layers)
            reason = f"the model reads only the output of layer {listed(map(str, layers))} of the tower"
            yield from ((names[id(block)], reason) for block in list(blocks.children())[last:])


def entrances(base: Any) -> Iterator[Any]:
    """Yield the modules that get a model's float inputs: its towers, and the encoders of Whisper, Pix2Struct and Chameleon."""
    yield from (tower for _, tower in towers_of(base))
    encoder = getattr(getattr(getattr(base, "base_model", None), "vqmodel", None), "encoder", None)
    features = getattr(base, "main_input_name", "") in ("input_features", "flattened_patches")
    if features and hasattr(base, "get_encoder"):
        encoder = base.get_encoder()
    if encoder is not None and encoder is not base:
        yield encoder


def towers_of(base: Any) -> Iterator[tuple[str, Any]]:
    """Yield (part, module) of each tower of a transformers model. A text model has no tower, and a tower itself has none."""
    config = getattr(base, "config", None)
    for part, modality in _TOWERS.items():
        if getattr(config, f"{part}_config", None) is None or not hasattr(base, "get_encoder"):
            continue
        tower = base.get_encoder(modality=modality)
        if tower is not None and tower is not base and tower is not base.base_model:
            yield part, tower
