"""A training step on a GPU that is not there: fake tensors of a device of torch's own for backends written in Python.

Its type is neither cpu nor cuda, so that every branch for GPUs is taken and none for CPUs. What runs is what a GPU would launch:
operators are counted, with the bytes that they read and write, and none may meet a tensor of the CPU or wait for the device.

Run: python -m tests.fake_gpu [--whole] prints one line of JSON of the cases of `tests/lora/test_fake_gpu.py`. In a process of its own: the device
replaces what torch takes for this machine's accelerator.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import peft
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import isotype
from isotype.core.random_states import RandomStates
from isotype.lora import kernels, weights
from isotype.lora.attention.registered import LENGTHS
from isotype.lora.loss.log_probs import log_probs
from isotype.lora.loss.logits import Head
from isotype.lora.unpadded import Sequences, with_sequences
from isotype.trace.fake import twin
from isotype.train.monitor.meter import MicroBatch, Step
from tests.models import quiet

DEVICE = "npy"

_FREE = frozenset(
    [
        "detach",
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "expand",
        "as_strided",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "squeeze",
        "unsqueeze",
        "alias",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "lift_fresh",
        "_reshape_alias",
        "unsafe_split",
        "narrow",
        "chunk",
        "resize_",
        "set_",
        "is_same_size",
        "record_stream",
        "promote_types",
    ]
)
"""Operators that launch nothing."""
_PRODUCTS = frozenset(["mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "mv", "addmv"])
_WAITS = frozenset(
    ["_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero", "masked_select", "unique", "_unique2"]
)
"""Operators that wait for the device, as their results' values or shapes are asked for."""


@dataclass
class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a step launches.

    Attributes:
        kernels: operator -> how often.
        elementwise, products, dequantized: bytes read and written by operators between the products, by products (weights included), and
            bytes written by dequantization.
        faults: operators that met the CPU or wait for the device.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    elementwise: int = 0
    products: int = 0
    dequantized: int = 0
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        self._judge(name, [*inputs, *outputs])
        if namespace == "prim" or (namespace == "aten" and (name in _FREE or func.is_view)):
            return results
        self.kernels[f"{namespace}.{name}"] += 1
        size = sum(x.numel() * x.itemsize for x in [*inputs, *outputs])
        if "dequantize" in name:
            self.dequantized += max(x.numel() * x.itemsize for x in [*inputs, *outputs])
        elif name in _PRODUCTS:
            self.products += size
        elif namespace != "fake_gpu":
            self.elementwise += size
        return results

    def _judge(self, name: str, tensors: list[torch.Tensor]) -> None:
        if name in _WAITS:
            self.faults.append(f"{name} waits for the device")
        # A number as a tensor of no dimensions may lie on the CPU: it travels as an argument of the launch.
        elsewhere = {
            str(x.device) for x in tensors if x.device.type != DEVICE and (x.dim() or name == "_to_copy")
        }
        if elsewhere:
            self.faults.append(f"{name} on {', '.join(sorted(elsewhere))}")


def start() -> None:
    """Make the device, and let isotype take it for one with Triton; models are made before.

    Weights in 4 bits are dequantized into new memory: bitsandbytes 0.50.2's fake of the operator with `out` compares a shape with a list.
    """
    _setup_privateuseone_for_python_backend(DEVICE)
    backend: Any = torch.get_device_module(DEVICE)
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    backend.get_rng_state = lambda *_: torch.empty(0, dtype=torch.uint8)
    backend.set_rng_state = lambda *_: None
    backend.mem_get_info = lambda *_: (80 << 30, 80 << 30)
    twin._CPU = torch.device(DEVICE, 0)
    there: Any = kernels
    there.DEVICES = (*kernels.DEVICES, DEVICE)
    # On the CPU's build torch's fused norm is a composition; a Triton kernel stands for it: one launch, the same bytes.
    there.TABLE = {**kernels.TABLE, "rms_norm": ("triton",)}
    there._why_not = lambda name, kind: None
    of_weights: Any = weights
    of_weights.has_kernel = lambda operator, kind: operator == "bitsandbytes::gemm_4bit"


def one_attention() -> None:
    """Attention as one operator forward and one backward, as FlashAttention launches it."""

    @torch.library.custom_op("fake_gpu::attention", mutates_args=())
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @attention.register_fake
    def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.transpose(1, 2).contiguous()

    @torch.library.custom_op("fake_gpu::attention_backward", mutates_args=())
    def backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    @backward.register_fake
    def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    attention.register_autograd(
        lambda ctx, grad: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    transformers.AttentionInterface.register(
        "fake_gpu", lambda module, query, key, value, mask, **_: (attention(query, key, value), None)
    )
    transformers.AttentionMaskInterface.register("fake_gpu", lambda *args, **kwargs: None)


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def adapted(
    storage: str,
    variant: Mapping[str, Any],
    *,
    sizes: Mapping[str, int] = SIZES,
    layers: int = 2,
    fused: bool = True,
) -> Any:
    """A Llama with adapters on the CPU, whose weights hold whatever memory held; `storage`: `none`, `nf4` or `int8`."""
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=layers, vocab_size=128, attention_bias=bool(variant.get("bias"))
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    model = model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1 if "norm" in name else 0)
    if storage != "none":
        _quantize(model, storage)
    settings = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", **variant}
    settings.pop("bias", None)
    with quiet():
        model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    model.train()
    if fused:
        isotype.fuse(model, budget=0)
    model.get_base_model().set_attn_implementation("fake_gpu")
    return model


def _quantize(model: Any, storage: str) -> None:
    import bitsandbytes as bnb

    for module in list(model.model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is not nn.Linear:
                continue
            sizes = layer.in_features, layer.out_features
            if storage == "nf4":
                made: Any = bnb.nn.Linear4bit(
                    *sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                )
                made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            else:
                made = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
                made.weight = bnb.nn.Int8Params(
                    layer.weight.data, requires_grad=False, has_fp16_weights=False
                )
            made.bias = layer.bias
            setattr(module, name, made.to("cpu"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = storage == "nf4", storage == "int8"


def step(
    model: Any, tokens: int = 32, *, checkpointing: bool = False, ends: tuple[int, ...] = ()
) -> Launches:
    """What one forward and backward of the layers launch, of one row: without head, loss and embedding's lookup.

    `ends`: where sequences in the row end, for attention by their lengths.
    """
    if checkpointing:
        model.get_base_model().gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        copy: Any = twin.twin_of(model, mode)
        backbone = copy.get_base_model().model
        x = torch.empty(
            1, tokens, backbone.config.hidden_size, dtype=torch.bfloat16, device=DEVICE
        ).requires_grad_()
        launches = Launches()
        positions = torch.arange(tokens, device=DEVICE)[None]
        # What the first step alone does: with more rows than go to bitsandbytes' 4-bit product.
        with torch.no_grad():
            backbone(inputs_embeds=x.detach().expand(1 + weights.FEW, -1, -1), use_cache=False)
        said = None
        if ends:
            steps = [end - begin for begin, end in pairwise((0, *ends))]
            said = Sequences(torch.empty(1 + len(ends), dtype=torch.int32, device=DEVICE), max(steps))
        with launches, with_sequences(said):
            hidden = backbone(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state
            hidden.backward(torch.empty_like(hidden))
    assert x.grad is not None
    gradients = [p.grad for p in copy.parameters() if p.requires_grad]
    assert gradients
    assert all(grad is not None and grad.device.type == DEVICE for grad in gradients)
    return launches


def generated(model: Any, rows: int) -> Launches:
    """What the layers launch for some rows of one token each, without gradients."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        copy: Any = twin.twin_of(model, mode)
        backbone = copy.get_base_model().model
        x = torch.empty(rows, 1, backbone.config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        launches = Launches()
        positions = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE)
        with launches:
            backbone(inputs_embeds=x, position_ids=positions, use_cache=False)
    return launches


def loss(tokens: int, vocabulary: int) -> Launches:
    """What the loss of a frozen head launches, forward and backward."""
    with FakeTensorMode():
        weight = torch.empty(vocabulary, 64, dtype=torch.bfloat16, device=DEVICE)
        hidden = torch.empty(tokens, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.int64, device=DEVICE)
        launches = Launches()
        with launches:
            result = log_probs(Head(weight), hidden, targets, ("entropy", "is_top1"))
            torch.autograd.grad(result.log_probs, hidden, torch.empty_like(result.log_probs))
    return launches


def step_values() -> Launches:
    """What an optimizer step's values launch, on their way to the flag by which the update is left out."""
    with FakeTensorMode():
        loss, norm = (torch.empty((), device=DEVICE) for _ in range(2))
        ids, mask = (torch.empty(4, 64, device=DEVICE, dtype=torch.int64) for _ in range(2))
        batch = MicroBatch(None, {"input_ids": ids, "attention_mask": mask}, None, RandomStates(()))
        launches = Launches()
        with launches:
            step = Step(1, batches=[batch], loss=loss, grad_norm=norm)
            step.launch(torch.device(DEVICE, 0), SimpleNamespace(num_processes=1))
            assert step.broken().device.type == DEVICE
    return launches


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("none", {}),
    "dropout": ("none", {"lora_dropout": 0.1}),
    "DoRA": ("none", {"use_dora": True}),
    "rsLoRA": ("none", {"use_rslora": True}),
    "biases": ("none", {"bias": True, "lora_bias": True}),
    "nf4": ("nf4", {}),
    "int8": ("int8", {}),
}


OFTEN = ("LoRA", "nf4")
"""Cases that run with checkpointing each time."""
RARE = ("rsLoRA",)
"""Cases that run with `--whole` alone: as another, with another scale."""


def main() -> None:
    """Every case, with and without checkpointing (`--whole`, or those of `OFTEN`): its kernels, and what is wrong with it."""
    one_attention()
    whole = "--whole" in sys.argv
    checkpointed = CASES if whole else OFTEN
    models = {
        name: adapted(storage, variant)
        for name, (storage, variant) in CASES.items()
        if whole or name not in RARE
    }
    start()
    results = {}
    for name, model in models.items():
        for checkpointing in (False, True)[: 1 + (name in checkpointed)]:
            launches = step(model, checkpointing=checkpointing)
            results[f"{name}{' checkpointed' if checkpointing else ''}"] = {
                "kernels": launches.kernels,
                "faults": launches.faults,
            }
    models["LoRA"].get_base_model().set_attn_implementation(LENGTHS)
    extra = {
        "lengths": step(models["LoRA"], ends=(12, 13, 32)),
        "few rows": generated(models["nf4"], 8),
        "many rows": generated(models["nf4"], 65),
        "few rows, DoRA": generated(models["DoRA"], 8),
        "loss": loss(4096, 128_256),
        "step values": step_values(),
    }
    results |= {name: {"kernels": each.kernels, "faults": each.faults} for name, each in extra.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
