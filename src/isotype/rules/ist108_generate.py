"""Evaluation or generation outside of autocast

**What it means.** Training runs under autocast, which hides a dtype mismatch in the model. Evaluation or generation runs outside of
autocast, so the mismatch raises an error.

**Why it happens.** Float32 adapters, norms or heads in a 16-bit model rely on autocast. Callbacks, pipelines and code after the training
call `model.generate` without autocast.

**An example that fails**

    trainer.train()                  # bf16=True: under autocast
    model.generate(**prompt)         # expected m1 and m2 to have the same dtype

**Repaired**

    isotype.enforce(model, policy)   # casts at the modules' borders; policy: see isotype.resolve_precision
    # or: with torch.autocast(device, dtype): model.generate(**prompt)

**How safe is the fix?** Autocast is a safe fix, and so are casts of a module's inputs and outputs. They change no stored weight.
`isotype.enforce` also casts frozen weights to the policy's dtype. This cast is exact for weights of a 16-bit checkpoint.

**Seen in** huggingface/trl #1203; huggingface/diffusers #10617; hiyouga/LLaMA-Factory #5480; unslothai/unsloth #3723.
"""

from isotype.rules.kit.groups import Broken, Claim


def _lacks_autocast(broken: Broken) -> bool:
    call = broken.call
    return call.phase == "generate" and broken.trace.setup.autocast is not None and call.autocast is None


_HEADLINE = "{given} instead of {expected} in evaluation or generation, where autocast is off"
CLAIMS = (Claim("phase", _lacks_autocast, _HEADLINE, settled=False),)
