"""Whether another base is the model that an adapter was trained on, as far as their configs say."""

from __future__ import annotations

from typing import Any

from isotype.checkpoint.adapter import Adapter
from isotype.checkpoint.weightless import model_config
from isotype.core.errors import CheckpointError, Problem

_SAME = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "vocab_size",
)  # fmt: skip


def check_same_base(adapter: Adapter, base: str, revision: str | None = None) -> None:
    """Whether the config of `base` describes the model that `adapter` was trained on, whatever its precision.

    Raises:
        CheckpointError: it is another model, though the adapter's weights may fit into it; every difference is named.
    """
    sources = ((base, revision), (adapter.base, adapter.revision))
    given, trained = (model_config(source, revision=of).get_text_config() for source, of in sources)
    problems = [
        Problem(
            f"--base {base}: {name} {_value(given, name)}",
            f"{_value(trained, name)}, as in {adapter.base}, which the adapter was trained on",
            "give the same model in another precision, or leave --base out",
        )
        for name in _SAME
        if _value(given, name) != _value(trained, name)
    ]
    if problems:
        raise CheckpointError("the base is another model than the adapter was trained on", problems)


def _value(config: Any, name: str) -> Any:
    return getattr(config, name, None)
