"""Misspelt arguments that the configs of transformers accept without an error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers

from isotype.trace.misspelt import misspelt_arguments

CODE = """
import transformers
from transformers import {imported}

def build():
    return {call}
"""


def _meant(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch, imported: str = "LlamaConfig"
) -> dict[str, str]:
    """Return, for code with this call, each misspelt argument and the argument that was meant."""
    script = ModuleType("a_script")
    script.__file__ = str(folder / f"script_{abs(hash(call))}.py")
    Path(script.__file__).write_text(CODE.format(imported=imported, call=call), encoding="utf-8")
    vars(script)[imported.split()[-1]] = getattr(transformers, imported.split()[0])
    monkeypatch.setitem(sys.modules, script.__name__, script)
    found = [wrong for wrong in misspelt_arguments() if wrong.source == f"{script.__file__}:6"]
    return {wrong.argument: wrong.meant for wrong in found}


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        ("Bnb(bnb_4bit_quant_typ='nf4')", {"bnb_4bit_quant_typ": "bnb_4bit_quant_type"}),
        ("Bnb(load_in_4bits=True, double_quant=True)", {"load_in_4bits": "load_in_4bit", "double_quant": "bnb_4bit_use_double_quant"}),
        ("transformers.BitsAndBytesConfig(load_4bit=True)", {"load_4bit": "load_in_4bit"}),
        ("Bnb(load_in_4bit=True, bnb_4bit_quant_type='nf4', **{})", {}),
        ("transformers.AwqConfig(version='gemm')", {}),
    ],
)  # fmt: skip
def test_arguments_of_quantization(
    call: str, meant: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _meant(call, tmp_path, monkeypatch, "BitsAndBytesConfig as Bnb") == meant


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        ("LlamaConfig(num_hidden_layer=2, hiden_size=8)", {"num_hidden_layer": "num_hidden_layers", "hiden_size": "hidden_size"}),
        ("LlamaConfig(rope_theta=1e4, rope_scaling=None, torch_dtype='bfloat16', num_labels=3)", {}),
        ("LlamaConfig(swa_num_attention_heads=2, boi_token_id=3, num_heads=2, my_size=4)", {}),
        ("transformers.GPT2Config(num_hidden_layers=2, n_layer=2)", {}),
        ("dict(num_hidden_layer=2)", {}),
    ],
)  # fmt: skip
def test_arguments_of_a_model_may_be_the_users_own(
    call: str, meant: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _meant(call, tmp_path, monkeypatch) == meant
