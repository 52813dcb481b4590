"""A convolution whose input has another dtype than its weight

**What it means.** A convolution needs input, weight and bias of one dtype. In most models, this convolution is the
patch embedding of a vision tower: the first operator that reads the images.

**Why it happens.** The processor returns float32 pixels, and the tower was loaded in 16 bits. Or the tower
stays in float32, and the pixels were cast to 16 bits like the rest of the model.

**An example that fails**

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    model(**processor(images=image, text=text, return_tensors="pt"))     # pixel_values: float32

**Repaired**

    batch["pixel_values"] = batch["pixel_values"].to(model.dtype)

**How safe is the fix?** Safe: a cast of the pixels to bfloat16 rounds them by at most 0.2 %; a cast of 16-bit pixels to
float32 is exact. Unsafe: a cast of the convolution's weight that may round its values.

**Seen in** OpenGVLab/InternVL #602; haotian-liu/LLaVA #1712; kohya-ss/sd-scripts #1562; unslothai/unsloth
#5313.
"""

from isotype.rules.kit.groups import Claim

_HEADLINE = "{given} instead of {expected} in a convolution"
CLAIMS = (Claim("operator", lambda broken: broken.runs("conv"), _HEADLINE),)
