"""Which inputs reach which predictions, on models whose wiring is known."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import isotype
from isotype.records.reach import Reach
from isotype.trace.reach import measure
from isotype.trace.reach.measure import measure_reach
from tests.adapters import takes_add_adapter
from tests.faults.wiring import FAULTS, WiringFault, findings_of, healthy, packed, without_labels
from tests.pairwise import few
from tests.zoo import ARCHITECTURES

SMALL = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)

NAMES = {"llama": 12, "qwen3_moe": 12, "mamba": 7, "bert-cls": 2, "gemma3-vl": 3, "bart-s2s": 5}
"""Architectures, and how many kinds of faults they have the parts for."""


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    architecture = ARCHITECTURES[name]
    return architecture.build(torch.float32), architecture.batch()


# qwen3_moe is as llama; packed rows of a state space are also those of a long batch; adapters are those of llama.
@few(
    "name, fewest, only",
    {
        **{name: (name, fewest, "") for name, fewest in NAMES.items()},
        "pictures": ("gemma3-vl", 1, "images are black"),
    },
    *("llama", "bert-cls", "bart-s2s", "pictures"),
)
def test_every_fault_that_an_architecture_has_the_part_for_is_found(
    name: str, fewest: int, only: str
) -> None:
    found = {}
    for fault in (each for each in FAULTS if only in each.name):
        made = fault.inject(*built(name))
        if made is not None and (fault.real is None or _real(fault, made)):
            found[fault.name] = fault.code in codes(*made)
    assert [each for each, seen in found.items() if not seen] == []
    assert len(found) >= fewest


def _real(fault: WiringFault, made: tuple[nn.Module, dict[str, torch.Tensor]]) -> bool:
    assert fault.real is not None
    try:
        return fault.real(*made)
    except RuntimeError:
        return False  # it refuses the faulty batch by itself


@pytest.mark.parametrize(("most", "used"), [(1 << 27, 1), (1, 3)])
def test_a_forward_that_a_library_has_replaced_is_that_of_the_copy(
    most: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small products take longer on several threads: a copy of the size `most` at most runs on one."""
    model, batch = built("llama")
    first, threads, before = model.forward, set(), torch.get_num_threads()

    def replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        threads.add(torch.get_num_threads())
        return first(*args, **kwargs)

    model.forward = MethodType(replaced, model)  # as TRL's `add_fused_lm_head` does
    monkeypatch.setattr(measure, "_SHARED_OUT", most)
    torch.set_num_threads(3)
    try:
        reach = measure_reach(model, batch)
        assert (threads, torch.get_num_threads()) == ({used}, 3)
    finally:
        torch.set_num_threads(before)
    assert reach is not None
    assert (reach.unused, reach.undecided) == ((), ())


@few("name", list(NAMES), *(name for name in NAMES if name != "qwen3_moe"))
def test_nothing_is_found_in_a_healthy_step(name: str) -> None:
    model, batch = built(name)
    assert {kind: codes(model, each) for kind, each in healthy(model, batch)} == {
        kind: [] for kind, _ in healthy(model, batch)
    }


def test_a_large_model_without_weights_is_measured_on_a_small_one() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=128_256, pad_token_id=128_004, eos_token_id=[128_001, 128_009])
        )
    ids = torch.arange(2000, 2032).view(2, 16)
    batch = packed({"input_ids": ids, "labels": ids})
    reach = measured(model, {**batch, "attention_mask": torch.ones_like(ids)})
    leak = reach.leak("packed row")
    assert reach.copy == "a LlamaForCausalLM with a small config"
    assert leak is not None
    assert (leak.module, leak.changed, leak.of) == ("model.layers.0.self_attn", 16, 16)
    assert leak.without == "attention_mask"
    assert not measured(model, batch).leaks
    assert model.config.eos_token_id == [128_001, 128_009]  # the model's own config is as it was


@pytest.mark.parametrize("rows", [1, 2])
def test_flash_attention_reads_the_positions_of_one_row_alone(rows: int) -> None:
    model, batch = built("llama")
    model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    made = {name: value[:rows] for name, value in packed(batch).items()}
    assert bool(measured(model, made).leaks) == (rows == 2)


def test_starts_of_sequences_that_are_wrong() -> None:
    model, batch = built("llama")
    model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    made = {name: value[:1] for name, value in packed(batch).items()}
    starts = {"max_length_q": 9, "max_length_k": 9}
    for ends, leaks in (([0, 7, 16], False), ([0, 16], True)):
        given = torch.tensor(ends, dtype=torch.int32)
        made = {**made, "cu_seq_lens_q": given, "cu_seq_lens_k": given}
        assert bool(measured(model, {**made, **starts}).leaks) == leaks


def test_a_long_batch_is_cut_to_where_its_sequences_meet() -> None:
    model, _ = built("mamba")
    ids = torch.randint(4, 100, (4, 160), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, 100:] = 2
    reach = measured(model, {"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert (reach.rows, reach.tokens) == (2, 64)
    assert reach.leak("packed row") is not None


def test_a_long_prompt_is_kept_up_to_what_is_learned_behind_it() -> None:
    model, _ = built("llama")
    ids = torch.randint(4, 100, (1, 1024), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(500), torch.arange(524)])[None]
    labels = ids.clone()
    labels[:, 400:700] = -100
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    assert measured(model, {**batch, "attention_mask": torch.ones_like(ids)}).leak("packed row") is not None
    reach = measured(model, batch)
    assert (reach.tokens, reach.leaks) == (232, ())


def test_the_matrix_says_which_tokens_reach_a_prediction() -> None:
    model, batch = built("llama")
    reach = measured(model, packed(batch))
    assert reach.matrix is not None
    rows = dict(reach.matrix.reached)
    assert rows[5] == (0, 1, 2, 3, 4, 5)
    assert rows[10] == (7, 8, 9, 10)
    assert reach.matrix.sequences == (0,) * 7 + (1,) * 9
    assert reach.matrix.allowed(10, 8)
    assert not reach.matrix.allowed(10, 5)


def test_padding_in_front_moves_learned_positions_unless_they_are_given() -> None:
    model, batch = built("gpt2")
    ids = batch["input_ids"].clone()
    mask = torch.ones_like(ids)
    ids[0, :5], mask[0, :5] = 0, 0
    made = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    assert measured(model, made).leak("padding position") is not None
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert not measured(model, {**made, "position_ids": positions}).leaks


class OwnModel(nn.Module):
    """A language model that no library knows: a running mean in place of attention."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.causal = causal

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.table(input_ids)
        mean = hidden.cumsum(1) if self.causal else hidden.sum(1, keepdim=True)
        logits = self.head(hidden + mean)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return logits, loss


@pytest.mark.parametrize("causal", [True, False])
def test_a_model_of_ones_own(causal: bool) -> None:
    ids = torch.arange(4, 36).view(2, 16)
    reach = measured(OwnModel(causal), {"input_ids": ids, "labels": ids})
    assert (reach.leak("later token") is None) == causal


def test_what_cannot_be_measured_says_why() -> None:
    ids = torch.arange(4, 36).view(2, 16)
    model = OwnModel()
    assert measure_reach(model, {"inputs_embeds": ids.double()}) is None
    assert measure_reach(model, {"input_ids": ids.to("meta"), "labels": ids.to("meta")}) is None
    model.head = nn.Linear(16, 16)  # its logits and the labels do not fit
    assert (
        measured(model, {"input_ids": ids, "labels": ids})
        .undecided[0]
        .startswith("the copy could not be run")
    )
    large = nn.Sequential(nn.Linear(6000, 6000))
    assert measured(large, {"input_ids": ids, "labels": ids}).undecided == (
        "the model has 36,006,000 weights and no config for a smaller model",
    )
    unlearned = torch.full_like(ids, -100)
    (why,) = measured(built("llama")[0], {"input_ids": ids, "labels": unlearned}).undecided
    assert why == "no label of the batch counts in the loss"


class Wrapped(nn.Module):
    """A model around one of transformers, which drops the mask."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def large_llama() -> nn.Module:
    """On the meta device, 100 million weights."""
    with torch.device("meta"):
        sizes = {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
        }
        return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32000))


def padded_in_front() -> dict[str, torch.Tensor]:
    ids = torch.arange(1004, 1036).view(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("adapted", [False, True])
def test_a_large_model_in_a_users_module_becomes_small(adapted: bool) -> None:
    inner = large_llama()
    if adapted:
        inner = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj"]))
    reach = measured(Wrapped(inner), padded_in_front())
    assert reach.copy == "a copy of the model with a LlamaForCausalLM with a small config"
    assert [leak.source for leak in reach.leaks] == ["padding", "padding position"]
    assert [unused.name for unused in reach.unused] == ["attention_mask"]
    assert reach.undecided == ()


class Deep(nn.Module):
    """Too large for a copy: one layer of 36 million weights; its mask is not used, or is."""

    def __init__(self, uses_mask: bool) -> None:
        super().__init__()
        self.uses_mask = uses_mask
        self.table, self.wide, self.head = nn.Embedding(2000, 64), nn.Linear(6000, 6000), nn.Linear(64, 2000)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor,
        labels: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        scratch = torch.zeros_like(pixel_values)
        scratch += pixel_values  # written, and not used
        hidden = self.table(input_ids)
        if self.uses_mask:
            hidden = hidden * attention_mask[..., None]
            hidden.add_(self.wide(pixel_values)[:, None, :64])
        logits = self.head(hidden)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("uses", [True, False])
def test_a_model_too_large_for_a_copy_is_judged_by_its_operators(uses: bool) -> None:
    with torch.device("meta"):
        model = Deep(uses)
    report = isotype.check(model, {**padded_in_front(), "pixel_values": torch.zeros(2, 6000)}, verify=False)
    found = [
        (each.code, each.severity, each.message.partition(" ")[0])
        for each in report.findings
        if each.code == "IST905"
    ]
    lost = [("IST905", "error", "pixel_values"), ("IST905", "warning", "attention_mask")]
    assert sorted(found) == ([] if uses else lost)


@takes_add_adapter
def test_adapters_that_transformers_has_added() -> None:
    model, batch = built("llama")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))  # type: ignore[operator]
    assert measured(model, batch).undecided == ()
    large = large_llama()
    large.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))  # type: ignore[operator]
    reach = measured(large, padded_in_front())
    assert (reach.copy, reach.undecided) == ("a LlamaForCausalLM with a small config", ())


@pytest.mark.parametrize("causal", [True, False])
def test_the_first_layers_of_a_large_model_of_ones_own(causal: bool) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(16, 30_000), nn.ReLU(), nn.Linear(30_000, 16))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            mean = hidden.cumsum(1) if causal else hidden.sum(1, keepdim=True)
            return hidden + torch.as_tensor(self.mlp(hidden + mean))

    class Layers(OwnModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(12))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.table(input_ids)
            for layer in self.layers:
                hidden = layer(hidden)
            logits = self.head(hidden)
            return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model = Layers()
    ids = torch.arange(4, 36).view(2, 16)
    reach = measured(model, {"input_ids": ids, "labels": ids})
    assert reach.copy == "a copy of the model of the first 2 of 12 layers"
    assert (reach.leak("later token") is None) == causal
    assert len(model.layers) == 12


def test_a_model_that_cannot_be_copied_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise LookupError("no copies")

    monkeypatch.setattr("isotype.trace.reach.measure.small_copy", refused)
    model, batch = built("llama")
    assert measured(model, batch).undecided == ("no small copy could be made: LookupError: no copies",)


def test_packed_rows_of_a_loss_beside_the_model() -> None:
    model, batch = built("llama")
    made = without_labels(packed(batch))
    reach = measured(model, made)
    assert (reach.labels, reach.leaks, reach.unused, reach.undecided) == (None, (), (), ())
    masked = {**made, "attention_mask": torch.ones_like(made["input_ids"])}
    leak = measured(model, masked).leak("packed row")
    assert leak is not None
    assert (leak.of, leak.without) == (16, "attention_mask")


def test_only_completions_are_predictions_of_a_preference_pair() -> None:
    model, batch = built("llama")
    completions = torch.zeros_like(batch["input_ids"])
    completions[:, 10:] = 1
    for layer in model.model.layers:  # type: ignore[union-attr, operator]
        layer.self_attn.is_causal = False  # type: ignore[union-attr]
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    every_token = {"attention_mask": torch.ones(2, 1, 16, 16, dtype=torch.bool)}
    made = {
        **without_labels(batch),
        **every_token,
        "completion_mask": completions,
        "ref_chosen_logps": torch.zeros(1),
    }
    leak = measured(model, made).leak("later token")
    assert leak is not None
    assert leak.column >= 9


def test_a_batch_of_prompts_padded_in_front() -> None:
    for name, moved in (("gpt2", True), ("llama", False)):
        model, batch = built(name)
        mask = torch.ones_like(batch["input_ids"])
        mask[0, :5] = 0
        made = {"input_ids": batch["input_ids"], "attention_mask": mask}
        assert (measured(model, made).leak("padding position") is not None) == moved
        assert (measured(model, {"input_ids": batch["input_ids"]}).leaks) == ()


def test_an_adapter_that_reaches_no_loss_beside_the_model() -> None:
    model, batch = built("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(lora_alpha=0, target_modules=["q_proj"]))  # type: ignore[arg-type]
    reach = measured(adapted, without_labels(batch))
    assert {each.kind for each in reach.unused} == {"adapter"}


def test_a_gate_that_only_switches_reaches_the_loss() -> None:
    """Its gradient is exactly zero at these values, as that of a router behind a saturated softmax."""
    model, batch = built("llama")
    gate = model.model.norm.register_parameter("gate", nn.Parameter(torch.ones(1)))  # type: ignore[union-attr,operator]
    model.model.norm.register_forward_hook(lambda norm, _, out: out * torch.sigmoid(norm.gate * 1e6))  # type: ignore[union-attr,operator]
    assert gate is None
    assert measured(model, batch).unused == ()


@pytest.mark.parametrize(("first", "kinds"), [(0, set()), (8, {"ungraded"})])
def test_trained_tokens_that_the_batch_lacks(first: int, kinds: set[str]) -> None:
    config = peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"])
    ids = torch.arange(first, first + 8)[None]
    report = isotype.check(
        peft.get_peft_model(LlamaForCausalLM(SMALL), config), {"input_ids": ids, "labels": ids}
    )
    assert report.trace.reach is not None
    assert {unused.kind for unused in report.trace.reach.unused} == kinds
    assert report.ok


def test_code_that_refuses_other_values_of_a_weight_reads_the_weight() -> None:
    model, batch = built("llama")
    norm = model.model.norm
    norm.register_parameter("gate", nn.Parameter(torch.ones(1)))  # type: ignore[union-attr,operator]
    norm.register_parameter("empty", nn.Parameter(torch.empty(0)))  # type: ignore[union-attr,operator]

    def checked(norm: Any, _: object, out: torch.Tensor) -> torch.Tensor:
        if norm.gate.abs() > 3:
            raise ValueError("the gate is too large")
        return out + 0 * norm.gate + norm.empty.sum()

    norm.register_forward_hook(checked)  # type: ignore[union-attr,operator]
    reach = measured(model, batch)
    assert ([weight.name for weight in reach.unused], reach.undecided) == (["model.norm.empty"], ())


def test_a_classifier_finds_the_last_token_by_the_id_of_padding() -> None:
    model, batch = built("llama-cls")
    ids, mask = batch["input_ids"].clone(), torch.ones_like(batch["input_ids"])
    ids[0, 10:], mask[0, 10:] = model.config.pad_token_id, 0  # type: ignore[union-attr]
    made = {"input_ids": ids, "attention_mask": mask}
    assert measured(model, made).leaks == ()
    assert measured(model, {**made, "labels": torch.tensor([0, 1])}).leaks == ()


def test_a_picture_of_a_row_that_is_not_learned_is_not_missed() -> None:
    model, batch = built("gemma3-vl")
    ids = batch["input_ids"].clone()
    rows = torch.cat([ids, ids.masked_fill(ids == model.config.image_token_id, 5)])  # type: ignore[union-attr]
    both = {**batch, "input_ids": rows, "labels": torch.cat([torch.full_like(ids, -100), rows[len(ids) :]])}
    both |= {
        name: torch.cat([value, value])
        for name, value in batch.items()
        if name in ("token_type_ids", "attention_mask")
    }
    assert not [each for each in measured(model, both).unused if each.kind == "picture"]


def test_model_and_random_numbers_are_as_before() -> None:
    model, batch = built("llama")
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    measured(model, packed(batch))
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    assert model.config.use_cache  # type: ignore[union-attr]


def codes(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[str]:
    found, undecided = findings_of(model, batch)
    assert not undecided
    return [finding.code for finding in found]


def measured(model: nn.Module, batch: Mapping[str, Any]) -> Reach:
    reach = measure_reach(model, batch)
    assert reach is not None
    return reach
