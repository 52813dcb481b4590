"""Misspelt arguments that the configs of transformers accept without an error, and reasons of dtypes."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from isotype.rules import judge
from isotype.trace.dtype_history import default_dtypes, remembered
from isotype.trace.script import dtype_reasons, misspelt_arguments, script_files
from tests.rules.samples import trace, weight

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
    return {a: meant for _, a, meant, line in misspelt_arguments() if line == f"{script.__file__}:6"}


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


def test_a_script_that_was_written_again_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("a_script")
    script.__file__ = str(tmp_path / "script.py")
    monkeypatch.setitem(sys.modules, script.__name__, script)
    for text in ("first = 1\n", "the_second = 2\n"):
        Path(script.__file__).write_text(text, encoding="utf-8")
        linecache.checkcache(script.__file__)
        codes = [code for module, code in script_files() if module is script]
        assert codes == [text]
        assert next(code for module, code in script_files() if module is script) is codes[0]


@pytest.fixture
def default_dtype(tmp_path: Path) -> Iterator[Callable[[torch.dtype], None]]:
    """A function of a script that sets the default dtype."""
    code = "import torch\ndef low(dtype):\n    torch.set_default_dtype(dtype)\n"
    script = ModuleType("low")
    exec(compile(code, str(tmp_path / "low.py"), "exec"), vars(script))
    yield script.low
    torch.set_default_dtype(torch.float32)
    default_dtypes.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32])
@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_default_dtype_is_a_reason_only_if_the_script_has_set_it(
    dtype: torch.dtype, restored: bool, recorded: bool, default_dtype: Callable[[torch.dtype], None]
) -> None:
    """A function that sets the dtype may never run."""
    assert dtype_reasons(nn.Linear(2, 2, dtype=dtype)) == {}
    with remembered() if recorded else nullcontext():
        default_dtype(dtype)
    assert dtype_reasons(nn.Linear(2, 2, dtype=torch.float16)) == {}  # no weights in this dtype
    if restored:
        torch.set_default_dtype(torch.float32)
    reasons = dtype_reasons(nn.Linear(2, 2, dtype=dtype))
    assert [*reasons] == ([dtype] if dtype != torch.float32 and (recorded or not restored) else [])
    says = (
        "low.py:3 sets torch's default dtype, so later weights are "
        if recorded
        else "torch's default dtype is "
    )
    assert all(reason.startswith(says) for reason in reasons.values())


@pytest.mark.parametrize("flags", [{}, {"bf16_full_eval": True}])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, None])
def test_an_evaluation_that_cast_the_model_is_a_reason(
    flags: dict[str, bool], stored: torch.dtype | None
) -> None:
    arguments = transformers.TrainingArguments("out", use_cpu=True, report_to=[], **flags)  # type: ignore[arg-type]
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    model.config = SimpleNamespace(dtype=stored)  # type: ignore[assignment]
    reasons = dtype_reasons(model)
    named = "bf16_full_eval=True casts the model in evaluate()" in reasons.get(torch.bfloat16, "")
    assert named == (bool(flags) and stored == torch.float32)
    del arguments


def test_weights_that_the_script_cast_have_no_other_reason(
    default_dtype: Callable[[torch.dtype], None],
) -> None:
    arguments = transformers.TrainingArguments("out", use_cpu=True, report_to=[], bf16_full_eval=True)
    with remembered():
        default_dtype(torch.bfloat16)
        torch.set_default_dtype(torch.float32)
        model = nn.Linear(2, 2).to(torch.bfloat16)
    model.config = SimpleNamespace(dtype=torch.float32)  # type: ignore[assignment]
    assert dtype_reasons(model) == {}
    del arguments


def test_a_reason_follows_the_causes_that_name_its_dtype() -> None:
    weights = [weight("a.weight", torch.bfloat16, trainable=True, largest=1.0, median_magnitude=1.0)]
    step = trace(weights, learning_rate=1e-5)
    plain = {f.code: f.cause for f in judge(step)}
    explained = {
        f.code: f.cause for f in judge(replace(step, reasons={torch.bfloat16: "why", torch.float64: "other"}))
    }
    assert explained["IST801"] == f"{plain['IST801']} (why)"
    assert all(cause in (plain[code], f"{plain[code]} (why)") for code, cause in explained.items())
