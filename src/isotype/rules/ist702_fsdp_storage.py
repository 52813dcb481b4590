"""FSDP over integer codes

**What it means.** FSDP1 shards a model whose quantized weights are stored as integers. For 4-bit codes, `bnb_4bit_quant_storage` sets the
dtype that stores them, and the default is uint8. int8 weights are always stored as integers.

**Why it is bad.** FSDP1 can flatten only float parameters. Before the first step, FSDP1 raises `Cannot flatten integer dtype tensors` or
`Must flatten tensors with uniform dtype but got torch.float16 and torch.int8`.

**An example that fails**

    BitsAndBytesConfig(load_in_4bit=True)           # codes in uint8; with accelerate launch --fsdp_version 1

**Repaired**

    BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)

**How safe is the fix?** The fix is safe, because the stored bytes stay the same. Only the dtype of the tensor that stores the bytes
changes. For int8 weights, you have to load the model in nf4, which rounds to 4 bits, or without quantization.

**Seen in** bitsandbytes-foundation/bitsandbytes #970, #1709; huggingface/transformers #42600; axolotl-ai-cloud/axolotl #2250;
hiyouga/LlamaFactory #3853.
"""

from isotype.core.dtypes import dtype_name
from isotype.core.names import grouped
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of
from isotype.rules.kit.weight_sets import counted, quantized


def find(trace: Trace) -> Findings:
    if trace.setup.fsdp != 1:
        return
    kept = ((weight, state) for weight, state in quantized(trace) if not weight.dtype.is_floating_point)
    for int8, packed in sorted(grouped(kept, lambda pair: pair[1].format == "int8").items()):
        first, state = packed[0]
        weights = [weight for weight, _ in packed]
        how = f"load with bnb_4bit_quant_storage={dtype_name(state.compute or trace.setup.compute)}"
        if int8:
            how = "use nf4 with a float bnb_4bit_quant_storage, or do not quantize"
        are = counted(weights, f"{state.format} weight", "are")
        yield finding_of(
            "error",
            f"FSDP1 cannot flatten {dtype_name(first.dtype)}: {are} stored in this dtype",
            weights,
            phase="load",
            notes=("FSDP raises: Cannot flatten integer dtype tensors",),
            fixes=(advice("quantization" if int8 else "bnb_4bit_quant_storage", how),),
        )
