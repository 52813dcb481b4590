"""Attention operands or masks of different dtypes

**What it means.** Attention kernels need query, key and value in the same dtype. The attention mask must be boolean, float32, or in the
dtype of the query.

**Why it happens.** Float32 rotary tables promote query and key to float32, but not the value. A norm of query and key can also return
float32. In other cases, code creates the mask or the cache in another dtype.

**An example that fails**

    query, key = apply_rotary(query, key, cos.float(), sin.float())     # float32 now; value is bfloat16
    F.scaled_dot_product_attention(query, key, value)

**Repaired**

    query, key = query.to(value.dtype), key.to(value.dtype)

**How safe is the fix?** The fix is safe if it casts query and key after the rotation, the output of a norm, or the mask, or creates the
cache in the query's dtype. None of these casts changes a stored value. The fix is unsafe if it casts and thereby rounds a stored rotary
table.

**Seen in** huggingface/trl #1460; unslothai/unsloth #827; huggingface/transformers #25598.
"""

from isotype.core.operators import ATTENTION_KERNELS
from isotype.rules.kit.groups import Claim

_HEADLINE = "{given} instead of {expected} in attention"
CLAIMS = (Claim("operator", lambda broken: broken.runs(*ATTENTION_KERNELS), _HEADLINE),)
