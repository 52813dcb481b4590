"""Weights whose values nothing has set

**What it means.** `to_empty()` has allocated memory for parameters or buffers that were on the meta device, and nothing has set their
values since.

**Why it happens.** A model is built on the meta device, gets memory by `to_empty()`, and loads a checkpoint. A state dict contains no
buffers that were registered with `persistent=False`, such as the frequencies of rotary positions.

**Why it is bad.** The memory contains whatever was there before: often zeros or correct values of another model, sometimes NaN. Losses then
differ between machines, between ranks and between runs. `isotype run` fills such memory with NaN.

**An example that fails**

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cuda")
    model.load_state_dict(state_dict)         # has no values for rotary_emb.inv_freq

**Repaired**

    with accelerate.init_empty_weights(include_buffers=False):   # buffers keep their values
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(state_dict, assign=True)

**What is not reported.** Weights with more than 16 million values.

**How safe is the fix?** Safe: the values are those of a model that was built on the CPU.

**Seen in** NovaSky-AI/SkyRL #1709; huggingface/transformers #45902; EvolvingLMMs-Lab/lmms-engine #185; hiyouga/LlamaFactory #10820.
"""

from isotype.core.names import grouped, listed
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of
from isotype.rules.kit.weight_sets import counted, names


def find(trace: Trace) -> Findings:
    for line, weights in grouped((w for w in trace.weights if w.emptied_at), lambda w: w.emptied_at).items():
        noun = "buffer" if all(weight.buffer for weight in weights) else "weight"
        how = "set the values after to_empty(), or build the model with accelerate.init_empty_weights(include_buffers=False)"
        yield finding_of(
            "error",
            f"nothing has set the values of {counted(weights, noun)}: {listed(names(weights), 3)}",
            weights,
            phase="load",
            source=line,
            cause=f"to_empty() at {line} allocates memory without values",
            notes=("a state dict contains no buffers with persistent=False",) * (noun == "buffer"),
            fixes=(advice("to_empty", how),),
        )
