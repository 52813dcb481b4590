"""
**What it means.** A convolution needs input, weight and bias of one dtype. In most models, this convolution is the
patch embedding of a vision tower: the first operator that reads the images.

**Why it happens.** The processor returns float32 pixels, and the tower was loaded in 16 bits. Or the tower
stays in float32, and the pixels were cast to 16 bits like the rest of the model.

**An example that fails**

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    model(**processor(images=image, text=text, return_tensors="pt"))     # pixel_values: float32

**Repaired**

    batch["pixel_values"] = batch["pixel_values"].to(model.dtype)

**How safe is the fix?** A cast to bfloat16 rounds each normalised pixel once. A pixel has 8 bits, and bfloat16 has 8
significant bits.

**Seen in** OpenGVLab/InternVL #602; haotian-liu/LLaVA #1712; kohya-ss/sd-scripts #1562; unslothai/unsloth
#5313.
"""

from __future__ import annotations

from isotype.rules.kit.contract_rule import contract_rule
from isotype.rules.kit.groups import Claim

TITLE = "A convolution whose input has another dtype than its weight"
CLAIMS = (Claim("operator", lambda broken: broken.runs("conv")),)

find = contract_rule(__name__, "{given} instead of {expected} in a convolution")
