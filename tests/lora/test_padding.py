"""Padded batches in fused models: the numbers of plain PEFT everywhere, at the padding too, whoever reads them.

The reference is the same PEFT model in float64, by torch's own kernel; on the right, where every query reads some key, transformers'
eager attention as well. Tolerance: two of these models with float32 sums in different orders differ by about 5e-6 of the norm.
"""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import transformers

import isotype
from isotype.lora.attention.registered import use_fast_attention
from tests.cpus import no_compiler
from tests.models import quiet, tiny_model
from tests.pairwise import pairwise
from tests.zoo import ARCHITECTURES
from tests.zoo.shrink import VOCABULARY, tiny_config

TOLERANCE = 5e-5
ROWS, LENGTH = 3, 12
SIDES = ("right", "left")
Batch = dict[str, torch.Tensor]
Numbers = dict[str, torch.Tensor]

pytestmark = pytest.mark.lacking(no_compiler())


def ids(seed: int = 1, rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 118, (rows, length), generator=torch.Generator().manual_seed(seed))


def present(side: str, length: int = LENGTH, every: bool = False) -> torch.Tensor:
    """Rows of several lengths, int64 `[ROWS, length]`; `every`: the longest is padded, too, as by `padding="max_length"`."""
    rows = [torch.arange(length) < length - cut - 2 * every for cut in (0, 5, 1)]
    mask = torch.stack(rows).long()
    return mask if side == "right" else mask.flip(-1)


def adapted(model: Any, *targets: str, **lora: Any) -> Any:
    """A PEFT model whose adapters are not zero and that drops nothing, so that it is the same in training."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=list(targets) or "all-linear", init_lora_weights=False, **lora
    )
    return peft.get_peft_model(model, config)


def step(model: Any, batch: Batch) -> Numbers:
    """All floating-point results of one step, and all gradients."""
    model.zero_grad()
    outputs = model(**batch)
    results = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    loss = results.get("loss")
    if loss is None:
        loss = torch.stack([value.square().mean() for value in results.values()]).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().clone() for name, value in {**results, **grads}.items()}


def exact(model: Any, batch: Batch, implementation: str, dtype: torch.dtype) -> Numbers:
    twin = copy.deepcopy(model).to(dtype)
    twin.set_attn_implementation(implementation)
    if dtype == torch.float64 and twin._can_set_experts_implementation():
        twin.set_experts_implementation("eager")  # torch's grouped matmul takes no float64
    return step(twin, batch)


def assert_peft_numbers(
    model: Any, batch: Batch, *implementations: str, dtype: torch.dtype = torch.float64
) -> Any:
    """A fused step against plain PEFT's in `dtype`; returns what `fuse` did."""
    references = [exact(model, batch, name, dtype) for name in implementations or ("sdpa",)]
    report = isotype.fuse(model)
    result = step(model, batch)
    for reference in references:
        assert result.keys() == reference.keys()
        gradients = [value.norm() for name, value in reference.items() if "lora_" in name]
        whole = torch.stack(gradients).norm()
        for name, value in reference.items():
            # The gradient of a key's bias is zero but for rounding.
            scale = value.norm() + (0.01 * whole if "lora_" in name else 0)
            assert (result[name].double() - value).norm() <= TOLERANCE * scale, name
    return report


@pairwise(
    "side, name",
    SIDES,
    [
        "bart",
        pytest.param("mbart", marks=pytest.mark.exhaustive),  # and Pegasus: as Bart to what reads padding
        pytest.param("pegasus", marks=pytest.mark.exhaustive),
        "marian",
        "t5",
    ],
    strength=1,
)
def test_source_and_target_of_one_length(name: str, side: str) -> None:
    with quiet():
        model = adapted(ARCHITECTURES[f"{name}-s2s"].build(torch.float32)).train()
    batch = {"input_ids": ids(), "attention_mask": present(side, every=True), "labels": ids(seed=2)}
    batch["labels"][:, -3:] = -100
    # t5 adds its mask to its position bias by the lowest float: a query that reads nothing reads everything there.
    report = assert_peft_numbers(model, batch, "sdpa", *["eager"] * (side == "right"))
    assert report.attention.in_use
    assert bool(report.attention.left) == (name == "t5")


def test_a_target_that_is_padded_on_its_own() -> None:
    model = adapted(ARCHITECTURES["bart-s2s"].build(torch.float32)).train()
    batch = {
        "input_ids": ids(),
        "attention_mask": present("right", every=True),
        "decoder_input_ids": ids(seed=3),
        "decoder_attention_mask": present("left"),
        "labels": ids(seed=2),
    }
    assert_peft_numbers(model, batch)


@pairwise(
    "labels, side, name",
    ["all", "present"],
    SIDES,
    [
        "llama",
        pytest.param("gemma2", marks=pytest.mark.exhaustive),
        "gemma3",
        "qwen3",
        pytest.param("mistral", marks=pytest.mark.exhaustive),
        pytest.param("qwen3-moe", marks=pytest.mark.exhaustive),
        "gpt2",
    ],
    strength=1,
)
def test_labels_at_the_padding(name: str, side: str, labels: str) -> None:
    model = tiny_model(name)
    eager = (
        side == "right"
    )  # on the left there are queries that read nothing: eager attention lets these read everything
    model = adapted(model, fan_in_fan_out=name == "gpt2")
    mask = present(side)
    batch = {"input_ids": ids(), "attention_mask": mask, "labels": ids()}
    if labels == "present":
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    implementation = "eager" if name == "gemma2" else "sdpa"
    # Gemma 2 adds the lowest float64 to scores of queries that read nothing: minus infinity, then NaN. In float32 it does not.
    dtype = torch.float32 if name == "gemma2" and not eager else torch.float64
    assert_peft_numbers(model.train(), batch, implementation, *["eager"] * eager, dtype=dtype)


@pairwise(
    ["side", "kind, cls"],
    SIDES,
    [
        ("bert", "BertModel"),
        ("bert", "BertForTokenClassification"),
        pytest.param("roberta", "RobertaModel", marks=pytest.mark.exhaustive),
        ("roberta", "RobertaForTokenClassification"),
        pytest.param("distilbert", "DistilBertForTokenClassification", marks=pytest.mark.exhaustive),
    ],
    strength=1,
)
def test_encoders_whose_padding_is_read(kind: str, cls: str, side: str) -> None:
    torch.manual_seed(0)
    model = adapted(getattr(transformers, cls)(tiny_config(kind)))
    batch = {"input_ids": ids(), "attention_mask": present(side, every=True)}
    if "Token" in cls:
        batch["labels"] = ids() % 2
    assert_peft_numbers(model.train(), batch, "sdpa", "eager")


def test_more_than_padding_in_a_mask() -> None:
    """Sequences beside padding, images that see themselves: what a model makes of a mask is more than its shape."""
    model = adapted(tiny_model("llama"))
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask &= (present("right") == 1)[:, None, None, :]
    mask[0, :, 6:, :6] = False
    mask[1, :, :4, :4] = True
    mask[2, :, 3] = False
    batch = {"input_ids": ids(), "attention_mask": mask, "labels": ids()}
    assert_peft_numbers(model, batch)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_masks_that_are_added_and_close_whole_queries(lowest: float) -> None:
    """Queries to which every key is closed by -inf read nothing; where it is closed by finite numbers, they read all alike."""
    model = adapted(tiny_model("llama")).eval()
    closed = ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() | (present("left") == 0)[:, None, None, :]
    mask = torch.zeros(closed.shape).masked_fill(closed, lowest)
    batch = {"input_ids": ids(), "attention_mask": mask, "labels": ids()}
    wanted = step(model, batch)
    report = isotype.fuse(model)
    result = step(model, batch)
    for name, value in wanted.items():
        assert (result[name] - value).norm() <= TOLERANCE * value.norm(), name
    reasons = (
        {"the mask hides all keys of some queries by finite numbers instead of -inf"}
        if lowest > -torch.inf
        else set()
    )
    assert set(report.attention.left) == reasons


def test_a_prefix_that_sees_itself() -> None:
    """Gemma 3's pictures: tokens of one image attend to each other, those after them to what is before."""
    with quiet():
        model = adapted(tiny_model("gemma3-vision"), "q_proj", "k_proj", "v_proj", "o_proj").eval()
    tokens = ids()
    tokens[:, 2:6] = 120
    generator = torch.Generator().manual_seed(1)
    batch = {
        "input_ids": tokens,
        "attention_mask": present("right"),
        "token_type_ids": (tokens == 120).long(),
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator),
        "labels": ids(),
    }
    wanted = step(model, batch)
    isotype.fuse(model)
    result = step(model, batch)
    for name, value in wanted.items():
        assert (result[name] - value).norm() <= TOLERANCE * value.norm().clamp_min(1e-3), name


@pairwise(
    "how, name",
    [{}, {"cache_implementation": "static"}, {"num_beams": 3}],
    ["llama", "gemma3", "bart"],
    strength=1,
)
def test_generation_from_padded_prompts(name: str, how: dict[str, Any]) -> None:
    with quiet():
        base = tiny_model(name) if name != "bart" else ARCHITECTURES["bart-s2s"].build(torch.float32)
        model = adapted(base).eval()
    asked = {"attention_mask": present("left"), "max_new_tokens": 6, "do_sample": False, **how}
    scores = {"return_dict_in_generate": True, "output_logits": True}
    with quiet():
        plain = model.generate(ids(), **asked, **scores)
        isotype.fuse(model)
        fused = model.generate(ids(), **asked, **scores)
    assert torch.equal(fused.sequences, plain.sequences)
    for result, wanted in zip(fused.logits, plain.logits, strict=True):
        assert (result - wanted).norm() <= TOLERANCE * wanted.norm()


def test_attention_alone_keeps_every_token() -> None:
    """Without adapters, and by way of `use_fast_attention` alone."""
    model, batch = tiny_model("llama").eval(), {"input_ids": ids(), "attention_mask": present("right")}
    with torch.no_grad():
        wanted = model(**batch).logits
        use_fast_attention(model)
        result = model(**batch).logits
    assert wanted.shape[-1] == VOCABULARY
    assert (result - wanted).norm() <= TOLERANCE * wanted.norm()
