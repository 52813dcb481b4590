"""FSDP1 flattens the parameters of a unit into one: what it refuses is shown by wrapping for real, on one process."""

from __future__ import annotations

import copy
import functools
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.corpus.cases.crashes_parts import BF16, FP16, FP32, cast_matching, int8, lora, replace_linears
from tests.corpus.cases.training_parts import loaded
from tests.corpus.scenario import Broken, Scenario
from tests.models import tiny_batch


def fsdp1_refuses(broken: Broken, whole: bool = False) -> str | None:
    """The error of FSDP1 over the decoder layers (or over the whole model as one unit), None where it wraps."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if broken.fsdp != 1:
        return None
    model = copy.deepcopy(broken.model)
    layers = {type(module) for module in model.modules() if type(module).__name__.endswith("DecoderLayer")}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        # Frozen and trained parameters in one unit cost memory; dtypes are what is asked here.
        warnings.filterwarnings("ignore", message="(?s).*both parameters with requires_grad=True and False")
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        hook = sys.excepthook  # a process group puts one in that names the rank, and leaves it there
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            FullyShardedDataParallel(
                model,
                auto_wrap_policy=None if whole else ModuleWrapPolicy(layers),
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )
        except ValueError as error:
            return f"FSDP refuses the model: {error}"
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook
    return None


def packed_in(storage: torch.dtype, dtype: torch.dtype = BF16) -> nn.Module:
    """A Llama in nf4 whose codes are packed in `storage`."""
    return replace_linears(loaded("llama", dtype), functools.partial(_packed_layer, storage=storage))


def _packed_layer(layer: nn.Linear, storage: torch.dtype) -> Any:
    import bitsandbytes

    packed = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        layer.bias is not None,
        compute_dtype=layer.weight.dtype,
        quant_type="nf4",
        quant_storage=storage,
    )
    packed.load_state_dict(layer.state_dict())
    return packed.to(layer.weight.dtype).to("cpu").requires_grad_(False)


def _sharded(model: nn.Module, autocast: torch.dtype | None = BF16) -> Broken:
    return Broken(model, tiny_batch("llama"), autocast, fsdp=1)


def lora_on_int8() -> Broken:
    """axolotl: `adapter: lora`, `load_in_8bit` and FSDP."""
    return _sharded(lora(int8(loaded("llama", BF16)), autocast_adapter_dtype=False))


def int8_in_half() -> Broken:
    """An 8-bit model whose other weights are float16."""
    return _sharded(int8(loaded("llama", FP16)).requires_grad_(False), FP16)


def dense_instead() -> Broken:
    """The same run without 8 bit: all weights and adapters in one dtype."""
    return _sharded(lora(loaded("llama", BF16), autocast_adapter_dtype=False))


def qlora_in_bytes() -> Broken:
    """QLoRA with bitsandbytes' default storage."""
    return _sharded(lora(packed_in(torch.uint8), autocast_adapter_dtype=False))


def saved_storage_ignored() -> Broken:
    """A checkpoint saved with bfloat16 storage, loaded with the storage assumed to be bytes."""
    model: Any = packed_in(BF16)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.weight.data = module.weight.data.view(torch.uint8)
            module.weight.quant_storage = torch.uint8
    return _sharded(lora(model, autocast_adapter_dtype=False))


def qlora_for_fsdp() -> Broken:
    """QLoRA packed in bfloat16, adapters in bfloat16 too."""
    model = lora(packed_in(BF16), autocast_adapter_dtype=False)
    return _sharded(cast_matching(model, BF16, "lora_"))


def full_with_upcast_norms() -> Broken:
    """Full fine-tuning of a Gemma in bfloat16 some of whose trainable parameters were made float32."""
    model = cast_matching(loaded("gemma3", BF16), FP32, "norm")
    # A learning rate that bfloat16 holds: FSDP's demand is the only thing wrong here.
    return Broken(model, tiny_batch("gemma3"), BF16, learning_rate=1e-2, fsdp=1)


def dpo_lora() -> Broken:
    """DPO through accelerate: bfloat16 weights, float32 adapters, one unit a decoder layer."""
    return _sharded(lora(loaded("llama", BF16), ["q_proj", "v_proj"]))


def qlora_of_two_halves() -> Broken:
    """FSDP and QLoRA: codes packed in float16 as the arguments say, all else in the model's bfloat16."""
    return _sharded(lora(packed_in(FP16), autocast_adapter_dtype=False))


def activated_lora() -> Broken:
    """aLoRA on q, k and v: adapters float32 whatever the base is."""
    return _sharded(lora(loaded("llama", BF16), ["q_proj", "k_proj", "v_proj"]))


def _refused(
    case: str,
    build: Callable[[], Broken],
    codes: tuple[str, ...],
    cause: str,
    advice: Callable[[], Broken] | None = None,
    notes: str = "",
    whole: bool = False,
) -> Scenario:
    return Scenario(
        case,
        build,
        codes,
        cause,
        cost=functools.partial(fsdp1_refuses, whole=whole),
        advice=advice,
        notes=notes,
    )


_WRAP = "FSDP refuses when it wraps the model, before the step: the cost is its real error."

SCENARIOS: tuple[Scenario, ...] = (
    _refused("axolotl-2250", lora_on_int8, ("IST701", "IST702"), "q_proj|int8", dense_instead, _WRAP),
    _refused("bnb-1709", int8_in_half, ("IST701", "IST702"), "q_proj|int8", dense_instead, _WRAP, whole=True),
    _refused("bnb-970", qlora_in_bytes, ("IST702",), "q_proj|uint8", qlora_for_fsdp, _WRAP),
    _refused("transformers-42600", saved_storage_ignored, ("IST702",), "q_proj|uint8", qlora_for_fsdp, _WRAP),
    _refused("llamafactory-10346", full_with_upcast_norms, ("IST701",), "norm", None, _WRAP),
    _refused("trl-1723", dpo_lora, ("IST701",), "lora_A", None, _WRAP),
    _refused("llamafactory-3853", qlora_of_two_halves, ("IST702", "IST701"), "q_proj", qlora_for_fsdp, _WRAP),
    _refused("activated-lora-13", activated_lora, ("IST701",), "lora_A", None, _WRAP),
)

LEFT_OUT: dict[str, str] = {}
