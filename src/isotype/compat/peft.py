"""PEFT (0.21): base models, layers of `all-linear`, adapters on parameters. PEFT is imported on use."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn

from isotype.compat.replaced import replaced
from isotype.compat.torch import forget_parametrized

DORA_CACHE: Final = "_dora_cache"


def without_peft(model: Any) -> Any:
    """Return the base model of a `PeftModel`, or another model unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def all_linear(config: Any, model: Any) -> set[str]:
    """Return the names of the layers in `model` that PEFT adapts for `all-linear`."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    config.target_modules = "all-linear"
    return set(_maybe_include_all_linear_layers(config, model).target_modules)


def kind_of_adapter(config: Any) -> str:
    """Return PEFT's name of a config's kind, such as `LORA`."""
    return str(getattr(config.peft_type, "value", config.peft_type))


_ACTIVATING = ("alora_invocation_tokens", "token_indices")


def activating(config: Any) -> dict[str, list[int]]:
    """Return a config's fields with token ids that activate the adapter (aLoRA, trainable tokens)."""
    return {name: list(ids) for name in _ACTIVATING if (ids := getattr(config, name, None))}


_BY_ROW = ("POLY", "SHADOW", "XLORA")


def why_whole_rows(model: Any) -> str:
    """Return why a model needs one sequence per row; "" if it does not. aLoRA, the kinds in `_BY_ROW` and attention in chunks need it."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        kind = "aLoRA" if getattr(config, "alora_invocation_tokens", None) else kind_of_adapter(config)
        if kind in ("aLoRA", *_BY_ROW):
            return f"{kind} adapters read whole rows"
    text = getattr(getattr(model, "config", None), "get_text_config", lambda: None)()
    chunk = getattr(text, "attention_chunk_size", None)
    return f"the attention counts its chunks of {chunk} tokens from the beginning of a row" if chunk else ""


takes_outputs_first = attrgetter("_did_swap_in_out_features")
"""Return whether a `ParamWrapper` reads the shape of its weight as `[experts, outputs, inputs]`."""


@contextmanager
def dora_without_weights() -> Iterator[None]:
    """In the `with` block, new DoRA magnitudes of linear layers on the meta device are NaN, because the weights are unknown."""
    from peft.tuners.lora.dora import DoraLinearLayer

    plain = DoraLinearLayer.update_layer

    def update_layer(self: Any, *, base_layer: Any, lora_B: Any, **rest: Any) -> None:  # noqa: N803 - PEFT's name
        if base_layer.weight.is_meta and type(self) is DoraLinearLayer:
            self.weight = nn.Parameter(torch.full((lora_B.shape[0],), torch.nan, dtype=lora_B.dtype))
        else:
            plain(self, base_layer=base_layer, lora_B=lora_B, **rest)

    with replaced(DoraLinearLayer, "update_layer", update_layer):
        yield


# PEFT reads torch's cached value of a parametrized weight before it adds the adapter (`ParamWrapper._activate_lora`).
# And it leaves the `_LoraFactorsProxy` of a single adapter on the weight (`_remove_parametrizations`).
# tests/model/experts/test_layer.py fails when the two functions below can go.
@contextmanager
def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
    with self.plain._activate_lora(self, active_adapters):
        forget_parametrized(self.get_base_layer(), self.parameter_name)
        yield


def _remove_parametrizations(self: Any) -> None:
    base, name = self.get_base_layer(), self.parameter_name
    if len(base.parametrizations[name]) > 1:
        del base.parametrizations[name][-1]
    else:
        self.plain._remove_parametrizations(self)


PARAMETER_WRAPPER_REPAIRS: Final[Mapping[str, Callable[..., Any]]] = {
    "_activate_lora": _activate_lora,
    "_remove_parametrizations": _remove_parametrizations,
}
"""Methods for a subclass of `ParamWrapper`. The methods read `ParamWrapper` from the subclass's attribute `plain`."""
