"""A small copy of a model for this CPU, in float64. It has the modules of the model, or is of the same class with a small config."""

import copy
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from isotype.compat.peft import activating, without_peft
from isotype.compat.torch import FakeTensor, has_values, is_traceable_wrapper_subclass
from isotype.compat.transformers import attention_of, fresh_model, set_attention, use_plain_experts
from isotype.core.errors import error_line
from isotype.core.random_states import random_states_kept
from isotype.model.shrunk import shrunk_config, special_tokens
from isotype.model.walk import empty_copies, fill_copies, kind_of, lists_of_blocks

MOST_WEIGHTS = 8_000_000
"""Maximum number of weight elements (without embeddings) in a copy of the modules. With this number, 256 tokens take 0.25 s."""
MOST_WEIGHTS_OF_CLASS = 32_000_000
"""Maximum number of weight elements in a smaller model of the same class."""
_JITTER = 0.05
"""Standard deviation of added noise, divided by the standard deviation of the weight. Without noise, zeros in a weight would hide dependencies."""
_SPARE = 8
_LAYERS_OF_A_COPY = 2
_RANDOM = ("dropout", "drop_rate", "layerdrop")
_STAND_IN = "isotype_flash"
"""Name of an attention with FlashAttention's masks. This attention replaces FlashAttention on CPUs, and accepts any dtype."""


@dataclass(frozen=True)
class Copy:
    """A small copy of a model.

    Attributes:
        model: the copy, in `dtype`, on the CPU, without dropout.
        words: description of the copy for the report.
        tokens: token id of the model -> token id of the copy; None if they are the same.
        plain: token ids of the copy that have no special meaning.
        dtype: float64, or float32 for a copy of large layers.
    """

    model: nn.Module
    words: str
    tokens: Mapping[int, int] | None
    plain: tuple[int, ...]
    dtype: torch.dtype = torch.float64


class NoCopyError(Exception):
    """Raised if no small copy is possible. The message says why."""


def small_copy(model: nn.Module, ids: torch.Tensor | None, most_bytes: int | None = None) -> Copy:
    """Return a small copy of `model`, with random weights or the model's weights with noise.

    Args:
        model: the model, real or on the meta device; it is not changed.
        ids: token ids of the batch, in any shape; None if the batch has none.
        most_bytes: memory limit in bytes for a copy of the whole model and the gradients; None for no limit. The limit
            does not apply to a model without a transformers config.

    Raises:
        NoCopyError: the model is too large, and its class cannot be created with smaller or fewer layers.
    """
    base = without_peft(model)
    tables = {id(module.weight) for module in base.modules() if isinstance(module, nn.Embedding)}
    weights = sum(weight.numel() for weight in base.parameters() if id(weight) not in tables)
    config = getattr(base, "config", None)
    special = special_tokens(config) if hasattr(config, "model_type") else {}
    present = set() if ids is None else set(ids.flatten().tolist())
    parameters = list(model.parameters())
    size = 8 * sum(parameter.numel() * (1 + parameter.requires_grad) for parameter in parameters)
    fits = most_bytes is None or size <= most_bytes or not hasattr(config, "model_type")
    if weights <= MOST_WEIGHTS and fits and _copyable(model):
        plain = tuple(sorted(present - special.keys()))
        return Copy(_quiet(_copied(model), model.training), "a copy of the model", None, plain)
    return _of_class(model, base, present) if hasattr(config, "model_type") else _of_parts(model, present)


def _copyable(model: nn.Module) -> bool:
    """Return True if the modules of a model can be copied: none is quantized, and all buffers have values."""
    quantized = any(kind_of(module) in ("linear4bit", "linear8bit") for module in model.modules())
    packed = any(map(is_traceable_wrapper_subclass, model.parameters()))
    return not quantized and not packed and all(map(has_values, model.buffers()))


def _of_parts(model: nn.Module, present: set[int]) -> Copy:
    """Return a copy of a user's module, with small transformers models and short lists of layers."""
    memo: dict[int, Any] = {}
    left_out: set[int] = set()
    tokens: Mapping[int, int] | None = None
    plain, words = tuple(sorted(present)), []
    for inner in _transformers_models(model):
        small = _of_class(inner, without_peft(inner), present)
        if tokens not in (None, small.tokens):
            raise NoCopyError("the model's parts have different special tokens")
        memo[id(inner)] = small.model
        left_out |= {id(part) for part in inner.modules()}
        tokens, plain = small.tokens, small.plain
        words.append(small.words)
    short = {}
    for _, layers in lists_of_blocks(model, 1):
        surplus = list(layers.children())[_LAYERS_OF_A_COPY:]
        if surplus and id(layers) not in left_out:
            short[id(layers)] = len(surplus) + _LAYERS_OF_A_COPY
            left_out |= {id(part) for layer in surplus for part in layer.modules()}
    parts = [part for part in model.modules() if id(part) not in left_out]
    by_id = {id(weight): weight for part in parts for weight in part.parameters(recurse=False)}
    tables = {id(part.weight) for part in parts if isinstance(part, nn.Embedding)}
    weights = sum(weight.numel() for key, weight in by_id.items() if key not in tables)
    if weights > MOST_WEIGHTS_OF_CLASS or (len(parts) == 1 and not words):
        what = "the model" if not short else f"the first {_LAYERS_OF_A_COPY} layers of the model"
        raise NoCopyError(f"{what} has {weights:,} weights and no config for a smaller model")
    dtype = torch.float32 if weights > MOST_WEIGHTS else torch.float64
    copied = _copied(model, memo, left_out, dtype)
    for layers in (memo[key] for key in short):
        for name in list(layers._modules)[_LAYERS_OF_A_COPY:]:
            del layers._modules[name]
    cut = [f"of the first {_LAYERS_OF_A_COPY} of {number} layers" for number in dict.fromkeys(short.values())]
    details = " and ".join([*cut, *(f"with {part}" for part in words)])
    quiet = _quiet(copied.to(dtype), model.training)
    return Copy(quiet, f"a copy of the model {details}".strip(), tokens, plain, dtype)


def _transformers_models(model: nn.Module) -> Iterator[Any]:
    """Yield the outermost transformers models in a module. If PEFT wraps a model, yield the wrapper."""
    inside: set[int] = set()
    for module in model.modules():
        if id(module) not in inside and hasattr(getattr(without_peft(module), "config", None), "model_type"):
            inside |= {id(part) for part in module.modules()}
            yield module


def _copied(
    model: nn.Module,
    memo: dict[int, Any] | None = None,
    left_out: Collection[int] = (),
    dtype: torch.dtype = torch.float64,
) -> nn.Module:
    """Return a copy of the model's own modules with new tensors. Float tensors are in `dtype`.

    `memo` maps the `id` of a module to its replacement; copies are added to it. `left_out` contains the `id` of each
    module that is not copied.
    """
    memo = {} if memo is None else memo
    empty_copies(model, memo)
    generator = torch.Generator().manual_seed(0)
    parts = [part for part in model.modules() if id(part) not in left_out]
    parameters = {id(weight): weight for part in parts for weight in part.parameters(recurse=False)}
    for key, parameter in parameters.items():
        if not parameter.is_floating_point():
            memo[key] = nn.Parameter(parameter.detach().cpu().clone(), requires_grad=False)
        else:
            values = _values(parameter, generator, dtype)
            memo[key] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for buffer in (buffer for part in parts for buffer in part.buffers(recurse=False)):
        values = buffer.detach().cpu().clone()
        memo[id(buffer)] = values.to(dtype) if values.is_floating_point() else values
    fill_copies(model, memo, left_out)
    copied: nn.Module = memo[id(model)]
    return copied


def _values(parameter: nn.Parameter, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a parameter, scaled and with noise. If the parameter has no values, return random values."""
    shape = parameter.shape
    if parameter.is_meta or isinstance(parameter, FakeTensor):
        return _generic(shape, generator).to(dtype)
    values = parameter.detach().to("cpu", dtype, copy=True)
    spread = float(values.std()) if values.numel() > 1 else 0.0
    noise = torch.randn(shape, generator=generator, dtype=dtype)
    if spread == 0.0:  # all equal: a norm of ones, an untrained adapter
        return values + noise * (0.1 if parameter.dim() < 2 else _scale(shape))
    if parameter.dim() < 2:
        return values + noise * (_JITTER * spread)
    # A matrix product that makes its inputs smaller would hide their effect.
    return values.div_(spread).add_(noise, alpha=_JITTER).mul_(_scale(shape))


def _scale(shape: torch.Size) -> float:
    """Return the standard deviation of a weight for which the outputs of its matmul are about as large as the inputs."""
    inputs = math.prod(shape[1:]) if len(shape) < 3 else shape[-1]
    return 1 / math.sqrt(max(inputs, 1))


def _generic(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return 1 + 0.1 * noise if len(shape) < 2 else noise * _scale(shape)


def _of_class(model: Any, base: Any, present: set[int]) -> Copy:
    """Return a model of the same class as `base`, with a small config, random weights and the adapters of `model`."""
    problems = []
    for narrow in (True, False):
        try:
            config = shrunk_config(base.config, narrow=narrow)
            tokens, plain = _small_vocabulary(config, present)
            with random_states_kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                with torch.device("meta"):
                    weightless = fresh_model(type(base), copy.deepcopy(config))
                size = sum(parameter.numel() for parameter in weightless.parameters())
                if size > MOST_WEIGHTS_OF_CLASS:
                    raise NoCopyError(f"a copy of few layers still has {size:,} weights")
                small = fresh_model(type(base), config, torch.float64)
                if hasattr(model, "peft_config"):
                    small = adapted = _adapted(small, model, tokens)
                    named = [activating(config) for config in adapted.peft_config.values()]
                    meant = {token for fields in named for ids in fields.values() for token in ids}
                    plain = tuple(token for token in plain if token not in meant)
        except NoCopyError as problem:
            problems.append(str(problem))
        except Exception as error:  # noqa: BLE001 - any class may fail with small sizes
            problems.append(error_line(error))
        else:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for name, parameter in small.named_parameters():
                    if parameter.dim() > 1 or "lora_" in name:
                        parameter.copy_(_generic(parameter.shape, generator))
            words = f"a {type(base).__name__} with a small config"
            return Copy(_quiet(small.double(), model.training), words, tokens, plain)
    raise NoCopyError(f"no small {type(base).__name__} could be made: {problems[0]}")


def _small_vocabulary(config: Any, present: set[int]) -> tuple[dict[int, int], tuple[int, ...]]:
    """Reduce a vocabulary to special tokens and `present`. Return old id -> new id, and the new ids of ordinary tokens."""
    special = special_tokens(config)
    known = sorted(present | special.keys())
    tokens = {old: new for new, old in enumerate(known)}
    for old, places in special.items():
        for part, name, at in places:
            if at is None:
                setattr(part, name, tokens[old])
            else:
                ids = list(getattr(part, name))
                ids[at] = tokens[old]
                setattr(part, name, ids)
    size = -(-(len(known) + _SPARE) // 8) * 8
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for part in {id(member): member for member in (config, text)}.values():
        for name in ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"):
            if isinstance(vars(part).get(name), int):
                setattr(part, name, size)
    plain = [tokens[token] for token in present - special.keys()]
    return tokens, (*sorted(plain), *range(len(known), len(known) + _SPARE))


def _adapted(small: nn.Module, model: Any, tokens: Mapping[int, int]) -> Any:
    import peft

    adapted: Any = None
    for name, config in model.peft_config.items():
        if isinstance(config, peft.PromptLearningConfig):
            raise NoCopyError("trained prompts shift all positions")
        again = copy.deepcopy(config)
        neutral = {"init_lora_weights": True, "layers_to_transform": None, "trainable_token_indices": None}
        for attribute, value in neutral.items():
            if hasattr(again, attribute):
                setattr(again, attribute, value)
        for attribute, ids in activating(again).items():
            if not tokens.keys() >= set(ids):
                raise NoCopyError(f"the adapter needs the tokens {ids}, which the batch does not have")
            setattr(again, attribute, [tokens[token] for token in ids])
        if adapted is None:
            small.requires_grad_(False)
            adapted = peft.get_peft_model(small, again, adapter_name=name)
        else:
            adapted.add_adapter(name, again)
    active = getattr(model, "active_adapters", None)  # a method of transformers, a property of PEFT
    adapted.base_model.set_adapter(list(model.peft_config) if active is None or callable(active) else active)
    return adapted


def _quiet(model: nn.Module, training: bool) -> nn.Module:
    """Set the model's mode to `training`, turn dropout off, and choose kernels for float64 on a CPU."""
    model.train(training)
    _use_stand_in(model)
    configs = _configs_of(model)
    for config in configs:
        use_plain_experts(config)  # grouped products do not support float64
        if hasattr(config, "use_cache"):
            config.use_cache = False
    holders: list[Any] = [*model.modules(), *configs]
    for holder in holders:
        if isinstance(holder, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and any(word in name for word in _RANDOM):
                setattr(holder, name, 0.0)
    return model


def _use_stand_in(model: nn.Module) -> None:
    """Replace attention that a CPU cannot train: FlashAttention by `_attention`, and FlexAttention by eager attention.

    The masks follow `flash_attention_mask` in transformers/masking_utils.py and `_flash_attention_forward` in
    transformers/modeling_flash_attention_utils.py (5.23).
    """
    with_flash = []
    for config in _configs_of(model):
        kernel = attention_of(config) or ""
        if kernel == "flex_attention":
            set_attention(config, "eager")
        elif kernel.startswith("isotype") and kernel != _STAND_IN:
            set_attention(config, "sdpa")  # isotype's attention, with the same masks, has no float64
        elif "flash" in kernel:
            with_flash.append(config)
    if not with_flash:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(_STAND_IN, _attention)
    AttentionMaskInterface.register(_STAND_IN, flash_attention_mask)
    for config in with_flash:
        set_attention(config, _STAND_IN)


def _configs_of(model: nn.Module) -> list[Any]:
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if config is not None}.values())


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of `[rows, heads, tokens, size]`; the result is `[rows, tokens, heads, size]`."""
    rows, _heads, queries, _size = query.shape
    keys = key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query_at, key_at = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
    near = torch.ones(queries, keys, dtype=torch.bool)
    if causal and queries > 1:
        near &= key_at <= query_at
    if sliding_window is not None:
        near &= (query_at - key_at).abs() < sliding_window
    visible = near.expand(rows, 1, queries, keys)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, -keys:].bool()
    elif (sequence := _sequences(rows, keys, cu_seq_lens_q, position_ids)) is not None:
        visible = visible & (sequence[:, None, -queries:, None] == sequence[:, None, None, :])
    bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(query, key, value, bias, scale=scaling).transpose(1, 2), None


def _sequences(
    rows: int, tokens: int, starts: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the index of each token's sequence, `[rows, tokens]`; None if the inputs do not separate sequences.

    As in transformers, a position 0 starts a new sequence only in a batch with one row.
    """
    if starts is not None and rows == 1:
        return torch.searchsorted(starts.flatten()[1:], torch.arange(tokens), right=True)[None]
    if positions is None or rows != 1 or positions.shape[-1] != tokens or positions.dim() != 2:
        return None
    if bool((torch.arange(tokens) + positions.min() == positions).all()):
        return None
    return (positions == 0).long().cumsum(-1)
