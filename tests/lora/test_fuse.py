"""Fused models against PEFT's own path: values, files, adapters, and everything else that users do with a model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import isotype
from isotype.core.dtypes import parse_dtype as dtype_of
from isotype.core.errors import UsageError
from isotype.lora.fuse import fuse, unfuse
from isotype.lora.loops import elementwise
from isotype.model.boundary import BoundarySettings, set_boundary
from isotype.precision.policy import PrecisionPolicy
from isotype.train.models import weightless_model
from tests import processes
from tests.adapters import adapted, loaded, lora_config, moved, relative, step
from tests.cpus import pretend
from tests.lora.watched import copies_of
from tests.models import one_layer, tiny_batch, tiny_model
from tests.pairwise import few, pairwise
from tests.policy import assert_policy_holds, autocast

Saved = Callable[..., Path]
ARCHITECTURES = (
    "llama", "llama-tied-bias", "gemma2", "gemma3", "gemma3-vision", "qwen3", "mistral", "phi", "phi3", "gpt-oss",
    "qwen3-moe", "deepseek-v3", "ernie4_5-moe", "gpt2", "t5",
)  # fmt: skip
# As llama, gemma3, phi and qwen3-moe to what fuses.
ALIKE = ("llama-tied-bias", "mistral", "qwen3", "gemma2", "phi3", "ernie4_5-moe")
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "lora-bias": {"lora_bias": True, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "dropout": {"lora_dropout": 0.2},
}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert relative(found[name], value) < tolerance, name


@few("name", ARCHITECTURES, *(name for name in ARCHITECTURES if name not in ALIKE))
def test_the_values_of_every_architecture_stay(name: str) -> None:
    model, batch = adapted(name).train(), tiny_batch(name)
    wanted, before = step(model, batch), model.config._attn_implementation
    report = fuse(model)
    assert report.fused
    assert not report.unseen
    assert_same(step(model, batch), wanted, 1e-4)
    unfuse(model)
    assert model.config._attn_implementation == before
    again = step(model, batch)
    assert all(torch.equal(again[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_values_of_every_variant_stay(variant: str) -> None:
    model = adapted("llama-tied-bias", **VARIANTS[variant]).train()
    batch = tiny_batch("llama")
    wanted = step(model, batch)
    assert not fuse(model).left
    assert_same(step(model, batch), wanted, 1e-4)  # the same random numbers are drawn for dropout


class Turned(nn.Module):
    """A linear layer whose input lies in memory as `order` says: state spaces transpose theirs."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.proj = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lying = x.permute(self.order).contiguous().permute(*torch.tensor(self.order).argsort().tolist())
        made: torch.Tensor = self.proj(lying)
        return made


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_dropout_draws_the_numbers_of_peft_however_the_input_lies(order: tuple[int, ...]) -> None:
    config = peft.LoraConfig(r=3, target_modules=["proj"], lora_dropout=0.4)
    model: Any = moved(peft.get_peft_model(Turned(order), config)).train()
    x = torch.randn(3, 4, 6)
    torch.manual_seed(5)
    wanted = model(x)
    assert isotype.fuse(model, {"x": x}).fused
    torch.manual_seed(5)
    torch.testing.assert_close(model(x), wanted)


def under(saved: Saved, dtype: str, quantization: str | None, **lora: Any) -> tuple[Any, PrecisionPolicy]:
    model, policy = loaded(saved("llama"), dtype, quantization, **lora)
    return moved(model).train(), policy


@pairwise(
    "dtype, quantization, dora",
    ["bfloat16", "float16"],
    [None, "nf4", pytest.param("fp4", marks=pytest.mark.exhaustive), "int8"],
    [False, True],
    strength=1,
)
def test_in_16_bits_it_is_as_close_to_float32_as_its_roundings(
    saved: Saved, dtype: str, quantization: str | None, dora: bool
) -> None:
    model, policy = under(saved, dtype, quantization, use_dora=dora)
    exact = copy.deepcopy(model)
    isotype.enforce(exact, isotype.resolve_precision(saved("llama"), "float32", quantization, device="cpu"))
    # bitsandbytes rounds the inputs of int8 layers, too: what the very weights give is the fused product in float32.
    fuse(exact)
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, 120, (4, 16), generator=generator) for _ in range(4)]
    batches = [{"input_ids": each, "labels": each} for each in ids]
    wanted = [step(exact, batch) for batch in batches]

    assert not fuse(model).left
    # float16 trains with loss scaling: gradients as small as these have half their digits without.
    results = [step(model, batch, policy.autocast, loss_scale=1024.0) for batch in batches]
    assert results[0]["logits"].dtype == dtype_of(dtype)
    pairs = [(one[key], other[key]) for one, other in zip(results, wanted, strict=True) for key in other]
    distance = sum(relative(one, other) for one, other in pairs) / len(pairs)
    assert_policy_holds(model, policy)
    # One rounding to p bits is off by u/√3 in the mean square, and eighty follow one another: in each of two layers seven LoRA products
    # of two roundings and six other operators, and as many again in the backward. PEFT's own path is as far off.
    unit = torch.finfo(dtype_of(dtype)).eps / 2
    assert distance < unit * (80 / 3) ** 0.5


def test_layers_that_read_the_same_input_run_as_one() -> None:
    model, batch = adapted("llama").train(), tiny_batch("llama")
    report = fuse(model)
    attention = model.base_model.model.model.layers[0].self_attn
    assert attention.q_proj.lora_siblings.layers == (attention.q_proj, attention.k_proj, attention.v_proj)
    assert attention.q_proj.lora_siblings is attention.v_proj.lora_siblings
    assert attention.o_proj.lora_siblings.layers == (attention.o_proj,)
    rotary = "rotary: one function rotates queries and keys in each of 2 attention layers\n"
    attention = (
        "attention: one compiled function for each layer on this CPU\n"
        "padding: removed from batches of TRL's trainers if it is on the left or right of a row"
    )
    compiled = elementwise.compiled()
    assert str(report) == (
        "fused: 14 LoRA layers\n"
        "together: q_proj k_proj v_proj (2 times)\n"
        "together: gate_proj up_proj (2 times)\n"
        "gated: 2 MLPs (silu); the backward recomputes their products\n"
        "norms: 5 RMSNorms, each computed by one function\n"
        f"{rotary if compiled else ''}"
        f"{attention if compiled else report.attention}"
    )
    assert report.summary == (
        "fused: 14 of 14 LoRA layers, 4 groups on the same input, 2 gated MLPs, 5 norms"
        f"{', attention by one function, no padding' if compiled else ''}"
    )
    nodes: list[str] = []
    todo = [model(**batch).loss.grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.append(node.name())
            todo += [following for following, _ in node.next_functions]
    assert nodes.count("_LoraLinearBackward") == 4 * 2  # q k v, o, gate up, down


def test_hooks_see_every_layer() -> None:
    model, batch = adapted("llama"), tiny_batch("llama")
    attention = model.base_model.model.model.layers[0].self_attn
    wanted = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        attention._modules[name].register_forward_hook(
            lambda module, args, output, name=name: wanted.__setitem__(name, output.detach())
        )
    model(**batch)
    before = dict(wanted)
    fuse(model)
    for _ in range(2):
        wanted.clear()
        model(**batch)
        assert wanted.keys() == before.keys()
        for name, value in before.items():
            torch.testing.assert_close(wanted[name], value)


def test_a_hook_inside_of_a_layer_sees_what_it_saw() -> None:
    model, batch = adapted("llama"), tiny_batch("llama")
    fuse(model)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    seen: list[tuple[int, ...]] = []
    handle = layer.lora_A["default"].register_forward_hook(
        lambda module, args, output: seen.append(tuple(output.shape))
    )

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(**batch)
        out.loss.backward()
        return [out.logits, *(each.grad for each in model.parameters() if each.grad is not None)]

    wanted = step()
    assert seen == [(*batch["input_ids"].shape, 4)]
    handle.remove()
    for one, other in zip(step(), wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert len(seen) == 1


class Pair(nn.Module):
    """Two layers that read one input, or not: one is left out, or its input is written into in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, how: str = "both") -> torch.Tensor:
        if how == "second":
            return self.two(x)
        first = self.one(x)
        if how == "changed":
            x.mul_(3)
        if how == "swapped":
            return self.two(x) + self.one(x)
        return first if how == "first" else first + self.two(x.clone() if how == "copied" else x)


def test_what_is_not_called_as_it_was_seen_computes_for_itself() -> None:
    model = moved(peft.get_peft_model(Pair(), peft.LoraConfig(target_modules=["one", "two"])))
    plain = copy.deepcopy(model)
    report = fuse(model, {"x": torch.randn(2, 8)})
    assert report.together == (("base_model.model.one", "base_model.model.two"),)
    ways = ("both", "first", "second", "changed", "copied", "swapped")
    for how in [way for pair in [(a, b) for a in ways for b in ways] for way in pair]:
        x = torch.randn(3, 8)
        with torch.set_grad_enabled(how != "changed"):
            torch.testing.assert_close(model(x.clone(), how), plain(x.clone(), how))


def test_a_model_that_cannot_be_run_is_fused_layer_by_layer() -> None:
    model: Any = peft.get_peft_model(Pair(), peft.LoraConfig(target_modules=["one", "two"]))
    model.train()
    report = fuse(model)
    assert report.together == ()
    assert str(report).splitlines()[1] == (
        "layers are fused one by one: PeftModel could not be run: Pair.forward() got an unexpected keyword argument "
        "'input_ids'; pass `inputs` for the model's forward"
    )
    assert model.training
    assert model.base_model.model.one.training


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])  # gemma2 goes on with what its last layer gives
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, architecture: str) -> None:
    model, batch = adapted(architecture).train(), tiny_batch(architecture)
    model.enable_input_require_grads()
    wanted = step(model, batch)
    fuse(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        assert_same(step(model, batch), wanted, 1e-4)


def test_checkpointing_one_layer() -> None:
    layer = adapted("llama").base_model.model.model.layers[0].mlp
    x = torch.randn(2, 3, 64, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)
    fuse(layer, {"x": x})
    (found,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)
    torch.testing.assert_close(found, wanted)


class _Products(TorchDispatchMode):
    """Counts the matrix products X Wᵀ with a weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.count = weight, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            right = args[-1]
            self.count += right.data_ptr() == self.weight.data_ptr() and right.shape == self.weight.t().shape
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("depth", "again"), [(1, 0), (2, 1)])
def test_checkpointing_does_not_compute_the_last_product_of_a_block_again(depth: int, again: int) -> None:
    mlp = adapted("llama").base_model.model.model.layers[0].mlp
    x = torch.randn(2, 3, 64, requires_grad=True)
    fuse(mlp, {"x": x})

    def block(x: torch.Tensor) -> torch.Tensor:
        for _ in range(depth):
            x = mlp(x)
        return x

    with _Products(mlp.down_proj.base_layer.weight) as products:
        out = checkpoint(block, x, use_reentrant=False)
        assert products.count == depth
        torch.autograd.grad(out.sum(), x)
    assert products.count == depth + again


def test_gradients_accumulate() -> None:
    model, batch = adapted("llama").train(), tiny_batch("llama")
    fuse(model)
    step(model, batch)
    once = step(model, batch)
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, 2 * once[name])


@pytest.mark.filterwarnings("ignore")
def test_compiled_it_runs_as_peft_has_it() -> None:
    model, batch = adapted("llama"), tiny_batch("llama")
    wanted = model(**batch).logits
    fuse(model)
    compiled = torch.compile(model.base_model.model.model.layers[0].mlp, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 64)
    torch.testing.assert_close(compiled(x), model.base_model.model.model.layers[0].mlp(x))
    torch.testing.assert_close(model(**batch).logits, wanted)


def test_files_are_those_of_peft(tmp_path: Path) -> None:
    model, batch = adapted("llama"), tiny_batch("llama")
    keys = list(model.state_dict())
    wanted = model(**batch).logits
    fuse(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    torch.testing.assert_close(again(**batch).logits, wanted)
    fuse(again)
    torch.testing.assert_close(again(**batch).logits, wanted)


def close(model: Any, plain: Any, batch: Any) -> None:
    assert relative(model(**batch).logits, plain(**batch).logits) < 4e-2  # as bfloat16 rounds


def test_merging_and_taking_it_back() -> None:
    model, batch = adapted("llama", torch.bfloat16), tiny_batch("llama")
    plain = copy.deepcopy(model)
    fuse(model, budget=1 << 30)
    with torch.autocast("cpu", torch.float16):  # dense copies in another dtype are kept
        model(**batch)
    for each in (model, plain):
        each.merge_adapter()
    close(model, plain, batch)
    for each in (model, plain):
        each.unmerge_adapter()
    close(model, plain, batch)
    weights = plain.merge_and_unload().state_dict()
    assert all(
        torch.equal(value, weights[name]) for name, value in model.merge_and_unload().state_dict().items()
    )


def test_adapters_are_disabled_switched_added_and_deleted() -> None:
    model, batch = adapted("llama"), tiny_batch("llama")
    plain = copy.deepcopy(model)
    fuse(model)

    def assert_alike() -> None:
        for _ in range(2):
            torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)

    with model.disable_adapter(), plain.disable_adapter():
        assert_alike()
    for each in (model, plain):
        each.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
        each.set_adapter("second")
        moved(each)
    assert_alike()
    for each in (model, plain):
        each.base_model.set_adapter(["default", "second"])
    assert_alike()
    for each in (model, plain):
        each.delete_adapter("default")
        each.set_adapter("second")
    assert_alike()
    texts = ["second", "__base__"]
    for each in (model, plain):
        each.eval()
    torch.testing.assert_close(
        model(**batch, adapter_names=texts).logits, plain(**batch, adapter_names=texts).logits
    )


def test_copies_and_pickles_are_fused_models_of_their_own() -> None:
    model, batch = adapted("llama"), tiny_batch("llama")
    fuse(model)
    wanted = model(**batch).logits
    for other in copies_of(model):
        attention = other.base_model.model.model.layers[0].self_attn
        own = model.base_model.model.model.layers[0].self_attn
        assert attention.q_proj.lora_siblings.layers == (attention.q_proj, attention.k_proj, attention.v_proj)
        assert attention.q_proj.lora_siblings is attention.k_proj.lora_siblings
        assert attention.q_proj.lora_weights is not own.q_proj.lora_weights
        assert attention.q_proj.lora_weights is attention.o_proj.lora_weights
        torch.testing.assert_close(other(**batch).logits, wanted)


def _unpickled(before: Path, after: Path) -> None:
    model, batch = torch.load(before, weights_only=False)
    torch.save(model(**batch).logits, after)


def test_a_pickle_runs_in_another_process(tmp_path: Path) -> None:
    model, batch = adapted("llama"), tiny_batch("llama")
    fuse(model)
    before, after = tmp_path / "model.pt", tmp_path / "logits.pt"
    torch.save((model, batch), before)
    done = processes.run(_unpickled, before, after)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(after), model(**batch).logits)


def test_a_gated_mlp_with_a_boundary_is_left() -> None:
    model, batch = adapted("llama"), tiny_batch("llama")
    mlps = [module for module in model.modules() if type(module).__name__ == "LlamaMLP"]
    set_boundary(mlps[0], BoundarySettings("float32", torch.float32))
    wanted = model(**batch).logits
    report = fuse(model)
    assert len(report.gated) == len(mlps) - 1
    torch.testing.assert_close(model(**batch).logits, wanted)


def test_enforce_leaves_it_fused(saved: Saved) -> None:
    model, policy = under(saved, "bfloat16", "nf4")
    fuse(model)
    classes = [type(module) for module in model.modules()]
    assert not isotype.enforce(model, policy)
    assert [type(module) for module in model.modules()] == classes


def run(
    model: Any, policy: PrecisionPolicy, steps: int, barrier: threading.Barrier | None = None
) -> list[Any]:
    """Losses and gradients of several steps of the same batch, with an update after each."""
    results: list[Any] = []
    batch = tiny_batch("llama")
    parameters = [p for p in model.parameters() if p.requires_grad]
    for _ in range(steps):
        if barrier is not None:
            barrier.wait()
        with autocast(policy):
            loss = model(**batch).loss
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in parameters)]
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    return results


@few("quantization, budget", [(None, 0), ("nf4", 1 << 30), ("nf4", 0), ("int8", 0)], ("nf4", 0))
def test_models_of_several_dtypes_one_after_another_in_turn_and_at_once(
    saved: Saved, quantization: str | None, budget: int
) -> None:
    def made(dtype: str) -> tuple[Any, PrecisionPolicy]:
        model, policy = under(saved, dtype, quantization)
        fuse(model, budget=budget)
        return model, policy

    dtypes = ("bfloat16", "float16", "bfloat16")
    alone = [run(*made(dtype), 2) for dtype in dtypes]
    models = [made(dtype) for dtype in dtypes]
    in_turn: list[list[Any]] = [[], [], []]
    for _ in range(2):
        for (model, policy), results in zip(models, in_turn, strict=True):
            results += run(model, policy, 1)
    models, barrier = [made(dtype) for dtype in dtypes], threading.Barrier(3)
    at_once: list[list[Any]] = [[], [], []]

    def work(index: int) -> None:
        at_once[index] += run(*models[index], 2, barrier)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in (in_turn, at_once):
        for found, wanted in zip(results, alone, strict=True):
            assert len(found) == len(wanted)
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_copies_keep_to_the_budget(saved: Saved) -> None:
    model, policy = under(saved, "bfloat16", "nf4")
    one = 96 * 64
    for budget, copies in ((0, 0), (1 << 30, 14)):
        report = fuse(model, budget=budget)
        assert report.copies == copies
        assert report.copied_bytes <= budget
        assert bool(report.copied_bytes) == bool(budget)
        assert report.copied_bytes % one == 0 or policy.compute != torch.bfloat16


def test_what_is_left_and_why() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 1)
            self.embed = nn.Embedding(5, 4)
            self.fine, self.trained = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.trained(self.fine(self.embed(ids)))
            return self.conv(x.transpose(1, 2))

    targets = ["conv", "embed", "fine", "trained"]
    model: Any = peft.get_peft_model(Odd(), peft.LoraConfig(r=2, target_modules=targets))
    model.base_model.model.trained.base_layer.weight.requires_grad_(True)
    report = fuse(model, {"ids": torch.tensor([[1, 2, 3]])})
    assert report.fused == ("base_model.model.fine",)
    assert {name.rsplit(".", 1)[1]: why for name, why in report.left.items()} == {
        "conv": "the base is Conv1d, not a linear layer",
        "embed": "the base is Embedding, not a linear layer",
        "trained": "the base weight is trained",
    }
    assert str(report) == (
        "fused: 1 LoRA layer\n"
        "attention: unchanged: the model is no transformers model\n"
        "left to PEFT: base_model.model.conv (1 layer): the base is Conv1d, not a linear layer\n"
        "left to PEFT: base_model.model.embed (1 layer): the base is Embedding, not a linear layer\n"
        "left to PEFT: base_model.model.trained (1 layer): the base weight is trained"
    )
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert model.base_model.model.trained.base_layer.weight.grad.any()


def test_dora_with_dropout_is_left_in_training_and_fused_in_evaluation() -> None:
    model, batch = adapted("llama", use_dora=True, lora_dropout=0.5), tiny_batch("llama")
    plain = copy.deepcopy(model)
    assert set(fuse(model.train()).left.values()) == {"the layer has DoRA with dropout"}
    assert_same(step(model, batch), step(plain.train(), batch), 1e-5)
    assert not fuse(model.eval()).left
    torch.testing.assert_close(model(**batch).logits, plain.eval()(**batch).logits)


def test_a_weightless_model_is_fused_as_the_one_whose_config_it_has() -> None:
    model = adapted("llama")
    together = fuse(model).together
    policy = isotype.resolve_precision(model.config, dtype="float32", device="cpu")
    blank = weightless_model(model.config, policy, lora=lora_config())
    report = fuse(blank, device="cpu")
    assert together
    assert report.together == together
    assert report.unseen == ""


@pytest.mark.parametrize(
    ("name", "storage", "lora"),
    [
        ("qwen3-moe", None, {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
        ("llama", "int8", {"target_modules": ["q_proj", "v_proj"]}),
        ("llama", "int8", {"use_dora": True, "lora_dropout": 0.1}),
        ("llama", "nf4", {"use_dora": True, "lora_dropout": 0.1}),
    ],
)
def test_layers_without_weights_that_stay_as_they_are_are_run_past(
    name: str, storage: str | None, lora: dict[str, Any]
) -> None:
    config = tiny_model(name).config
    policy = isotype.resolve_precision(config, dtype="float32", quantization=storage, device="cpu")
    wanted = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], **lora}
    blank = weightless_model(config, policy, lora=lora_config(**wanted)).train()
    assert fuse(blank, device="cpu").unseen == ""


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ({"target_modules": ["gate_proj"]}, "gate_proj without also targeting up_proj"),
        (
            {"target_parameters": ["experts.gate_up"]},
            "--lora_target_parameters experts.gate_up\n    expected  one of embed_tokens.weight, experts.down_proj, ",
        ),
    ],
)
def test_targets_that_a_mixture_of_experts_does_not_have(lora: dict[str, Any], problem: str) -> None:
    """PEFT raises a ValueError for the first; it ignores the second."""
    config = tiny_model("qwen3-moe").config
    policy = isotype.resolve_precision(config, dtype="float32", device="cpu")
    with pytest.raises(UsageError, match=problem):
        weightless_model(config, policy, lora=lora_config(**lora))


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_parameters_of_quantized_experts_are_known(name: str) -> None:
    config = tiny_model(name).config
    policy = isotype.resolve_precision(config, dtype="float32", quantization="nf4", device="cpu")
    for lora in ({"target_modules": "all-linear"}, {"target_parameters": ["experts.down_proj"]}):
        assert weightless_model(config, policy, lora=lora_config(**lora)) is not None


def test_cached_norms_of_dora_are_pefts() -> None:
    """`DoraCaching` is switched on and off while the model stays fused: its caches are filled, and the results the same."""
    model, batch = adapted("llama", use_dora=True).eval(), tiny_batch("llama")
    fuse(model)
    fused = model(**batch).logits
    caches = [each._dora_cache for each in model.modules() if hasattr(each, "_dora_cache")]
    with peft.helpers.DoraCaching():
        cached = model(**batch).logits
        assert all(caches)
    torch.testing.assert_close(cached, fused, rtol=1e-5, atol=1e-6)
    model(**batch)
    assert not any(caches)
    torch.testing.assert_close(model(**batch).logits, fused, rtol=0, atol=0)


def test_the_preflight_follows_a_fused_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        "cpu-amx", monkeypatch
    )  # without instructions for bfloat16 the fused step computes in float32, see below
    model, batch = one_layer(adapted("llama", torch.bfloat16)).train(), tiny_batch("llama")
    options: Any = {"optimizer": "sgd", "wiring": False, "verify": False}
    plain = isotype.check(model, batch, **options)
    fuse(model)
    for _ in range(2):
        report = isotype.check(model, batch, **options)
        assert any(call.op == "aten.mm.out" for call in report.trace.calls), "PEFT's own path was traced"
        assert [finding.code for finding in report.findings] == [finding.code for finding in plain.findings]
        assert report.memory.peak <= plain.memory.peak
        # The adapters' products run in the compute dtype, where PEFT's run in theirs.
        assert sum(report.flops.values()) == pytest.approx(sum(plain.flops.values()), rel=0.02)
        with torch.autocast("cpu", torch.bfloat16):
            model(**batch).loss.backward()


def test_the_preflight_of_a_fused_model_is_that_of_the_simulated_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = one_layer(adapted("llama", torch.bfloat16)).train(), tiny_batch("llama")
    fuse(model)
    products = {}
    for cpu in ("cpu-avx2", "cpu-amx"):
        pretend(cpu, monkeypatch)
        calls = isotype.check(model, batch, phases=("forward",), wiring=False, verify=False).trace.calls
        products[cpu] = {call.operands[0].dtype for call in calls if call.op == "aten.mm.out"}
    assert products == {"cpu-avx2": {torch.float32}, "cpu-amx": {torch.bfloat16}}


@pytest.mark.parametrize("order", [("loha", "lora"), ("lora", "loha")])
@pytest.mark.parametrize("early", [False, True])
def test_adapters_of_two_methods_on_one_layer(order: tuple[str, str], early: bool) -> None:
    """PEFT's mixed models put one adapter around the other: LoRA around LoHa has LoHa's layer for its base."""
    kinds: dict[str, Any] = {
        "lora": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        "loha": peft.LoHaConfig(r=4, target_modules=["q_proj"], init_weights=False),
    }
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(tiny_model("llama"), kinds[order[0]], "first", mixed=True)
    if early:
        fuse(model)
    model.add_adapter("second", kinds[order[1]])
    model.set_adapter(["first", "second"])
    model.eval()
    batch = tiny_batch("llama")
    unfuse(model)
    wanted = model(**batch).logits
    with torch.no_grad():
        assert relative(model(**batch).logits, wanted) < 1e-6
    report = fuse(model)
    assert relative(model(**batch).logits, wanted) < 1e-5
    inside = (
        {"the base is a layer of another adapter (peft.tuners.loha.layer.Linear)"}
        if order[0] == "loha"
        else set()
    )
    assert set(report.left.values()) == inside


@pytest.mark.parametrize("times", [1, 2])
def test_arrow_computes_what_it_does_in_peft(tmp_path: Path, times: int) -> None:
    """Arrow changes adapters in its first forward, and remembers that it did: the run by which a model is looked at is not its first."""

    def arrow(fused: bool) -> torch.Tensor:
        config = peft.ArrowConfig(top_k=2, use_gks=True, rng_seed=42)
        experts, general = [str(tmp_path / name) for name in "ab"], [str(tmp_path / "g")]
        model: Any = peft.create_arrow_model(
            tiny_model("llama"), experts, config, general_adapter_paths=general
        )
        for _ in range(times if fused else 0):
            fuse(model)
        model.load_adapter(str(tmp_path / "c"), adapter_name="late")
        with torch.no_grad():
            logits: torch.Tensor = model.eval()(**tiny_batch("llama")).logits
        return logits

    for at, name in enumerate("abcg"):
        torch.manual_seed(at)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(tiny_model("llama"), lora).save_pretrained(tmp_path / name)
    torch.testing.assert_close(arrow(fused=True), arrow(fused=False))
