"""ZeRO-3 with parameters of several dtypes

**What it means.** DeepSpeed's ZeRO-3 gathers small parameters together after the optimizer's step. The small parameters have several
dtypes, such as float32 for adapters and bfloat16 for the base model.

**Why it happens.** DeepSpeed 0.19.2 allocates all gathered parameters in the dtype of the first parameter. Later releases of DeepSpeed
gather each parameter in its own dtype.

**An example that fails**

    peft_model = get_peft_model(base_in_bfloat16, config)      # PEFT makes the adapters float32
    # with ZeRO-3 and deepspeed 0.19.2: TypeError: output tensor must have the same type as input tensor

**Repaired**

    # pip install 'deepspeed>=0.19.3', or adapters in the base's dtype (unsafe):
    get_peft_model(base_in_bfloat16, config, autocast_adapter_dtype=False)

**What is not reported.** The rule ignores ZeRO-1, ZeRO-2 and every release of DeepSpeed except 0.19.2.

**How safe is the fix?** A newer DeepSpeed is safe, because it does not change the results. A cast of adapters to 16 bits is unsafe, because
16-bit adapters lose small updates (IST801).

**Seen in** deepspeedai/DeepSpeed #8072; huggingface/trl #6089.
"""

import math

from isotype.core.dtypes import dtype_name
from isotype.records.finding import Fix
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of
from isotype.rules.kit.weight_sets import casts, main_dtype

_BROKEN = "0.19.2"


def find(trace: Trace) -> Findings:
    if trace.setup.zero3 != _BROKEN:
        return
    floats = [weight for weight in trace.weights if not weight.buffer and weight.dtype.is_floating_point]
    most = main_dtype(floats, lambda weight: math.prod(weight.shape))
    others = [weight for weight in floats if weight.dtype != most]
    if most is None or not others:
        return
    dtypes = " and ".join(dict.fromkeys(dtype_name(weight.dtype) for weight in floats))
    cast = Fix(f"cast the other parameters to {dtype_name(most)}", "unsafe", actions=casts(others, most))
    how = "install deepspeed 0.19.3 or newer, which gathers each parameter in its own dtype"
    yield finding_of(
        "error",
        f"ZeRO-3 of DeepSpeed {_BROKEN} cannot gather {dtypes} together",
        others,
        phase="optimizer",
        notes=("DeepSpeed raises: TypeError: output tensor must have the same type as input tensor",),
        fixes=(advice("deepspeed", how), cast),
    )
