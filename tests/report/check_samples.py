"""Reports made by hand: what the recorder and the rules would say about a Llama of 30 layers, healthy and broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from isotype.precision.devices.profile import device_profile
from isotype.precision.ranges import OperatorRange, Ranges
from isotype.records.finding import Action, Cost, Finding, Fix
from isotype.records.memory import Memory
from isotype.records.request import Setup
from isotype.records.trace import Breach, Call, Failure, Operand, Origin, Quantization, Trace, Weight
from isotype.report.check.report import Report

F32, BF16, F16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
MIB = 2**20
HIDDEN, FEED, VOCABULARY, RANK = 576, 1536, 49152, 16
BATCH, LENGTH = 2, 2048
TOKENS = (BATCH, LENGTH, HIDDEN)
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (192, HIDDEN),
    "self_attn.v_proj": (192, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FEED, HIDDEN),
    "mlp.up_proj": (FEED, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEED),
}
FED_BY_NORMS = tuple(name for name in LINEARS if not name.endswith(("o_proj", "down_proj")))
NORMS = ("input_layernorm", "post_attention_layernorm")
MODELING = "transformers/models/llama/modeling_llama.py"


def operand(role: str, dtype: torch.dtype, shape: tuple[int, ...], name: str = "") -> Operand:
    return Operand(role, dtype, shape, Origin("parameter", dtype, name or role))


MEASURED = Ranges(
    source="LlamaForCausalLM",
    key="",
    when="2026-11-22T10:00:00+00:00",
    dtype="float32",
    text="the batch given",
    tokens=4096,
    batches=1,
    spread=1.0,
    modules=(),
    operators=(
        OperatorRange("model.layers.0.mlp.down_proj", "aten.mm.default", 0, "forward", (9_800.0, 3.1), 310.0),
        OperatorRange(
            "model.layers.29.mlp.down_proj", "aten.mm.default", 0, "forward", (8_100.0, 2.9), 25_600.0
        ),
    ),
    stream=(),
)


def setup(device: str = "t4", autocast: torch.dtype | None = None, **fields: object) -> Setup:
    values = {
        "profile": device_profile(device),
        "autocast": autocast,
        "scaler": autocast == F16,
        "optimizer": "adamw",
        "compute": F16,
        "learning_rate": 2e-4,
        "batch": {"input_ids": (BATCH, LENGTH), "labels": (BATCH, LENGTH)},
        "ranges": MEASURED,
    }
    return Setup(**{**values, **fields})  # type: ignore[arg-type]


def kept(layers: int, folded: bool) -> list[tuple[int, int]]:
    """(number, layers it stands for): a folded model keeps the first layer and the last, for all the others."""
    return [(0, 1), (layers - 1, layers - 1)] if folded else [(layer, 1) for layer in range(layers)]


def linear(name: str, shape: tuple[int, int], compute: torch.dtype, repeats: int) -> list[Weight]:
    """An nf4 layer with its LoRA adapter, whose masters are float32."""
    state = Quantization("nf4", compute, compute, True, F32, U8, U8)
    rows, columns = shape

    def adapter(part: str, size: tuple[int, int]) -> Weight:
        module = f"{name}.{part}.default"
        return Weight(
            f"{module}.weight", F32, size, trainable=True, adapter=True, module=module,
            module_class="Linear", kind="linear", repeats=repeats,
        )  # fmt: skip

    packed = Weight(
        f"{name}.weight", U8, (rows * columns // 2, 1), module=name, module_class="Linear4bit",
        kind="linear4bit", quantization=state, repeats=repeats,
    )  # fmt: skip
    return [packed, adapter("lora_A", (RANK, columns)), adapter("lora_B", (rows, RANK))]


def plain(name: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...], repeats: int = 1) -> Weight:
    classes = {"norm": "LlamaRMSNorm", "embedding": "Embedding", "linear": "Linear"}
    return Weight(
        f"{name}.weight", dtype, shape, module=name, module_class=classes[kind], kind=kind, repeats=repeats
    )


def llama_weights(
    layers: int = 30, folded: bool = False, compute: torch.dtype = F16, norms: torch.dtype = F32
) -> list[Weight]:
    found = [plain("model.embed_tokens", "embedding", compute, (VOCABULARY, HIDDEN))]
    for layer, repeats in kept(layers, folded):
        for name, shape in LINEARS.items():
            found += linear(f"model.layers.{layer}.{name}", shape, compute, repeats)
        found += [plain(f"model.layers.{layer}.{n}", "norm", norms, (HIDDEN,), repeats) for n in NORMS]
    found.append(plain("model.norm", "norm", norms, (HIDDEN,)))
    frequencies = Weight(
        "model.rotary_emb.inv_freq", F32, (32,), buffer=True, module="model.rotary_emb",
        module_class="LlamaRotaryEmbedding",
    )  # fmt: skip
    head = plain("lm_head", "linear", compute, (VOCABULARY, HIDDEN))
    return [*found, frequencies, replace(head, tied=("model.embed_tokens.weight",))]


def matmul(
    module: str,
    shape: tuple[int, int],
    given: torch.dtype,
    weight: torch.dtype,
    runs: torch.dtype,
    repeats: int,
) -> Call:
    """A product in `runs`; where the operands differ, one that the recorder had to convert for."""
    rows, columns = shape
    breach = None
    if given != weight:
        message = "expected mat1 and mat2 to have the same dtype, but got: float != c10::Half"
        breach = Breach(message, assumed=True, converted=runs)
    return Call(
        "aten.mm.default", "forward", module, f"{MODELING}:243",
        (operand("self", given, (BATCH * LENGTH, columns)), operand("mat2", weight, (columns, rows))),
        ((runs, (BATCH * LENGTH, rows)),),
        flops=2 * BATCH * LENGTH * rows * columns, repeats=repeats, breach=breach,
    )  # fmt: skip


def embedding(dtype: torch.dtype) -> Call:
    operands = (
        operand("weight", dtype, (VOCABULARY, HIDDEN)),
        operand("indices", torch.int64, (BATCH, LENGTH)),
    )
    return Call(
        "aten.embedding.default",
        "forward",
        "model.embed_tokens",
        f"{MODELING}:410",
        operands,
        ((dtype, TOKENS),),
    )


def norm(module: str, returned: torch.dtype, given: torch.dtype, repeats: int) -> Call:
    operands = (operand("self", returned, (HIDDEN,)), operand("other", given, TOKENS))
    results = ((returned, TOKENS),)
    return Call("aten.mul.Tensor", "forward", module, f"{MODELING}:64", operands, results, repeats=repeats)


def attention(module: str, runs: torch.dtype, repeats: int) -> Call:
    heads = (BATCH, 9, LENGTH, 64)
    operands = tuple(operand(role, runs, heads) for role in ("query", "key", "value"))
    return Call(
        "aten.scaled_dot_product_attention.default", "forward", module, f"{MODELING}:281", operands,
        ((runs, heads),), flops=4 * BATCH * LENGTH * LENGTH * HIDDEN, repeats=repeats,
    )  # fmt: skip


def llama_calls(
    layers: int = 30, folded: bool = False, compute: torch.dtype = F16, normed: torch.dtype = F16,
    runs: torch.dtype | None = None,
) -> list[Call]:  # fmt: skip
    """The forward: norms return `normed`, products run in `runs` (the compute dtype unless told)."""
    runs = runs or compute
    calls = [embedding(compute)]
    for layer, repeats in kept(layers, folded):
        at = f"model.layers.{layer}"
        for name in LINEARS:
            if name == "self_attn.q_proj":
                calls.append(norm(f"{at}.input_layernorm", normed, compute, repeats))
            if name == "self_attn.o_proj":
                calls.append(attention(f"{at}.self_attn", runs, repeats))
            if name == "mlp.gate_proj":
                calls.append(norm(f"{at}.post_attention_layernorm", normed, compute, repeats))
            given = normed if name in FED_BY_NORMS else runs
            calls.append(matmul(f"{at}.{name}", LINEARS[name], given, runs, runs, repeats))
            small = (RANK, LINEARS[name][1])
            calls.append(matmul(f"{at}.{name}.lora_A.default", small, F32, F32, F32, repeats))
    calls.append(norm("model.norm", compute, compute, 1))
    calls.append(matmul("lm_head", (VOCABULARY, HIDDEN), compute, compute, compute, 1))
    return calls


def memory(activations: int = 4_300) -> Memory:
    """MiB by kind; the backward is the peak."""
    held = {"weights": 118 * MIB, "adapters": 19 * MIB, "buffers": 1024, "inputs": 65_536}
    return Memory(
        {
            "forward": {**held, "activations": activations * MIB},
            "backward": {**held, "gradients": 19 * MIB, "activations": (activations + 410) * MIB},
            "unscale": {**held, "gradients": 19 * MIB},
            "optimizer": {**held, "gradients": 19 * MIB, "optimizer": 38 * MIB},
        }
    )


def trace(weights: Iterable[Weight], calls: Iterable[Call], how: Setup, **fields: object) -> Trace:
    weights = tuple(weights)
    values = {
        "modules": {weight.module: weight.module_class for weight in weights},
        "memory": memory(),
        "model": "HuggingFaceTB/SmolLM2-135M",
    }
    return Trace(how, tuple(calls), weights, **{**values, **fields})  # type: ignore[arg-type]


def clean(folded: bool = True) -> Report:
    return Report(
        trace(llama_weights(folded=folded), llama_calls(folded=folded), setup(autocast=F16)), (), 0.41
    )


def unmeasured() -> Report:
    known = setup(autocast=F16, ranges=None, family_ranges="hidden states of 100,000 (a report)")
    return Report(trace(llama_weights(folded=True), llama_calls(folded=True), known), (), 0.41)


CRASH = Finding(
    code="IST101",
    severity="error",
    message="float32 activations meet float16 weights",
    module="model.layers.0.self_attn.q_proj",
    op="aten.mm",
    phase="forward",
    source=f"{MODELING}:243",
    cause="model.layers.0.input_layernorm.weight is float32, so weight * hidden is float32   modeling_llama.py:64",
    evidence=(
        "float32  parameter model.layers.0.input_layernorm.weight",
        "float32  promotion aten.mul in model.layers.0.input_layernorm   modeling_llama.py:64",
        "float32  input of model.layers.0.self_attn.q_proj",
    ),
    notes=("149 more operands in 30 layers fail for the same cause",),
    fixes=(
        Fix(
            "return each norm's output in float16", "safe", True,
            (Action("output", "model.layers.*.input_layernorm", "float16"),), "the step then runs clean",
        ),
        Fix(
            "cast the norms' weights to float16", "unsafe", True,
            (Action("parameter", "model.layers.*.input_layernorm.weight", "float16"),),
            "the step then runs clean",
        ),
    ),
    operands=(
        operand("self", F32, (BATCH * LENGTH, HIDDEN)),
        operand("mat2", F16, (HIDDEN, HIDDEN)),
    ),
    places=tuple(f"model.layers.{layer}.{name}" for layer in range(30) for name in FED_BY_NORMS),
)  # fmt: skip

SLOW = Finding(
    code="IST401",
    severity="warning",
    message="30 layers of nf4 weights compute in float32, the default of bitsandbytes",
    module="model.layers.0.self_attn.q_proj",
    op="bitsandbytes.dequantize_4bit",
    source="bitsandbytes/nn/modules.py:520",
    cause="bnb_4bit_compute_dtype was not given",
    fixes=(
        Fix(
            "let the quantized layers compute in float16", "safe", True,
            (Action("compute", "model.layers.*.self_attn.q_proj", "float16"),), "the finding is gone",
        ),
    ),
    cost=Cost(flops_share=0.62, cast_bytes=1_258_291_200, memory_bytes=340 * MIB, slowdown=2.1),
    places=tuple(f"model.layers.{layer}.{name}" for layer in (0, 29) for name in LINEARS),
)  # fmt: skip

LOST = Finding(
    code="IST801",
    severity="warning",
    message="updates of 2e-04 are below half a unit in the last place of bfloat16 weights",
    module="model.norm",
    phase="optimizer",
    cause="model.norm.weight is trained in bfloat16",
    fixes=(
        Fix(
            "train the parameter in float32", "safe", False, (),
            "only the optimizer's caller can do it",
        ),
    ),
    cost=Cost(flops_share=0.0),
)  # fmt: skip

UNUSED = Finding(
    code="IST204",
    severity="note",
    message="lm_head returns float32 logits",
    module="lm_head",
    op="aten.mm",
    cause="lm_head's output is cast by the loss",
)


def crash() -> Report:
    calls = llama_calls(normed=F32)
    return Report(trace(llama_weights(), calls, setup()), (CRASH,), 0.93)


def costly() -> Report:
    weights = llama_weights(folded=True)
    calls = llama_calls(folded=True, runs=F32)
    return Report(trace(weights, calls, setup(autocast=F16)), (SLOW, LOST, UNUSED), 0.52)


def too_large() -> Report:
    seen = trace(llama_weights(folded=True), llama_calls(folded=True), setup(autocast=F16))
    return Report(replace(seen, memory=memory(activations=21_000)), (), 0.44)


def not_traced() -> Report:
    failure = Failure(
        "forward", "model.layers.3.mlp.experts", "modeling_jetmoe.py:163",
        "RuntimeError: split_with_sizes expects split_sizes to sum exactly to 4096",
    )  # fmt: skip
    calls = llama_calls(layers=3)
    seen = trace(
        llama_weights(), calls, setup(autocast=F16), failure=failure,
        memory=Memory({"forward": {"weights": 118 * MIB, "activations": 900 * MIB}}),
        notes=("3 values of .item() were taken as 1", "dropout was left out: it changes no dtype"),
    )  # fmt: skip
    return Report(seen, (), 0.2)


def mixed_layers() -> Report:
    """Layers 3 and 17 have float32 norms and crash, the others are healthy."""
    odd = (3, 17)
    weights = [
        replace(weight, dtype=F16)
        if weight.kind == "norm" and not any(f".{layer}." in weight.name for layer in odd)
        else weight
        for weight in llama_weights()
    ]
    places = tuple(place for place in CRASH.places if int(place.split(".")[2]) in odd)
    finding = replace(
        CRASH,
        module="model.layers.3.self_attn.q_proj",
        cause="model.layers.3.input_layernorm.weight is float32",
        notes=("9 more operands in 2 of 30 layers fail for the same cause",),
        places=places,
        evidence=(),
    )
    calls = [
        replace(call, results=((F32, TOKENS),))
        if call.module.endswith("norm") and any(f".{layer}." in call.module for layer in odd)
        else call
        for call in llama_calls()
    ]
    return Report(trace(weights, calls, setup()), (finding, LOST), 0.9)


SAMPLES = {
    "crash": crash,
    "costly": costly,
    "clean": clean,
    "unmeasured": unmeasured,
    "too_large": too_large,
    "not_traced": not_traced,
    "mixed_layers": mixed_layers,
}
