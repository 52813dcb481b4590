"""The config of a small model of the same class: with small widths, and with few layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_LAYERS = 8
_KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
_ROTARY = ("rope_parameters", "rope_scaling")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_HIDDEN = 64
_ATTENTION_HEADS = 4


def _fields(sizes: Mapping[str, float]) -> Mapping[str, Any]:
    """Split each key, a list of field names, at spaces. Every field gets the size of its list."""
    return {name: size for names, size in sizes.items() for name in names.split()}


TEXT = _fields(
    {
        "hidden_size d_model n_embd embedding_size": _HIDDEN,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads": _ATTENTION_HEADS,
        "swa_num_attention_heads": _ATTENTION_HEADS,
        "num_key_value_heads swa_num_key_value_heads": 2,
        "head_dim swa_head_dim kv_channels d_kv v_head_dim rotary_dim query_pre_attn_scalar dim_head": 16,
        "index_head_dim linear_head_dim": 16,
        "intermediate_size ffn_dim d_ff dff dim_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim": 96,
        "intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size": 96,
        # mixtures of experts
        "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
        "num_experts_per_tok moe_k moe_topk top_k_experts experts_per_token": 2,
        "moe_intermediate_size expert_ffn_hidden_size expert_ffn_dim shared_expert_intermediate_size": 32,
        "shared_intermediate_size shared_experts_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "zero_expert_num": 2,
        "first_k_dense_replace num_dense_layers moe_layer_start_index n_group topk_group": 1,
        # latent attention
        "q_lora_rank kv_lora_rank o_lora_rank": 16,
        "qk_rope_head_dim qk_nope_head_dim": 8,
        "index_n_heads index_topk": 4,
        # state spaces and linear attention
        "state_size mamba_d_state ssm_state_size chunk_size mamba_chunk_size": 8,
        "mamba_n_heads mamba_num_heads linear_num_value_heads linear_num_heads": _ATTENTION_HEADS,
        "linear_num_key_heads": 2,
        "linear_key_head_dim linear_value_head_dim mamba_head_dim": 16,
        "time_step_rank": 4,
        # layers that are dropped at random would make a step depend on random numbers
        "layerdrop encoder_layerdrop decoder_layerdrop": 0.0,
    }
)
"""Sizes of language models."""

TOWER = {
    **TEXT,
    **_fields(
        {
            "hidden_size d_model embed_dim width": 32,
            "num_attention_heads attention_heads num_heads num_key_value_heads": 2,
            "intermediate_size mlp_dim": 48,
            "out_hidden_size vision_output_dim output_proj_dims": _HIDDEN,
            "projector_input_dim projector_output_dim projector_hidden_size": _HIDDEN,
        }
    ),
}
"""Sizes of vision and audio towers: `TEXT` with smaller values for some fields, and with fields that only towers have."""

_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
    "num_decoder_layers", "num_encoder_layers", "depth",
)  # fmt: skip
"""Config fields that contain the number of layers."""

TOWERS = ("vision", "vq", "audio", "qformer", "perceiver")
"""A nested config belongs to a tower if its name contains one of these words."""


def shrunk_config(config: Any) -> Any:
    """Return a copy of a transformers config with small widths and few layers. Its layers have the kinds of the first layers."""
    small = copy.deepcopy(config)
    for name, part in _parts(small):
        _shrink(part, TOWER if any(word in name for word in TOWERS) else TEXT)
    return small


def of_few_layers(config: Any) -> Any:
    """Return a copy of a transformers config with unchanged widths and the same few layers."""
    small = copy.deepcopy(config)
    for _, part in _parts(small):
        _cut_layers(part)
    return small


def special_tokens(config: Any) -> dict[int, list[tuple[Any, str, int | None]]]:
    """Return each special token id with its places in a config: (nested config, attribute, index in a list or None)."""
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
    """Yield (attribute name, config) for a config ("") and all configs nested in it."""
    yield name, config
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type") and not key.startswith("_"):
            yield from _parts(value, key)


def _shrink(config: Any, sizes: Any) -> None:
    before = vars(config)
    head_dim = _head_dim(before)
    heads, key_heads = _first(before, _HEADS), before.get("num_key_value_heads")
    changes = {name: value for name, value in sizes.items() if isinstance(before.get(name), (int, float))}
    if "num_key_value_heads" in changes:
        all_heads = changes.get("num_attention_heads", _ATTENTION_HEADS)
        fewer = 1 if key_heads == 1 else all_heads // 2
        changes["num_key_value_heads"] = all_heads if key_heads == heads else fewer
    for name, value in changes.items():
        if not isinstance(before[name], bool) and (before[name] or name.endswith("layerdrop")):
            setattr(config, name, value)
    for rotary in (value for name in _ROTARY if isinstance(value := before.get(name), dict)):
        _shrink_rotary(rotary, head_dim, _head_dim(vars(config)))
    _cut_layers(config)


def _first(values: Any, names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name)), None)


def _head_dim(values: Any) -> int | None:
    width, heads = _first(values, ("hidden_size", "d_model", "n_embd")), _first(values, _HEADS)
    quotient = width // heads if isinstance(width, int) and isinstance(heads, int) else None
    return values.get("head_dim") or quotient


def _shrink_rotary(rotary: dict[str, Any], before: int | None, after: int | None) -> None:
    """Shorten lists of rotary factors, and sections of rotary frequencies, in proportion to the head size."""
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
    """Keep only the first layers of a config: at least two, and enough to contain each kind, at most `MOST_LAYERS`."""
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
