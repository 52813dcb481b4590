"""measure_ranges against a plain forward and backward that hooks look at."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import isotype
from isotype.checkpoint.resolve import read_measurement
from isotype.core.names import base_name
from isotype.precision.ranges import Ranges
from isotype.ranges.measure import Batches
from tests.checkpoint.test_load import mxfp4_checkpoint
from tests.models import quiet, save_tiny, tiny_batch, tiny_model
from tests.pairwise import few
from tests.zoo import ARCHITECTURES

BF16 = torch.bfloat16
_EXPERTS = ("qwen3-moe", "gpt-oss")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))


def largest(values: Any) -> float:
    found = [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
    floats = [each.detach().abs() for each in found if each.is_floating_point() and each.numel()]
    return max((float(each[each < 1e38].max()) for each in floats if (each < 1e38).any()), default=0.0)


def reference(
    model: nn.Module, batch: dict[str, Any], dtype: torch.dtype = torch.float64
) -> dict[str, list[float]]:
    """By module: largest input, output and gradient of the output of a plain run in `dtype`."""
    model = copy.deepcopy(model).to(dtype).eval()
    model.config.use_cache = False
    seen: dict[str, list[float]] = {}
    batch = {
        name: value.to(dtype).requires_grad_() if value.is_floating_point() else value
        for name, value in batch.items()
    }

    def follow(name: str, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) and "relative" not in name:
            module.register_forward_hook(lambda _, __, out: out.clone().requires_grad_())
        mine = seen.setdefault(name, [0.0, 0.0, 0.0])

        def note(at: int, value: Any) -> None:
            mine[at] = max(mine[at], largest(value))

        module.register_forward_pre_hook(lambda _, a, k: note(0, (a, k)), with_kwargs=True)

        def leaving(_: Any, __: Any, out: Any) -> None:
            note(1, out)
            for each in torch.utils._pytree.tree_leaves(out):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(lambda gradient: note(2, gradient))

        module.register_forward_hook(leaving)

    for name, module in model.named_modules():
        follow(base_name(name), module)
    model(**batch).loss.backward()
    return seen


def agrees(ranges: Ranges, seen: dict[str, list[float]], rel: float = 1e-4) -> None:
    assert {each.name for each in ranges.modules} == {name for name, found in seen.items() if any(found)}
    for each in ranges.modules:
        assert [each.input, each.output, each.gradient] == pytest.approx(
            seen[each.name], rel=rel, abs=1e-12
        ), each


@pytest.mark.parametrize(
    "name", ["llama-tied-bias", "gemma3", "gemma3-vision", "qwen3-moe", "t5", "gpt2", "gpt-oss"]
)
def test_modules_agree_with_a_plain_run_in_float64(name: str) -> None:
    model = tiny_model(name, BF16).requires_grad_(False)
    batch = tiny_batch(name)
    ranges = isotype.measure_ranges(model, batch)
    # torch has no grouped matmul in float64.
    agrees(ranges, reference(model, batch, torch.float32 if name in _EXPERTS else torch.float64))
    assert [note for note in ranges.notes if not note.startswith("tokens reached")] == []
    assert ranges.dtype == "float32"


@few("name", ["llama", "llama-tied-bias", "gemma3-vision", "qwen3-moe", "t5"], "llama-tied-bias", "qwen3-moe")
def test_a_checkpoint_is_measured_as_the_model_in_memory(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path / "model", BF16)
    on_disk = isotype.measure_ranges(path)
    with quiet():
        model = type(tiny_model(name)).from_pretrained(path, dtype=BF16)
    in_memory = isotype.measure_ranges(model.requires_grad_(False))
    assert on_disk.notes == in_memory.notes
    assert on_disk.modules == in_memory.modules
    assert on_disk.operators == in_memory.operators
    assert on_disk.loss == in_memory.loss
    assert on_disk.stream == in_memory.stream


def test_operators_are_those_of_a_plain_run() -> None:
    """Every operator of a plain run in float32, seen by a mode of its own: module of the caller, operands, result."""
    model, batch = tiny_model("llama"), tiny_batch("llama")
    model.requires_grad_(False)
    ranges = isotype.measure_ranges(model, batch)
    seen: list[tuple[str, float, float]] = []
    looked_at = ("aten.mm.default", "aten.bmm.default", "aten.pow.Tensor_Scalar", "aten.silu.default")

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if str(func) in looked_at:
                with torch._C._DisableTorchDispatch():
                    seen.append((str(func), largest(args), largest(result)))
            return result

    model.enable_input_require_grads()
    with Look():
        loss = model.eval()(**batch, use_cache=False).loss
        forward = len(seen)
        loss.backward()
    for phase, found in (("forward", seen[:forward]), ("backward", seen[forward:])):
        wanted = [each for each in ranges.operators if each.phase == phase and each.op in looked_at]
        assert [each.op for each in wanted] == [op for op, *_ in found]
        for each, (_, operands, result) in zip(wanted, found, strict=True):
            assert (max(each.inputs), each.output) == pytest.approx((operands, result)), each
    products = [each for each in ranges.operators if each.op == "aten.mm.default"]
    forward_products = [each for each in products if each.phase == "forward"]
    assert all(each.matmul and each.module.endswith(("_proj", "lm_head")) for each in products)
    # Frozen weights take no gradient: one product a layer and direction.
    assert {each.module for each in forward_products} == {each.module for each in products}
    assert len(products) == 2 * len(forward_products)
    assert all(each.source.rpartition(":")[0].endswith(".py") for each in forward_products)


def test_the_share_that_float16_flushes() -> None:
    class Tiny(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0**-20

    values = torch.tensor([[0.0, 2.0**-4, 2.0**-5, 2.0**-5, 2.0**-6, 1.0]])
    ranges = isotype.measure_ranges(Tiny(), {"x": values})
    (product,) = [
        each for each in ranges.operators if each.op == "aten.mul.Tensor" and each.phase == "forward"
    ]
    # 2^-25 itself lies halfway between zero and the smallest number: ties go to even.
    flushed = (values * 2.0**-20).half() == 0
    assert product.flushed == pytest.approx((int(flushed.sum()) - 1) / 5) == 3 / 5
    assert product.inputs == (1.0,)
    assert product.output == 2.0**-20


def test_the_stream_is_the_embedding_and_the_blocks() -> None:
    for name, stream in {
        "llama": ["model.embed_tokens", "model.layers.0", "model.layers.1"],
        "gpt2": ["transformer.wte", "transformer.h.0", "transformer.h.1"],
        "t5": [
            *("encoder.embed_tokens", "encoder.block.0", "encoder.block.1"),
            *("decoder.embed_tokens", "decoder.block.0", "decoder.block.1"),
        ],
    }.items():
        ranges = isotype.measure_ranges(tiny_model(name), tiny_batch(name))
        assert list(ranges.stream) == stream
        assert ranges.residual is not None
        assert ranges.residual.output == max(ranges.by_module[each].output for each in stream)


def test_a_checkpoint_that_is_saved_quantized_is_loaded_whole(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model", BF16)
    policy = isotype.resolve_precision(path, "bfloat16", "nf4", device="t4", storage=None)
    with quiet():
        model = isotype.load(path, policy, device_map={"": "cpu"})
        model.save_pretrained(tmp_path / "nf4")
    ranges = isotype.measure_ranges(tmp_path / "nf4")
    assert ranges.notes == ("the model was loaded whole, not block by block: its weights are stored in nf4",)
    in_memory = isotype.measure_ranges(model)
    assert ranges.by_module["model.layers.0"].output == pytest.approx(
        in_memory.by_module["model.layers.0"].output, rel=1e-3
    )


def test_a_checkpoint_whose_weights_are_dequantized_is_measured_block_by_block(tmp_path: Path) -> None:
    path, _ = mxfp4_checkpoint(tmp_path)
    batch = {"input_ids": torch.tensor([[1, 5, 9, 7]]), "labels": torch.tensor([[1, 5, 9, 7]])}
    ranges = isotype.measure_ranges(path, batch)
    model = isotype.load(path, isotype.resolve_precision(path, "float32", device="cpu"))
    assert ranges.modules == isotype.measure_ranges(model, batch).modules
    assert [note for note in ranges.notes if not note.startswith("tokens reached")] == []


def test_what_a_checkpoint_may_lack_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transformers.LlamaForSequenceClassification, "_keys_to_ignore_on_load_missing", ["score"]
    )
    path = save_tiny("llama", tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(path, architectures=["LlamaForSequenceClassification"])
    config.save_pretrained(path)
    with quiet():
        ranges = isotype.measure_ranges(path)
    assert ranges.notes == (
        "the model was loaded whole, not block by block: the checkpoint has no score.weight, so transformers "
        "initialises this weight with random values",
    )
    assert ranges.by_module["model.layers.1"].gradient > 0


class Speech(torch.nn.Module):
    """A head with the CTC loss, whose second result contains log(0)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, lengths = self.head(x).log_softmax(-1), torch.tensor([8, 8])
        return torch.nn.functional.ctc_loss(scores, torch.tensor([[1, 2], [3, 1]]), lengths, lengths // 4)


def test_the_ctc_loss_keeps_logarithms_of_zero() -> None:
    ranges = isotype.measure_ranges(Speech(), {"x": torch.randn(8, 2, 4)})
    assert "not finite" not in " ".join(ranges.notes)
    (loss,) = (operator for operator in ranges.operators if operator.op == "aten._ctc_loss.Tensor")
    assert 0 < loss.output < 100


def test_token_ids_are_drawn_where_the_tokenizer_knows_no_word() -> None:
    """Rows of such texts would never be long enough."""
    model = tiny_model("llama")
    (batch,) = Batches.for_model(model, lambda text: {"input_ids": []}, 100).batches
    assert batch["input_ids"].shape == (2, 64)


def test_token_ids_are_drawn_for_want_of_a_tokenizer(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model")
    ranges = isotype.measure_ranges(path, tokens=100)
    assert ranges.text == "2 rows of 64 token ids drawn with a fixed seed, because there is no tokenizer"
    assert (ranges.tokens, ranges.batches) == (128, 2)
    assert isotype.measure_ranges(path, tokens=100).modules == ranges.modules
    assert read_measurement(Ranges, ranges.key) is None


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_that_no_token_reached_are_counted(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, batch = architecture.build(torch.float32), architecture.batch()
    chosen: set[tuple[str, int]] = set()
    holders = {
        place: module for place, module in model.named_modules() if type(module).__name__.endswith("Experts")
    }

    def note(place: str) -> Any:
        return lambda module, args: chosen.update((place, expert) for expert in args[1].unique().tolist())

    for place, module in holders.items():
        module.register_forward_pre_hook(note(place))
    few = {key: value[:1, :3] for key, value in batch.items()}
    model(**few)
    every = sum(module.num_experts for module in holders.values())  # type: ignore[misc]
    assert 0 < len(chosen) < every
    (note,) = isotype.measure_ranges(model, batch=few).notes
    assert (
        note
        == f"tokens reached {len(chosen)} of {every} experts: the values of the other experts are unknown"
    )


def test_modules_that_a_forward_replaces() -> None:
    """BigBird-Pegasus attends to all tokens if a text is shorter than its blocks: it builds other modules for this."""
    architecture = ARCHITECTURES["bigbird_pegasus-s2s"]
    ranges = isotype.measure_ranges(architecture.build(torch.float32), architecture.batch(), progress=False)
    measured = {module.name: module.output for module in ranges.modules}
    assert measured["model.encoder.layers.1.self_attn.self.query"] > 0
