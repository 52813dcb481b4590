"""A quantized layer without its quantization state

**What it means.** A quantized layer has packed codes without their quantization state (scales, code book, shape). A script or library has
replaced the parameter by a plain tensor (`load_state_dict`, `setattr`), or by a copy without the attributes of the parameter.
`load_state_dict(…, strict=False)` may also have replaced the codes of a 4-bit layer. It does not read the states in the file, so the layer
multiplies the new codes by the old scales. isotype sees such a load in `isotype run` and in `isotype check package.module:function`. Old
versions of bitsandbytes lose the state when FSDP2 gathers the parameter. If the checkpoint lacks a weight, such as the weight of a new
head, transformers creates a quantized layer with a float weight. A script may also create quantized layers, and never move them to a
device. bitsandbytes quantizes weights only in this move. On a CPU, PEFT's DoRA replaces an int8 weight by a copy without its scales in
every forward.

**Why it is bad.** The layer cannot compute. It raises `'Parameter' object has no attribute 'quant_state'`, `quant_state is required` or a
bare `AssertionError`. With the scales of other codes, the layer computes wrong values without an error.

**An example that fails**

    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)

**Repaired**

    BitsAndBytesConfig(…, llm_int8_skip_modules=["head"])    # load again; skip layers whose weights your code replaces

**How safe is the fix?** The fix is safe: you load codes and scales again, because packed codes alone do not determine the scales.

**Seen in** haotian-liu/LLaVA #1028; axolotl-ai-cloud/axolotl #2992; bitsandbytes-foundation/bitsandbytes #825, #1067, #1946.
"""

from isotype.core.dtypes import dtype_name
from isotype.core.names import base_name
from isotype.records.trace import Trace, Weight
from isotype.rules.kit.findings import Findings, advice, finding_of
from isotype.rules.kit.weight_sets import counted, quantized

_DORA = ".lora_magnitude_vector."


def find(trace: Trace) -> Findings:
    layers = [*quantized(trace)]
    missing = [weight for weight, state in layers if not state.present]
    plain = [weight for weight in missing if weight.dtype.is_floating_point]
    if plain and len(plain) == len(layers):
        cause = f"{base_name(plain[0].name)} is {dtype_name(plain[0].dtype)}: bitsandbytes quantizes a weight when .to(device) or .cuda() moves its layer"
        message = (
            f"{counted(plain, 'weight', 'are')} not quantized, because the model was not moved to a device"
        )
        how = "move the model to its device before the step: model.to(device)"
        yield finding_of("error", message, plain, cause=cause, fixes=(advice(plain[0].module, how),))
    elif plain:
        heads = dict.fromkeys(base_name(weight.module).rpartition(".")[2] for weight in plain)
        how = f"load the model with BitsAndBytesConfig(…, llm_int8_skip_modules={[*heads]})"
        are = counted(plain, "weight", "are")
        message = f"{are} not quantized, but the layer computes with packed codes"
        cause = f"{base_name(plain[0].name)} is {dtype_name(plain[0].dtype)}: the checkpoint does not contain this weight, or code replaced it"
        yield finding_of("error", message, plain, cause=cause, fixes=(advice(plain[0].module, how),))
    if mixed := [weight for weight, _ in layers if weight.codes_set_at]:
        message = f"{counted(mixed, '4-bit weight', 'have')} new codes with the scales of the earlier codes"
        cause = f"load_state_dict does not read the quantization states of {base_name(mixed[0].name)}, {mixed[0].codes_set_at}"
        how = "load the checkpoint with from_pretrained, or load float weights before .to(device) quantizes the model"
        yield finding_of(
            "error", message, mixed, phase="load", cause=cause, fixes=(advice(mixed[0].module, how),)
        )
    lost = [weight for weight in missing if not weight.dtype.is_floating_point]
    copied = _copied_by_dora(trace)
    message = f"{counted(lost, 'quantized weight', 'have')} lost the quantization state"
    if copied and not lost:
        lose = counted(copied, "int8 weight", "lose")
        message = f"{lose} the row scales in the first forward, and the second forward fails"
    if copied:
        cause = f"on a CPU, PEFT's DoRA replaces {copied[0].name} by a copy without its scales"
        how = "use LoRA without DoRA (use_dora=False), or 4-bit weights (load_in_4bit=True)"
        yield finding_of("error", message, lost or copied, cause=cause, fixes=(advice("use_dora", how),))
    elif lost:
        how = "load the model again, and do not replace packed weights with plain tensors (assignment, copy_, load_state_dict)"
        cause = f"{lost[0].name} was replaced by a tensor without its scales"
        yield finding_of("error", message, lost, cause=cause, fixes=(advice(lost[0].module, how),))


def _copied_by_dora(trace: Trace) -> list[Weight]:
    """Return the int8 weights that PEFT's DoRA has copied in a forward on a CPU.

    In a layer's first forward, bitsandbytes moves the row scales from the weight to the layer. PEFT then replaces the
    weight by a copy without scales, and the second forward needs the scales of this copy. isotype.model.boundary keeps the
    scales in such a copy.
    """
    ran = {call.module.partition(_DORA)[0] for call in trace.calls if _DORA in call.module}
    adapted = {name.partition(_DORA)[0] for name in trace.modules if _DORA in name}
    int8 = (row for row in quantized(trace) if row[1].format == "int8" and not row[1].bounded)
    layers = ((weight, ran if state.present else adapted) for weight, state in int8)
    copied = [weight for weight, homes in layers if weight.module.rpartition(".")[0] in homes]
    return copied if trace.setup.profile.kind == "cpu" else []
