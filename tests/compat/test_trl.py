"""TRL still keeps the arguments of its fused head where `isotype.compat.trl` reads them."""

from __future__ import annotations

import ast
import copy
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import trl.trainer.utils

import isotype
from isotype.compat.trl import (
    NAMES,
    head_arguments,
    headless_forward,
    incompatibilities,
    is_fused_forward,
    lacking,
    lacking_inside,
    put_forward,
)

SOURCE = Path(isotype.__file__).parent


def test_the_arguments_of_a_head_are_in_the_closure_of_its_forward() -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    assert not is_fused_forward(model.forward)
    trl.trainer.utils.add_fused_lm_head(model, temperature=0.5, cast_lm_head_to_fp32=True)
    assert is_fused_forward(model.forward)
    assert head_arguments(model.forward.__func__) == {
        "temperature": 0.5,
        "cast_lm_head_to_fp32": True,
        "outputs": ("log_probs",),
    }
    assert incompatibilities(trl.trainer.utils) == []
    put_forward(model, lambda self: None)
    copied = copy.deepcopy(model)  # TRL's forward of the copy calls the original
    assert headless_forward(copied).__self__ is copied
    assert headless_forward(copied).__func__ is transformers.LlamaForCausalLM.forward


def add_fused_lm_head(model: Any, temp: float = 1.0, outputs: tuple[str, ...] = ()) -> Any:
    """As a later TRL might have it: one argument renamed, one gone."""

    def forward() -> Any:
        return temp, outputs

    return forward


def test_a_renamed_variable_is_named_before_a_head_is_made_and_after() -> None:
    later = SimpleNamespace(__name__="trl.trainer.utils", add_fused_lm_head=add_fused_lm_head)
    assert incompatibilities(later) == [
        "the forward of add_fused_lm_head does not store temperature",
        "the forward of add_fused_lm_head does not store cast_lm_head_to_fp32",
    ]
    assert incompatibilities(SimpleNamespace(__name__="trl.trainer.utils")) == [
        "trl.trainer.utils has no add_fused_lm_head"
    ]
    with pytest.raises(LookupError, match="does not store temperature, cast_lm_head_to_fp32"):
        head_arguments(add_fused_lm_head(None))


def test_every_name_that_is_imported_from_trl_is_one_that_is_looked_for() -> None:
    texts = (file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))
    trees = (ast.parse(text) for text in texts if "trl" in text)
    imported = {
        (node.module, alias.name)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trl"
        for alias in node.names
    }
    looked_for = {(module, name) for module, names in NAMES.items() for name in names}
    assert {pair for pair in imported if ".".join(pair) not in NAMES} <= looked_for
    assert not lacking()
    assert not lacking_inside()


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_completions_are_kept_where_a_checkpoint_looks_for_them(name: str) -> None:
    source = inspect.getsource(getattr(trl, name))
    assert "self._buffered_inputs = None" in source
    assert "self._step = 0" in source
