"""A DeepSpeed config that contradicts the arguments is refused before the training, with both sides."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from isotype.core.errors import PrecisionError
from isotype.data.methods import METHODS
from isotype.train.command.settings import Settings
from isotype.train.launched import check_dtype, config_problems
from isotype.train.validate import argument_problems
from tests.parsed import parse_settings

NO_DEEPSPEED = "" if find_spec("deepspeed") else "DeepSpeed is not installed"


def settings_with(config: Any, *argv: str) -> Settings:
    config = config if isinstance(config, str) else json.dumps(config)
    return parse_settings(METHODS["sft"], ["--model_name_or_path", "m", "--deepspeed", config, *argv])


@pytest.mark.parametrize(
    ("config", "conflict", "fix"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled true and bf16.enabled true", "in both"),
        ({"train_micro_batch_size_per_gpu": 3}, "and --per_device_train_batch_size 4", "_size 3"),
        ({"train_batch_size": 6}, "train_batch_size 6", "auto"),
        ({"bf16": {"enabled": "true"}}, 'bf16.enabled "true"', "remove the quotes"),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping "1.0"', "remove the quotes"),
        ({"gradient_clipping": 0.5}, "and --max_grad_norm 1", "--max_grad_norm 0.5"),
        ({"optimizer": {"params": {"lr": 1e-5}}}, "and --learning_rate 2e-05", "--learning_rate 1e-05"),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "[0.9, 0.999]", "auto"),
    ],
)  # fmt: skip
def test_a_contradiction_names_both_sides(config: Any, conflict: str, fix: str) -> None:
    (problem,) = config_problems(settings_with(config, "--per_device_train_batch_size", "4"))
    assert conflict in problem.given
    assert fix in problem.fix
    assert problem in argument_problems(settings_with(config, "--per_device_train_batch_size", "4"))


def test_a_config_that_agrees_or_leaves_values_open(tmp_path: Path) -> None:
    config = {
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": True},
        "gradient_clipping": "auto",
        "train_batch_size": 16,
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    settings = settings_with(str(file), "--per_device_train_batch_size", "4")
    assert not list(config_problems(settings))
    check_dtype(settings, torch.bfloat16)
    none = settings_with(config, "--per_device_train_batch_size", "0")  # the problem is that of the argument
    assert not list(config_problems(none))
    assert argument_problems(none)
    absent = settings_with(str(tmp_path / "none.json"))  # DeepSpeed's error names the file
    assert not list(config_problems(absent))


@pytest.mark.parametrize(
    ("section", "enabled", "compute"),
    [
        ("fp16", True, torch.bfloat16),
        ("bf16", True, torch.float16),
        ("bf16", True, torch.float32),
        ("bf16", False, torch.bfloat16),
    ],
)
def test_the_config_enables_the_compute_dtype(section: str, enabled: bool, compute: torch.dtype) -> None:
    with pytest.raises(PrecisionError, match=rf"{section}.enabled {str(enabled).lower()} in .*compute dtype"):
        check_dtype(settings_with({section: {"enabled": enabled}}), compute)


@pytest.mark.lacking(NO_DEEPSPEED)
def test_open_values_are_filled_with_the_dtype_of_the_policy() -> None:
    config = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    filled = settings_with(config).but(bf16=True, fp16=False, mixed_precision="bf16").training
    assert filled.hf_deepspeed_config.config["bf16"]["enabled"] is True
