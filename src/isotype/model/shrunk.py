"""The config of a small model of the same class: with small widths, and with few layers."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isotype.core.tables import table

MOST_LAYERS = 8
_KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
_ROTARY = ("rope_parameters", "rope_scaling")
_HEADS = ("num_attention_heads", "n_head", "num_heads")


def _fields(sizes: Mapping[str, float]) -> Mapping[str, Any]:
    """Split each key, such as "hidden_size d_model", into field names, and give each field the size of the key."""
    return {name: size for names, size in sizes.items() for name in names.split()}


_TABLE = table(__file__)
TEXT = _fields(_TABLE["text"])
"""Sizes of language models. LayerDrop is off, because the step must not depend on random numbers."""
TOWER = {**TEXT, **_fields(_TABLE["tower"])}
"""Sizes of vision and audio towers. Some fields of `TEXT` have smaller values, and some fields exist only in towers."""

_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
    "num_decoder_layers", "num_encoder_layers", "depth",
)  # fmt: skip
"""Config fields that contain the number of layers."""

TOWERS = ("vision", "vq", "audio", "qformer", "perceiver")
"""A nested config belongs to a tower if its name contains one of these words."""


def shrunk_config(config: Any, *, narrow: bool) -> Any:
    """Return a copy of a transformers config with only the first layers; if `narrow` is True, also with small widths."""
    small = copy.deepcopy(config)
    for name, part in _parts(small):
        if narrow:
            _make_narrow(part, TOWER if any(word in name for word in TOWERS) else TEXT)
        _cut_layers(part)
    return small


def special_tokens(config: Any) -> dict[int, list[tuple[Any, str, int | None]]]:
    """Return special token id -> its places in a config: (nested config, attribute, index in a list or None)."""
    places: dict[int, list[tuple[Any, str, int | None]]] = {}
    for _, part in _parts(config):
        for name, value in list(vars(part).items()):
            if not name.endswith(("token_id", "token_index", "token_ids")):
                continue
            values = value if isinstance(value, (list, tuple)) else (value,)
            for at, token in enumerate(values):
                if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                    places.setdefault(token, []).append((part, name, at if values is value else None))
    return places


def _parts(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (attribute name, config) for a config (with the name "") and for all configs in it."""
    yield name, config
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type") and not key.startswith("_"):
            yield from _parts(value, key)


def _make_narrow(config: Any, sizes: Any) -> None:
    before = vars(config)
    head_dim = _head_dim(before)
    # Configs of multi-head latent attention derive the first field from the second.
    derived = head_dim is not None and head_dim == before.get("qk_rope_head_dim")
    heads, key_heads = _first(before, _HEADS), before.get("num_key_value_heads")
    changes = {name: value for name, value in sizes.items() if isinstance(before.get(name), (int, float))}
    if "num_key_value_heads" in changes:
        all_heads = changes.get("num_attention_heads", TEXT["num_attention_heads"])
        fewer = 1 if key_heads == 1 else all_heads // 2
        changes["num_key_value_heads"] = all_heads if key_heads == heads else fewer
    for name, value in changes.items():
        if not isinstance(before[name], bool) and (before[name] or name.endswith("layerdrop")):
            setattr(config, name, value)
    if derived:
        config.head_dim = config.qk_rope_head_dim
    for rotary in (value for name in _ROTARY if isinstance(value := before.get(name), dict)):
        _shrink_rotary(rotary, head_dim, _head_dim(vars(config)))


def _first(values: Any, names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name)), None)


def _head_dim(values: Any) -> int | None:
    width, heads = _first(values, ("hidden_size", "d_model", "n_embd")), _first(values, _HEADS)
    quotient = width // heads if isinstance(width, int) and isinstance(heads, int) else None
    return values.get("head_dim") or quotient


def _shrink_rotary(rotary: dict[str, Any], before: int | None, after: int | None) -> None:
    """Shorten the lists of rotary factors, and the sections of rotary frequencies, in proportion to the head size."""
    for key, value in rotary.items():
        if isinstance(value, dict):
            _shrink_rotary(value, before, after)
        elif before and after and isinstance(value, list) and key.endswith("_factor"):
            rotary[key] = value[: max(1, len(value) * after // before)]
        elif before and after and isinstance(value, list) and key.endswith("section"):
            sections = [max(1, size * after // before) for size in value]
            sections[-1] += sum(value) * after // before - sum(sections)
            rotary[key] = sections


def _cut_layers(config: Any) -> None:
    """Keep only the first layers of a config: at least two, at most `MOST_LAYERS`, and if possible one layer of each kind."""
    number = next((value for name in _LAYERS if isinstance(value := vars(config).get(name), int)), None)
    if number is None or number <= 2:
        return
    kept = 2
    for name in _KINDS:
        kinds = vars(config).get(name)
        if isinstance(kinds, list) and len(kinds) == number:
            kept = max(kept, *(kinds.index(kind) + 1 for kind in set(kinds)))
    kept = min(kept, MOST_LAYERS, number)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == number:
            setattr(config, name, value[:kept])
    for name in _LAYERS:
        if isinstance(vars(config).get(name), int):
            setattr(config, name, min(kept, vars(config)[name]))
