"""A convolution whose input has another dtype than its weight

**What it means.** A convolution needs input, weight and bias in the same dtype. In most models, the error comes from the patch embedding of
a vision tower, which is the first operator that reads the images.

**Why it happens.** The processor returns float32 pixels, but the vision tower was loaded in 16 bits. In other cases, the vision tower stays
in float32, but the pixels were cast to 16 bits like the rest of the model.

**An example that fails**

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    model(**processor(images=image, text=text, return_tensors="pt"))     # pixel_values: float32

**Repaired**

    batch["pixel_values"] = batch["pixel_values"].to(model.dtype)

**How safe is the fix?** A cast of the pixels is safe. A cast to bfloat16 rounds pixels by at most 0.2 %, and a cast of 16-bit pixels to
float32 is exact. A cast of the convolution's weight is unsafe if it may round values of the weight.

**Seen in** OpenGVLab/InternVL #602; haotian-liu/LLaVA #1712; kohya-ss/sd-scripts #1562; unslothai/unsloth #5313.
"""

from isotype.rules.kit.groups import Claim

_HEADLINE = "{given} instead of {expected} in a convolution"
CLAIMS = (Claim("operator", lambda broken: broken.runs("conv"), _HEADLINE),)
