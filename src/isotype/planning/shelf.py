"""Plans for models of many sizes, for requests that name no model. The shapes are from each model's config.json.

A plan needs only shapes. There is no tokenizer, so every row of a data set is assumed to have the full length.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotype.planning.from_request import Plan, plan_of_request
from isotype.planning.request import parse_request, parser

ENOUGH = 3
"""Planning starts with the largest model and ends when this number of models fit."""


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": tied,
    }


SHELF: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
}


def names_a_model(argv: Sequence[str]) -> bool:
    """Return True if the arguments of `isotype plan` name a method, a model or a config file."""
    rest = parser().parse_known_args(list(argv))[1]
    names = {token.partition("=")[0].replace("-", "_") for token in rest if token.startswith("--")}
    return bool(rest and not rest[0].startswith("-")) or bool(names & {"__model_name_or_path", "__config"})


def plans(argv: Sequence[str]) -> Iterator[Plan]:
    """Yield plans of the models, the largest first, until `ENOUGH` models fit."""
    fitting = 0
    for name, config in SHELF.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            request, _ = parse_request([str(path), *argv])
            named = request.command.but(model_name_or_path=name)
            plan = replace(plan_of_request(replace(request, command=named, longest=False)), model=name)
        fitting += plan.chosen is not None
        yield plan
        if fitting == ENOUGH:
            return
