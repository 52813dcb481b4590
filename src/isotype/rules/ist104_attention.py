"""Attention operands or masks of different dtypes

**What it means.** Attention kernels need one dtype for query, key and value. The mask must be boolean or
float32, or have the query's dtype.

**Why it happens.** Float32 rotary tables promote query and key to float32, but not value. Or a norm of query and key
returns float32. Or the mask or the cache was created in another dtype.

**An example that fails**

    query, key = apply_rotary(query, key, cos.float(), sin.float())     # float32 now; value is bfloat16
    F.scaled_dot_product_attention(query, key, value)

**Repaired**

    query, key = query.to(value.dtype), key.to(value.dtype)

**How safe is the fix?** Safe: casts of query and key after the rotation, of a norm's output, or of a mask, and a new
cache in the query's dtype. They change no stored value. Unsafe: a cast of a stored rotary table that rounds the table.

**Seen in** huggingface/trl #1460; unslothai/unsloth #827; huggingface/transformers #25598.
"""

from isotype.core.operators import ATTENTION_KERNELS
from isotype.rules.kit.groups import Claim

_HEADLINE = "{given} instead of {expected} in attention"
CLAIMS = (Claim("operator", lambda broken: broken.runs(*ATTENTION_KERNELS), _HEADLINE),)
