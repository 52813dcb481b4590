"""Models with sound inputs: check, add_lora and fuse, and a step in each dtype compared with transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model

import isotype
from isotype.cli.main import main
from isotype.model.parts import Parts
from tests.models import quiet
from tests.pairwise import pairwise
from tests.policy import assert_policy_holds, autocast
from tests.zoo import ARCHITECTURES
from tests.zoo.shrink import tiny_config

SOUND = 120
_ENCODER = {"max_source_positions": 16, "num_mel_bins": 8}


def voxtral() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a language model with sound: a batch of two rows with four sound tokens."""
    sizes = {**_ENCODER, "intermediate_size": 128, "hidden_size": 32}
    torch.manual_seed(0)
    model = transformers.VoxtralForConditionalGeneration(
        tiny_config("voxtral", {"audio_config": sizes, "audio_token_id": SOUND})
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, SOUND, (2, 20), generator=generator)
    ids[:, 2:6] = SOUND
    return model, {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == SOUND, -100),
        "input_features": torch.randn(2, 8, 32, generator=generator),
    }


def whisper() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return an encoder of sound with a decoder of text."""
    return ARCHITECTURES["whisper-s2s"].build(torch.float32), ARCHITECTURES["whisper-s2s"].batch()


MODELS = [voxtral, whisper]


@pytest.fixture(scope="module", params=MODELS, ids=lambda make: make.__name__)
def heard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Return (folder, class, batch)."""
    model, batch = request.param()
    folder = tmp_path_factory.mktemp(request.param.__name__)
    with quiet():
        model.save_pretrained(folder)
    return folder, type(model), batch


PRECISIONS = [
    ("float32", None),
    pytest.param("bfloat16", None, marks=pytest.mark.exhaustive),
    ("float16", None),
    ("float32", "nf4"),
    pytest.param("bfloat16", "int8", marks=pytest.mark.exhaustive),
]


@pairwise(["heard", "dtype, quantization"], MODELS, PRECISIONS, strength=1, indirect=["heard"])
def test_a_step_in_each_dtype(heard: tuple[Path, Any, Any], dtype: str, quantization: str | None) -> None:
    folder, kind, batch = heard
    policy = isotype.resolve_precision(folder, dtype, quantization, "cpu")
    model = isotype.add_lora(isotype.load(folder, policy), policy, r=4)
    report = isotype.check(model, batch, policy, verify=False)
    assert report.ok, str(report)
    assert not report.unseen
    assert isotype.fuse(model).fused
    assert_policy_holds(model, policy)
    model.train()
    with autocast(policy):
        loss = model(**batch).loss
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    assert any(p.grad.any() for p in trained)
    with torch.no_grad():  # as evaluation runs it: without autocast
        assert abs(float(model(**batch).loss) - float(loss.detach())) < 0.1
    if quantization is not None:
        return
    plain = kind.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    theirs = get_peft_model(plain, model.peft_config["default"])
    assert (
        abs(float(loss.detach()) - float(theirs(**batch).loss.detach()))
        < {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    )


def test_a_tower_of_sound_is_a_part() -> None:
    model, batch = voxtral()
    parts = Parts(model)
    assert parts.towers == {"model.audio_tower": "audio"}
    policy = isotype.resolve_precision(model, device="cpu")
    heard = isotype.add_lora(model, policy, r=2, adapt="audio")
    names = [name for name, p in heard.named_parameters() if p.requires_grad]
    assert names
    assert all("audio_tower" in name for name in names)
    silent = {name: value for name, value in batch.items() if name != "input_features"}
    silent["input_ids"] = silent["input_ids"].masked_fill(silent["input_ids"] == SOUND, 5)
    model, _ = voxtral()
    deaf = isotype.add_lora(model, policy, r=2, adapt="language")
    assert "the step does not use model.audio_tower" in " ".join(
        str(isotype.check(deaf, silent, policy, verify=False)).split()
    )


@pytest.mark.parametrize("command", ["check", "sft"])
def test_commands_say_what_they_do_not_take(
    heard: tuple[Path, Any, Any], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kind, _ = heard
    rows = tmp_path / "t.jsonl"
    rows.write_text('{"text": "a b"}\n{"text": "c d"}\n')
    arguments = [str(folder)] if command == "check" else [
        "--model_name_or_path", str(folder), "--dataset_name", str(rows), "--output_dir", str(tmp_path / "o"), "--report_to", "none",
    ]  # fmt: skip
    status = main([command, *arguments, "--device", "cpu", "--dtype", "float32"])
    out = " ".join("".join(capsys.readouterr()).split())
    if kind is transformers.WhisperForConditionalGeneration:
        assert status == 2
        assert "input_features" in out, out
    elif command == "check":
        assert status == 0
        assert "the step does not use model.audio_tower" in out
        assert "runs clean" not in out
