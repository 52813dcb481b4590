"""PEFT (0.21): what it leaves on its layers, which layers its `all-linear` stands for, and its adapters on parameters. It is imported where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from isotype.compat.torch import forget_parametrized

DORA_CACHE: Final = "_dora_cache"
"""Where a layer of DoRA keeps the norms that it has computed."""


def all_linear(config: Any, model: Any) -> set[str]:
    """The names of the layers of `model` that PEFT adapts where a config says `all-linear`."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    config.target_modules = "all-linear"
    return set(_maybe_include_all_linear_layers(config, model).target_modules)


def takes_outputs_first(wrapper: Any) -> bool:
    """True if a `ParamWrapper` takes a weight `[experts, d1, d2]` for one of d2 inputs and d1 outputs."""
    return bool(wrapper._did_swap_in_out_features)


# Of a weight that has a parametrization of its own, PEFT reads the value that torch has cached before it adds the adapter's
# (`ParamWrapper._activate_lora`), and leaves the `_LoraFactorsProxy` of a single adapter on it (`_remove_parametrizations`).
# tests/model/experts/test_layer.py says when these two can go.
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
"""Methods of a subclass of `ParamWrapper` whose `plain` is that class."""
