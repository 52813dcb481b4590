"""What other programs do with an adapter: by the rules of `consumers`, and by PEFT itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from isotype.checkpoint.adapter import read_adapter
from isotype.checkpoint.consumers import CONSUMERS, Fit, changes_nothing, fit_of
from isotype.checkpoint.merge.merge import merge_adapter
from isotype.cli.main import main
from isotype.core.errors import CheckpointError, UsageError
from tests.models import quiet
from tests.zoo import ARCHITECTURES
from tests.zoo.processors import tiny_vision_model

LAYERS = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return a text model, and a vision-language model of the same sizes with another name for its language model."""
    root = tmp_path_factory.mktemp("models")
    with quiet():
        ARCHITECTURES["llama"].build(torch.float32).save_pretrained(root / "text")  # type: ignore[operator]
        tiny_vision_model("llava", torch.float32).save_pretrained(root / "sees")
    return {"text": root / "text", "sees": root / "sees"}


def trained(models: Mapping[str, Path], directory: Path, zero: str = "", **settings: Any) -> Path:
    """Save a PEFT adapter whose values are not zero, except B of the layers whose names contain `zero`."""
    import transformers

    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(models["text"])
        defaults = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
        adapted = peft.get_peft_model(model, peft.LoraConfig(**{**defaults, **settings}))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name and not (zero and zero in name):
                torch.nn.init.normal_(parameter)
        adapted.save_pretrained(directory)
    return directory


def effects(fit: Fit) -> dict[str, str]:
    return {use.module.rpartition(".")[2]: use.effect for use in fit.uses}


@pytest.mark.parametrize(
    ("before", "after"), [("base_model", "module.base_model"), ("self_attn", "_orig_mod.self_attn")]
)
def test_names_that_a_wrapper_has_changed(
    models: Mapping[str, Path], tmp_path: Path, before: str, after: str
) -> None:
    """MakazhanAlpamys/Soup #351: PEFT ignores the tensors of a checkpoint under torch.compile."""
    import transformers

    path = trained(models, tmp_path, target_modules=["q_proj"])
    file = path / "adapter_model.safetensors"
    save_file({name.replace(before, after): value for name, value in load_file(file).items()}, file)
    with quiet():
        base = transformers.AutoModelForCausalLM.from_pretrained(models["text"])
        with pytest.warns(UserWarning, match="Found missing adapter keys"):
            applied = peft.PeftModel.from_pretrained(base, str(path))
    assert not any(bool(value.any()) for name, value in applied.named_parameters() if "lora_B" in name)
    (use,) = fit_of(path, "peft").uses
    assert use.effect == "ignored"
    assert use.fix.startswith(f"remove `{after.partition('.')[0]}.`")
    with pytest.raises(CheckpointError, match="from the names in the file"):
        merge_adapter(path, tmp_path / "merged")


@pytest.mark.parametrize("program", CONSUMERS)
def test_a_plain_adapter_is_applied_everywhere(
    program: str, models: Mapping[str, Path], tmp_path: Path
) -> None:
    fit = fit_of(trained(models, tmp_path), program)
    assert fit.ok
    assert [(use.module, use.tensors) for use in fit.uses] == [
        ("model.layers.*.mlp.down_proj", 2 * LAYERS),
        ("model.layers.*.self_attn.q_proj", 2 * LAYERS),
    ]


@pytest.mark.parametrize(
    ("settings", "program", "expected"),
    [
        ({"use_rslora": True}, "llama.cpp", {"q_proj": "changed", "down_proj": "changed"}),
        ({"use_rslora": True}, "vllm", {"q_proj": "applied", "down_proj": "applied"}),
        ({"alpha_pattern": {"q_proj": 64}}, "vllm", {"q_proj": "changed", "down_proj": "applied"}),
        ({"alpha_pattern": {"q_proj": 64}}, "llama.cpp", {"q_proj": "changed", "down_proj": "applied"}),
        ({"rank_pattern": {"q_proj": 2}}, "vllm", {"q_proj": "changed", "down_proj": "applied"}),
        ({"rank_pattern": {"q_proj": 2}}, "llama.cpp", {"q_proj": "applied", "down_proj": "applied"}),
        ({"lora_alpha": 0}, "peft", {"q_proj": "ignored", "down_proj": "ignored"}),
        ({"zero": "q_proj"}, "vllm", {"q_proj": "ignored", "down_proj": "applied"}),
    ],
)
def test_the_scale_of_each_layer_is_compared(
    settings: dict[str, Any],
    program: str,
    expected: dict[str, str],
    models: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    assert effects(fit_of(trained(models, tmp_path, **settings), program)) == expected


@pytest.mark.parametrize("program", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("settings", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_what_is_refused(
    program: str, settings: dict[str, Any], models: Mapping[str, Path], tmp_path: Path
) -> None:
    adapter = trained(models, tmp_path, **settings)
    assert "refused" in effects(fit_of(adapter, program)).values()
    assert fit_of(adapter, "peft").ok


def test_names_that_another_class_of_the_model_lacks(models: Mapping[str, Path], tmp_path: Path) -> None:
    """A text adapter on a vision-language model: vLLM and PEFT load it without an error, and answer like the base."""
    import transformers

    adapter = trained(models, tmp_path)
    for program, effect in (("vllm", "ignored"), ("peft", "ignored"), ("llama.cpp", "refused")):
        fit = fit_of(adapter, program, models["sees"])
        assert set(effects(fit).values()) == {effect}
        assert {use.why for use in fit.uses} == {"the model has no module of this name"}
    with quiet():
        model = transformers.LlavaForConditionalGeneration.from_pretrained(models["sees"])
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        result = peft.set_peft_model_state_dict(adapted, load_file(adapter / "adapter_model.safetensors"))
    assert len(result.unexpected_keys) == sum(use.tensors for use in fit.uses)


def test_a_rank_above_vllms_needs_its_flag(models: Mapping[str, Path], tmp_path: Path) -> None:
    fit = fit_of(trained(models, tmp_path, r=32), "vllm")
    assert fit.ok
    assert fit.notes == ("rank 32: start vLLM with --max-lora-rank 32",)


@pytest.mark.parametrize(
    ("zero", "settings", "nothing"),
    [
        ("", {}, False),
        ("q_proj", {}, False),
        ("proj", {}, True),
        ("proj", {"use_dora": True}, True),
        ("proj", {"modules_to_save": ["lm_head"]}, False),
    ],
)
def test_an_adapter_that_changes_nothing(
    models: Mapping[str, Path], tmp_path: Path, zero: str, settings: dict[str, Any], nothing: bool
) -> None:
    assert changes_nothing(read_adapter(trained(models, tmp_path, zero, **settings))) == nothing


def test_in_a_terminal(
    models: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = trained(models, tmp_path, zero="q_proj")
    assert main(["inspect", str(adapter), "--for", "vllm", str(models["text"])]) == 1
    printed = capsys.readouterr().out
    assert "ignored: 4 tensors: its B is zero; train it" in " ".join(printed.split())
    assert main(["inspect", str(adapter), "--for", "peft", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["uses"][1]["effect"] == "ignored"
    assert main(["inspect", str(adapter), "--for", "vlm"]) == 2
    assert "a program (peft, vllm, llama.cpp)" in capsys.readouterr().err


def test_an_adapter_without_a_base(models: Mapping[str, Path], tmp_path: Path) -> None:
    adapter = trained(models, tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(UsageError, match="--for vllm MODEL"):
        fit_of(adapter, "vllm")
    assert fit_of(adapter, "vllm", models["text"]).ok
