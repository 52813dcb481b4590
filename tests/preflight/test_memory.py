"""What a check foresees of a step's memory, beside what the real step holds: storages, checkpointing, PEFT's path and fused.

What the real step holds is counted by a dispatch mode of the test's own, which shares nothing with the ledger: bytes of
storages that some tensor made in the step still lies on, and those that were there before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import isotype
from isotype.lora import modules, weights
from isotype.lora.attention import registered
from isotype.model.repeated_layers import fold
from isotype.precision.policy import PrecisionPolicy
from isotype.train.models import weightless_model
from tests.adapters import adapted, loaded, lora_config
from tests.cpus import pretend
from tests.measured_step import measure_step
from tests.models import one_layer, quiet, tiny_batch
from tests.pairwise import few

TOLERANCE = 0.05
LAYERS = 4  # fewer are not folded
SIZES: Any = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,  # torch's kernel, which is traced, repeats what fewer heads have; isotype's does not
    "use_cache": False,
    "pad_token_id": 0,
}


class Alive(TorchDispatchMode):
    """The most bytes of storages that were alive at a time, `before` and those that operators made."""

    def __init__(self, before: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.most = 0
        self._known: dict[int, Any] = {}
        for tensor in before:
            self._hear(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._hear(leaf)
        return made

    def _hear(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[address]
            self.bytes -= size

        self._known[address] = weakref.ref(storage, gone)
        self.bytes += size
        self.most = max(self.most, self.bytes)


def held(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and the tensors of quantization states."""
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            yield tensor
            state = getattr(tensor, "quant_state", None)
            holders = (state, getattr(state, "state2", None), tensor, module.__dict__.get("state"))
            yield from (
                value
                for holder in holders
                for value in getattr(holder, "__dict__", {}).values()
                if isinstance(value, torch.Tensor) and value is not tensor.grad
            )


def trained(
    path: Any, dtype: str, storage: str | None, checkpointing: bool, fused: bool
) -> tuple[nn.Module, PrecisionPolicy]:
    with quiet():
        model, policy = loaded(path, dtype, storage, r=8, target_modules="all-linear")
    ready(model.train(), checkpointing, fused)
    return model, policy


def ready(model: Any, checkpointing: bool, fused: bool) -> None:
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if fused:
        isotype.fuse(model, budget=0, device="cpu")


def real_peak(model: nn.Module, policy: PrecisionPolicy, batch: dict[str, torch.Tensor]) -> int:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    with Alive([*held(model), *batch.values()]) as alive:
        for _ in range(2):
            with torch.autocast("cpu", dtype=policy.autocast, enabled=policy.autocast is not None):
                loss = model(**batch).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return alive.most


def compare(
    config: Any, path: Any, dtype: str, storage: str | None, checkpointing: bool, fused: bool
) -> None:
    model, policy = trained(path, dtype, storage, checkpointing, fused)
    ids = torch.randint(1, 256, (2, 192), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    whole = isotype.check(model, batch, policy=policy, device="cpu", wiring=False, verify=False)
    blank: Any = weightless_model(config, policy, lora=lora_config(r=8), fold=True).train()
    ready(blank, checkpointing, fused)
    folded = isotype.check(blank, batch, policy=policy, device="cpu", wiring=False, verify=False)
    assert whole.complete
    assert folded.complete
    real = real_peak(model, policy, batch)
    assert whole.memory.peak == pytest.approx(real, rel=TOLERANCE)
    assert folded.memory.peak == pytest.approx(real, rel=TOLERANCE)


@pytest.fixture(scope="module")
def config() -> Any:
    return transformers.LlamaConfig(**SIZES)


@pytest.fixture(scope="module")
def path(config: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("memory")
    with quiet():
        transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


STORAGES = (None, "nf4", "fp4", "int8")
THIS, WITHOUT, WITH = "", "cpu-avx2", "cpu-amx"  # without instructions for 16 bits, and with
SMALL = {
    ("float32", "int8", True, False, THIS),
    ("bfloat16", "nf4", False, True, WITHOUT),
}
CASES = [
    pytest.param(*case, marks=() if case in SMALL else pytest.mark.exhaustive)
    for dtype in ("float32", "bfloat16", "float16")
    for storage in STORAGES
    for checkpointing in (False, True)
    for fused in (False, True)
    # What fused layers compute in depends on the CPU; nothing else does.
    for cpu in ((WITHOUT, WITH) if fused and dtype != "float32" else (THIS,))
    for case in [(dtype, storage, checkpointing, fused, cpu)]
]


@pytest.mark.parametrize(("dtype", "storage", "checkpointing", "fused", "cpu"), CASES)
def test_what_is_foreseen_is_what_the_step_holds(
    monkeypatch: pytest.MonkeyPatch,
    config: Any,
    path: Any,
    dtype: str,
    storage: str | None,
    checkpointing: bool,
    fused: bool,
    cpu: str,
) -> None:
    if cpu:
        pretend(cpu, monkeypatch)
    if (
        cpu == WITH
    ):  # isotype's kernels are compiled for this machine: they compute in float32 where it is without
        monkeypatch.setattr(registered, "_why_not_call", lambda *_: "a test")
    compare(config, path, dtype, storage, checkpointing, fused)


@pytest.mark.parametrize("loops", [False, True])
def test_scratch_of_layers_that_run_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, loops: bool
) -> None:
    """Compiled loops hold the weights of a group at a time, torch's operators one: what is foreseen suffices for both."""
    pretend(WITHOUT, monkeypatch)
    monkeypatch.setattr(modules, "is_used", lambda *_: loops)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "intermediate_size": 2048})
    with quiet():
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, policy = trained(tmp_path, "bfloat16", None, True, True)
    batch = {name: torch.ones(1, 16, dtype=torch.long) for name in ("input_ids", "labels")}
    foreseen = isotype.check(
        model, batch, policy=policy, device="cpu", wiring=False, verify=False
    ).memory.peak
    real, weight = real_peak(model, policy, batch), 4 * config.hidden_size * config.intermediate_size
    if loops:
        assert real == pytest.approx(foreseen, rel=0.01)
    else:
        assert foreseen - weight < real < foreseen


@few("checkpointing", [False, True], True)
def test_a_folded_model_where_every_weight_is_trained(config: Any, checkpointing: bool) -> None:
    """Gradients come as activations go: neither is there in full when the other is."""
    batch = {name: torch.ones(2, 32, dtype=torch.long) for name in ("input_ids", "labels")}

    def peak(folded: bool) -> int:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = fold(model) if folded else model
        return isotype.check(
            model, batch, device="cpu", optimizer="sgd", wiring=False, verify=False
        ).memory.peak

    assert peak(True) == pytest.approx(peak(False), rel=TOLERANCE)


def test_peft_s_own_experts_hold_and_compute_what_is_foreseen() -> None:
    parts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = one_layer(adapted("qwen3-moe", target_modules=["q_proj"], target_parameters=parts))
    batch = tiny_batch("qwen3-moe")
    report = isotype.check(model, batch, device="cpu", verify=False, wiring=False)
    with measure_step(model, batch) as step:
        model(**batch).loss.backward()
    assert sum(report.flops.values()) == sum(call.flops * call.repeats for call in step.calls)
    # The optimizer's states, which a check counts from the begin, are not there in this step.
    foreseen = sum(size for kind, size in report.memory.phases["backward"].items() if kind != "optimizer")
    assert foreseen == pytest.approx(sum(step.memory.phases["backward"].values()), rel=0.02)


@pytest.mark.parametrize("share", [0.4, 2.0])
def test_a_simulated_gpu_has_room_for_some_dequantized_constants(
    config: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the fused layers keep the block constants in float32, in a 64th of the card's memory."""
    policy = isotype.resolve_precision(config, dtype="float16", quantization="nf4", device="t4")
    nested = replace(policy, double_quant=True)
    batch = {name: torch.ones(1, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    blocks = LAYERS * (4 * 128 * 128 + 3 * 128 * 320) // 64

    def peak(fold: bool, memory: float) -> int:
        model: Any = weightless_model(config, nested, lora=lora_config(r=8), fold=fold)
        isotype.fuse(model.train(), device="t4")
        monkeypatch.setattr(weights, "gpu_memory", lambda _: int(memory))
        report = isotype.check(model, batch, policy=nested, device="t4", wiring=False, verify=False)
        return report.memory.peak

    for fold_layers in (False, True):
        added = peak(fold_layers, 64 * share * 4 * blocks) - peak(fold_layers, memory=0)
        assert added == pytest.approx(min(share, 1) * 4 * blocks, rel=0.3)


def on_gpu(config: Any, device: str, storage: str | None, fused: bool, lora: Any = None, **check: Any) -> Any:
    """The check of a step on a GPU, of a folded model of the config's; without `lora`, all weights are trained."""
    policy = isotype.resolve_precision(
        config,
        dtype="float16" if device == "t4" else "bfloat16",
        quantization=storage,
        device=device,
        trainable="lora" if lora else "full",
    )
    fold_layers = check.pop("fold", True)
    model: Any = weightless_model(config, policy, lora=lora, fold=fold_layers).train()
    if fused:
        isotype.fuse(model, device=device)
    batch = {name: torch.ones(1, 64, dtype=torch.long) for name in ("input_ids", "labels")}
    report = isotype.check(model, batch, policy=policy, device=device, wiring=False, verify=False, **check)
    assert report.trace.failure is None
    assert not list(report.trace.breaches())
    return report


@pytest.mark.parametrize("device", ["h100", "mi300x", "xpu", "m3-max"])
def test_a_check_of_a_gpu_runs_the_kernels_that_fuse_uses_there(config: Any, device: str) -> None:
    """Apple GPUs have none. Elsewhere no norm stores its input in float32: two bytes less for each of its numbers."""
    report = on_gpu(config, device, None, True, lora_config(r=8))
    names = {call.op.split(".")[1] for call in report.trace.calls if call.op.startswith("isotype.gpu")}
    expected = {"gpu_rms_norm", "gpu_rotate", "gpu_gated", "gpu_gated_backward", "gpu_rms_norm_backward"}
    assert names == (set() if device == "m3-max" else expected)
    of_norms = [call for call in report.trace.calls if call.op == "aten.rsqrt.default"]
    assert bool(of_norms) == (device == "m3-max")


def test_int8_layers_on_a_gpu_quantize_activations_in_float16(config: Any) -> None:
    """bitsandbytes multiplies by dense weights on a CPU alone."""
    runs = {
        device: {call.op for call in on_gpu(config, device, "int8", False, lora_config(r=8)).trace.calls}
        for device in ("h100", "xpu")
    }
    assert "bitsandbytes.int8_mixed_scaled_mm.default" in runs["h100"]
    assert "bitsandbytes.int8_mixed_scaled_mm.default" not in runs["xpu"]
    casts = [
        result[0]
        for call in on_gpu(config, "h100", "int8", False, lora_config(r=8)).trace.calls
        if call.op == "aten._to_copy.default" and "base_layer" in call.module
        for result in call.results
    ]
    assert torch.float16 in casts


@pytest.mark.parametrize("folded", [False, True])
def test_an_optimizer_on_a_gpu_updates_all_parameters_at_once(config: Any, folded: bool) -> None:
    """torch chooses foreach kernels, which allocate a float32 tensor for each parameter; fused kernels allocate none."""
    peaks = {
        (device, optimizer): sum(
            on_gpu(config, device, None, False, fold=folded, optimizer=optimizer)
            .memory.phases["optimizer"]
            .values()
        )
        for device in ("h100", "m3-max")
        for optimizer in ("adamw_torch", "adamw_torch_fused")
    }
    with torch.device("meta"):
        weights = sum(4 * p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    added = peaks["h100", "adamw_torch"] - peaks["h100", "adamw_torch_fused"]
    assert added == pytest.approx(weights, rel=0.01)
    assert peaks["m3-max", "adamw_torch"] - peaks["m3-max", "adamw_torch_fused"] < weights / 2


def test_a_model_fused_on_a_cpu_attends_on_a_gpu_by_torch_s_kernel(path: Any) -> None:
    """The loops of a CPU store no mask of padding, and torch's kernel does."""
    ids = torch.ones(2, 64, dtype=torch.long)
    mask = torch.ones_like(ids).index_fill(1, torch.arange(8), 0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    masked = {}
    for device in ("cpu", "h100"):
        model, policy = trained(path, "bfloat16", None, False, True)
        report = isotype.check(model, batch, policy=policy, device=device, wiring=False, verify=False)
        attends = [call for call in report.trace.calls if "attention" in call.op and call.phase == "forward"]
        masked[device] = {
            operand.role for call in attends for operand in call.operands if "mask" in operand.role
        }
    assert not masked["cpu"]
    assert masked["h100"]


def test_products_with_a_wide_result_count_in_the_dtype_of_their_operands(config: Any) -> None:
    """Gradients of adapters are summed in float32. A T4 has no such product of bfloat16 matrices."""
    names = {}
    for device, dtype in (("h100", "bfloat16"), ("t4", "float16"), ("t4", "bfloat16")):
        policy = isotype.resolve_precision(config, dtype=dtype, device=device)
        model: Any = weightless_model(config, policy, lora=lora_config(r=8), fold=True).train()
        isotype.fuse(model, device=device)
        batch = {name: torch.ones(1, 64, dtype=torch.long) for name in ("input_ids", "labels")}
        report = isotype.check(model, batch, policy=policy, device=device, wiring=False, verify=False)
        calls = [call for call in report.trace.calls if ".dtype" in call.op]
        names[device, dtype] = {call.op for call in calls}
        assert {call.run_dtype for call in calls} <= {getattr(torch, dtype)}
    wide = {"aten.mm.dtype_out", "aten.addmm.dtype_out"}
    assert set() < names["h100", "bfloat16"] <= wide
    assert set() < names["t4", "float16"] <= wide
    assert not names["t4", "bfloat16"]
