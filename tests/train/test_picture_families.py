"""Vision-language models with their own processors: trained by the command, and compared with transformers and PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import isotype
from isotype.cli.main import main
from isotype.compat.bitsandbytes import dequantize_4bit
from isotype.model.experts.stack import quantized_stack
from isotype.model.parts import Parts
from isotype.train.rows.collators import Pictured
from tests.models import quiet
from tests.pairwise import few
from tests.policy import autocast
from tests.zoo.processors import FAMILIES, picture_rows, save_picture_rows, save_vision_model

pytest.importorskip("PIL", reason="needs the package pillow")
CORE = ("gemma3", "llava_next", "idefics3")


def _lacking(name: str) -> str:
    if FAMILIES[name].pil:
        return ""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return "needs the package torchvision"
    return ""


needs_torchvision = pytest.mark.lacking(_lacking("qwen2_vl"))


def of_families(core: Collection[str] = CORE) -> Callable[..., Any]:
    """Parametrize over the families; all but those of `core` are `exhaustive`."""
    marks = {name: [pytest.mark.exhaustive, pytest.mark.lacking(_lacking(name))] for name in FAMILIES}
    params = [pytest.param(name, marks=[] if name in core else marks[name]) for name in FAMILIES]
    return pytest.mark.parametrize("name", params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family's name to the folder of its model and processor."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = save_vision_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return directory


def batch_of(folder: Path, rows: int = 2) -> Any:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    return Pictured(processor)(picture_rows(rows))


def cast(batch: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Cast Llama 4's bfloat16 inputs, which a plain model in another dtype does not accept."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    with quiet():
        return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)


def adapted(folder: Path, dtype: str, quantization: str | None) -> tuple[Any, isotype.PrecisionPolicy]:
    """Return the fused model under its policy, with adapters that are not zero."""
    policy = isotype.resolve_precision(folder, dtype=dtype, quantization=quantization, device="cpu")
    model = isotype.add_lora(isotype.load(folder, policy), policy, r=4)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn_like(parameter))
    isotype.fuse(model)
    return model, policy


def dense_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the float32 values of the weights that a model holds in 4 bits, by name."""
    for name, module in model.get_base_model().named_modules():
        plain = name.replace(".base_layer", "")
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            yield f"{plain}.weight", dequantize_4bit(module.weight.data, state).float()
        for own in getattr(module, "parametrizations", ()):
            if quantized_stack(module, own) is not None:
                yield f"{plain}.{own}", getattr(module, own).float()


def plain_with_adapter(ours: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model with PEFT's adapter and the values of `ours`."""
    base = plain_model(folder, dtype)
    with torch.no_grad():
        for name, values in dense_weights(ours):
            base.get_parameter(name).copy_(values)
    base.requires_grad_(False)
    theirs = get_peft_model(base, ours.peft_config["default"])
    values = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values.pop(name))
    assert not values
    return theirs


def step_of(
    model: Any, batch: Any, policy: isotype.PrecisionPolicy | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of one step."""
    model.train()
    if policy is None:
        loss = model(**batch).loss
    else:
        with autocast(policy):
            loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def distance(gradients: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Return the relative distance of all gradients together from the exact gradients."""
    assert gradients.keys() == exact.keys()
    off = sum(float((gradients[name] - each).square().sum()) for name, each in exact.items())
    return (off / sum(float(each.square().sum()) for each in exact.values())) ** 0.5


@few(
    "name, quantization",
    [(name, storage) for name in FAMILIES if not _lacking(name) for storage in (None, "nf4")],
    *((name, None) for name in CORE),
    ("gemma3", "nf4"),
)
def test_a_step_in_float32_is_that_of_plain_transformers_and_peft(
    folder: Any, name: str, quantization: str | None
) -> None:
    model, policy = adapted(folder(name), "float32", quantization)
    batch = batch_of(folder(name))
    loss, gradients = step_of(model, batch, policy)
    exact = plain_with_adapter(model, folder(name), torch.float32)
    expected, exactly = step_of(exact, cast(batch, torch.float32))
    assert abs(loss - expected) < 1e-5
    assert distance(gradients, {name: exactly[name] for name in gradients}) < 1e-5
    assert not any(each.any() for name, each in exactly.items() if name not in gradients)


@few(
    "name, dtype",
    [(name, dtype) for name in FAMILIES if not _lacking(name) for dtype in ("bfloat16", "float16")],
    ("gemma3", "bfloat16"),
    ("llava_next", "float16"),
)
def test_a_step_in_16_bits_is_as_near_to_float32_as_that_of_peft(folder: Any, name: str, dtype: str) -> None:
    model, policy = adapted(folder(name), dtype, None)
    batch = batch_of(folder(name))
    loss, gradients = step_of(model, batch, policy)
    exact = plain_with_adapter(model, folder(name), torch.float32)
    expected, exactly = step_of(exact, cast(batch, torch.float32))
    low = policy.compute
    theirs = plain_with_adapter(model, folder(name), low)
    with torch.autocast("cpu", low):
        their_loss, their_gradients = step_of(theirs, cast(batch, low))
    assert abs(loss - expected) < max(2 * abs(their_loss - expected), 1e-2 if dtype == "bfloat16" else 1e-3)
    near = {name: exactly[name] for name in gradients}
    theirs_off = distance({name: their_gradients[name] for name in gradients}, near)
    assert distance(gradients, near) < 1.2 * theirs_off


def balance(folder: Path, batch: Any) -> float:
    """Return the load-balancing loss that TRL adds for a mixture of experts."""
    model = plain_model(folder)
    config = model.config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        return 0.0
    logits = model(**batch, output_router_logits=True).router_logits
    experts, chosen = config.num_local_experts, config.num_experts_per_tok
    return config.router_aux_loss_coef * float(
        load_balancing_loss_func(logits, experts, chosen, batch["attention_mask"])
    )


@pytest.mark.usefixtures("unchecked")
@of_families(["idefics3"])
def test_the_command_trains_merges_and_what_it_saves_loads_in_plain_libraries(
    folder: Any,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = save_picture_rows(tmp_path / "train.jsonl", 2)
    root = folder(name)
    assert not main([
        "sft", "--model_name_or_path", str(root), "--dataset_name", str(rows), "--output_dir", "out", "--max_steps", "1",
        "--per_device_train_batch_size", "2", "--learning_rate", "1e-2", "--report_to", "none", "--device", "cpu",
        "--dtype", "float32", "--logging_steps", "1",
    ]), capsys.readouterr()  # fmt: skip
    batch = cast(batch_of(root), torch.float32)
    before = float(plain_model(root)(**batch).loss)
    record = json.loads(Path("out/run_report.json").read_text())
    assert abs(record["steps"][0]["loss"] - before - balance(root, batch)) < 1e-4
    adapter = PeftModel.from_pretrained(plain_model(root), "out")
    after = float(adapter(**batch).loss)
    assert after < before
    capsys.readouterr()
    assert not main(["merge", "out", "-o", "merged"]), capsys.readouterr()
    kept = re.search(
        r"kept +(\S+) %.*, 63 of them after an image\)", " ".join(capsys.readouterr().out.split())
    )
    assert kept is not None
    assert float(kept[1]) == 100
    assert main(["merge", "out", "-o", "merged.gguf", "--gguf", "f16"]) == 2
    assert "mmproj" in capsys.readouterr().err
    assert abs(float(plain_model(Path("merged"))(**batch).loss) - after) < 1e-5
    assert transformers.AutoProcessor.from_pretrained("merged").image_processor is not None


@pytest.mark.usefixtures("unchecked")
def test_full_training_of_one_part_leaves_the_other_parts_as_they_were(
    folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """hiyouga/LLaMA-Factory freezes tower and projector by default, also if it trains the other weights."""
    monkeypatch.chdir(tmp_path)
    rows, root = save_picture_rows(tmp_path / "train.jsonl", 2), folder("llava")
    command = [
        "sft", "--model_name_or_path", str(root), "--dataset_name", str(rows), "--output_dir", "out", "--max_steps", "1",
        "--per_device_train_batch_size", "2", "--learning_rate", "1e-2", "--report_to", "none", "--device", "cpu",
        "--dtype", "float32", "--use_peft", "False", "--adapt",
    ]  # fmt: skip
    assert main([*command, "audio"]) == 2
    assert "expected  language, projector, vision" in capsys.readouterr().err
    assert not main([*command, "language"]), capsys.readouterr()
    parts, before = Parts(plain_model(root)), dict(plain_model(root).named_parameters())
    changed = {
        parts.of(name)
        for name, weight in plain_model(Path("out")).named_parameters()
        if not torch.equal(weight, before[name])
    }
    assert changed == {"language"}
    capsys.readouterr()
    assert not main(["check", *command, "language", "--json"])
    memory = json.loads(capsys.readouterr().out)["memory"]["phases"]["optimizer"]
    trained = sum(weight.numel() for name, weight in before.items() if parts.of(name) == "language")
    assert memory["optimizer"] == pytest.approx(8 * trained, rel=0.02)
