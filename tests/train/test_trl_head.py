"""isotype's loss in place of TRL's: the same numbers for every trainer that has TRL's head."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers
from rich.console import Console
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

import isotype.lora.loss.trl_head
import isotype.train.trainer
from isotype.data.methods import METHODS
from isotype.lora.loss.logits import head_of
from isotype.lora.loss.trl_head import put_head, use_own_head
from isotype.records.request import LossOf
from isotype.train import training
from isotype.train.preflight.synthetic import step_inputs
from tests.measured_step import measure_step
from tests.pairwise import pairwise
from tests.parsed import parse_settings
from tests.train.test_trainer import adapted, trainer_of
from tests.train.tiny import rows, save_chat_model, save_rows
from tests.zoo import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the calls of isotype's loss by trainers."""
    seen: list[Any] = []
    actual = isotype.lora.loss.trl_head.log_probs

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return actual(*args, **kwargs)

    monkeypatch.setattr(isotype.lora.loss.trl_head, "log_probs", spy)
    return seen


METRICS = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm")


MORE: dict[str, dict[str, Any]] = {
    "nll": {},
    "dft": {"loss_type": "dft"},
    "smoothing": {"label_smoothing_factor": 0.1},
    "accumulated": {"gradient_accumulation_steps": 2},
    "all tokens": {"padding_free": False, "completion_only_loss": False},
}


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        pytest.param(
            dtype,
            more,
            id=f"{name}-{dtype}",
            # how a loss is asked for and the dtype it is computed in meet in tests/lora/test_loss.py
            marks=()
            if (name, dtype) in (("nll", "bfloat16"), ("dft", "float32"))
            else pytest.mark.exhaustive,
        )
        for name, more in MORE.items()
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_sft_as_with_trl(
    path: Path,
    tmp_path: Path,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    more: dict[str, Any],
) -> None:
    gradients, logged, evaluated, used = [], [], [], []
    for own in (True, False):
        model, policy = adapted(path, dtype)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # for smoothed labels TRL runs the model twice, and draws twice
        autocast = {"bf16": policy.autocast == torch.bfloat16, "fp16": policy.autocast == torch.float16}
        if not own:
            monkeypatch.setattr(isotype.train.trainer, "use_own_head", lambda trainer: None)
        trainer = trainer_of(model, path, tmp_path / str(own), max_steps=2, **{**autocast, **more})
        isotype.enforce(trainer, policy)
        before = len(calls)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        transformers.set_seed(1)
        with trainer.accelerator.autocast():
            loss = trainer.compute_loss(trainer.model.train(), dict(batch))
        loss.backward()
        gradients.append({n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None})
        trainer.model.zero_grad()
        trainer.train()
        logged.append([entry for entry in trainer.state.log_history if "loss" in entry])
        evaluated.append(trainer.evaluate())
        used.append(len(calls) > before)
    assert used == [True, False]
    tolerance = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}[dtype]
    for ours, theirs in zip(*logged, strict=True):
        for name in METRICS:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name
    assert evaluated[0]["eval_loss"] == pytest.approx(evaluated[1]["eval_loss"], rel=tolerance)
    assert gradients[0].keys() == gradients[1].keys()
    scale = max(grad.abs().max() for grad in gradients[1].values())
    for name, grad in gradients[0].items():
        assert (grad - gradients[1][name]).abs().max() < tolerance * scale, name


FLAGS = {
    "grpo": "--num_generations 2 --max_completion_length 6 --beta 0.1 "
    "--reward_funcs tests.train.tiny.reward_by_words",
    "rloo": "--num_generations 2 --max_completion_length 6 --reward_funcs tests.train.tiny.reward_by_words",
}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("sft", "--lora_modules_to_save lm_head"),
        pytest.param("sft", "--use_peft false", marks=pytest.mark.exhaustive),
        pytest.param("dpo", "", marks=pytest.mark.exhaustive),
        ("dpo", "--use_weighting true"),
        pytest.param("dpo", "--use_peft false --dtype bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("kto", "", marks=pytest.mark.exhaustive),
        pytest.param("grpo", "", marks=pytest.mark.exhaustive),
        ("grpo", "--entropy_coef 0.1 --temperature 0.7"),
        pytest.param("rloo", "", marks=pytest.mark.exhaustive),
    ],
)
def test_methods_as_with_trl(
    path: Path, tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch, method: str, more: str
) -> None:
    data = save_rows(tmp_path / "data.jsonl", rows(method))
    losses: list[list[float]] = []
    used = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr(isotype.train.trainer, "use_own_head", lambda trainer: None)
        dtype = "" if "--dtype" in more else "--dtype float32"
        arguments = f"""--model_name_or_path {path} --dataset_name {data} --output_dir {tmp_path / str(own)} {dtype}
            --max_steps 2 --logging_steps 1 --learning_rate 1e-3 --per_device_train_batch_size 2 --seed 0
            --gradient_checkpointing False --report_to none --lora_dropout 0 {FLAGS.get(method, "")} {more}"""
        before = len(calls)
        outcome = training.run(parse_settings(METHODS[method], arguments.split()), Console(quiet=True))
        losses.append([step.loss for step in outcome.record.steps])
        used.append(len(calls) > before)
    assert used == [True, False]
    tolerance = 2e-2 if "bfloat16" in more else 1e-4
    assert losses[0] == pytest.approx(losses[1], rel=tolerance, abs=tolerance)


SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"final_logit_softcapping": 2.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0}),
    "phi, with a bias": ("PhiConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "output_router_logits": True}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "output_router_logits": True}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "output_router_logits": True,
        },
    ),
}
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def causal(family: str) -> Any:
    config, more = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES, **more))
    for parameter in model.get_output_embeddings().parameters():
        parameter.data.normal_()  # logits that the soft cap and the scale do something to
    return model.train()


def given() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 128, (2, 9), generator=draw)
    labels = ids.masked_fill(torch.rand(2, 9, generator=draw) < 0.3, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def holder(model: Any, **more: Any) -> Any:
    """Return an object with the members of a trainer that `use_own_head` reads."""
    known = {"args": SimpleNamespace(entropy_coef=0.1), "label_smoother": None, "compute_loss_func": None}
    return SimpleNamespace(model=model, **{**known, **more})


@pairwise("family, shifted, items", FAMILIES, [False, True], [None, 5])
def test_families_as_with_trl(family: str, shifted: bool, items: int | None, calls: list[Any]) -> None:
    outputs, gradients = [], []
    for own in (True, False):
        model = causal(family)
        add_fused_lm_head(model, temperature=0.8, outputs=OUTPUTS)
        if own:
            use_own_head(holder(model))
        batch = given()
        if shifted:
            batch["shift_labels"] = batch.pop("labels")
        found = model(**batch, fused_lm_head=True, num_items_in_batch=items)
        assert isinstance(found, FusedCausalLMOutput)
        (found.loss + 0.1 * found.entropy.sum()).backward()
        outputs.append(found)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert len(calls) == 1
    ours, theirs = outputs
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.allclose(ours[name].float(), theirs[name].float(), atol=1e-4), name
    for name, grad in gradients[1].items():
        other = gradients[0][name]
        assert (grad is None) == (other is None), name
        assert grad is None or (other - grad).abs().max() <= 1e-4 * grad.abs().max().clamp_min(1), name


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gpt2", "opt", "bloom", "falcon_h1", "minicpm3", "hyperclovax", "mpt", "gemma3n_text"),
        *("llava-vl", "qwen2_vl-vl", "gemma3-vl"),
        # Their logits are more than a projection.
        *("bert", "electra", "llama4_text", "modernbert-decoder", "inkling_text", "prophetnet"),
        *("chameleon-vl", "aya_vision-vl", "cohere2_vision-vl", "mllama-vl"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_loss_of_the_models_own_logits(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model: Any = architecture.build(torch.float32).eval()
    batch = architecture.batch()
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1].float()
        put_head(model)
        found = model(**batch, labels=labels, fused_lm_head=True)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    assert torch.allclose(-found.log_probs.flatten(), expected, atol=1e-4)
    logp = logits.log_softmax(-1)
    mask = labels[:, 1:] != -100
    assert torch.allclose(found.entropy, -(logp.exp() * logp).sum(-1) * mask, atol=1e-3)
    assert torch.equal(found.is_top1, (logits.argmax(-1) == labels[:, 1:]) & mask)


def test_other_calls() -> None:
    model = causal("llama").eval()
    batch = given()
    plain = model(**batch)
    text = model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
    add_fused_lm_head(model)
    use_own_head(holder(model))
    again = model(**batch)
    assert torch.equal(again.logits, plain.logits)
    assert torch.equal(again.loss, plain.loss)
    assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False), text)


def test_a_batch_without_labels() -> None:
    model = causal("llama")
    add_fused_lm_head(model)
    use_own_head(holder(model))
    batch = given()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = model(**batch, fused_lm_head=True).loss
    loss.backward()
    assert loss.item() == 0
    assert not model.model.embed_tokens.weight.grad.any()


def test_a_copy_computes_with_its_own_weights() -> None:
    model = causal("llama")
    add_fused_lm_head(model)
    use_own_head(holder(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert twin(**given(), fused_lm_head=True).loss.item() == pytest.approx(torch.tensor(128.0).log().item())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_head(kind: str) -> None:
    """TRL's function would multiply by the packed bytes."""
    model = causal("llama").requires_grad_(False)
    dense = model.lm_head
    quantized: Any
    if kind == "nf4":
        quantized = bnb.nn.Linear4bit(32, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    else:
        quantized = bnb.nn.Linear8bitLt(32, 128, bias=False, has_fp16_weights=False)
    quantized.load_state_dict(dense.state_dict())
    model.lm_head = quantized.to("cpu")
    add_fused_lm_head(model)
    use_own_head(holder(model))
    exact = head_of(model).weight
    assert exact.shape == dense.weight.shape
    # What the layer itself multiplies with; int8's own forward rounds its input, too.
    with torch.no_grad():
        own = model.lm_head(torch.eye(32)).t()
    assert (exact.float() - own).abs().max() < {"nf4": 1e-6, "int8": 0.02}[kind]
    batch = given()
    hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1]
    logits = torch.nn.functional.linear(hidden.double(), exact.double())
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert model(**batch, fused_lm_head=True).loss.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    "method", ["sft", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("dpo", "grpo"))]
)
def test_a_check_foretells_the_memory_of_this_loss(method: str) -> None:
    """The vocabulary is so large that whole logits would be most of the memory."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 20_000, "max_position_embeddings": 256})
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules="all-linear")
    )
    put_head(model)
    inputs = step_inputs(method, model.train(), 2, 256, completion=100)
    step = (lambda model: inputs.function(model, inputs.inputs)) if isinstance(inputs, LossOf) else inputs
    foretold = isotype.check(model, step, device="cpu", autocast=False, learning_rate=1e-4, verify=False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with measure_step(model, {}) as measured:
        step(model).backward()
        optimizer.step()
    assert foretold.memory.peak == pytest.approx(measured.memory.peak, rel=0.05)
    logits = 2 * 256 * 20_000 * 4
    assert foretold.memory.peak - sum(foretold.memory.phases["load"].values()) < logits


def test_adapter_on_the_head_is_refused() -> None:
    model = causal("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["lm_head"]), model)
    with pytest.raises(ValueError, match=r"a LoRA adapter on the language-model head is not supported"):
        head_of(model)
