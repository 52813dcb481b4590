"""PEFT (0.21): what it leaves on its layers, and which layers its `all-linear` stands for. It is imported where it is needed."""

from __future__ import annotations

from typing import Any, Final

DORA_CACHE: Final = "_dora_cache"
"""Where a layer of DoRA keeps the norms that it has computed."""


def all_linear(config: Any, model: Any) -> set[str]:
    """The names of the layers of `model` that PEFT adapts where a config says `all-linear`."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    config.target_modules = "all-linear"
    return set(_maybe_include_all_linear_layers(config, model).target_modules)
