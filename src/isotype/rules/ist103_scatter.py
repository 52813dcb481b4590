"""A scatter whose source has another dtype than its destination

**What it means.** `index_put`, `index_add`, `scatter` and `masked_scatter` write rows into a tensor, and the
rows must have the dtype of this tensor.

**Why it happens.** A mixture of experts collects its experts' results in a bfloat16 buffer, but the router's float32
weights make the results float32. Or a vision-language model writes image features into token embeddings of another
dtype. Or a cache was allocated in one model's dtype, and a model of another dtype writes into the cache.

**An example that fails**

    combined = torch.zeros_like(hidden)                          # bfloat16
    combined.index_add_(0, rows, expert(hidden[rows]) * weights) # the router's weights are float32

**Repaired**

    combined.index_add_(0, rows, (expert(hidden[rows]) * weights).to(combined.dtype))

**How safe is the fix?** Safe: the rows are rounded once, as every result of a 16-bit operator. If a module returns the
rows, `isotype.repair` casts its outputs. Otherwise edit the line that the report names, or the cache's dtype.

**Seen in** hiyouga/LLaMA-Factory #5943, #3807; pytorch/torchtitan #2389; OneTrainer #824; pytorch/torchtune
#1349; chemprop/chemprop #780; cvg/glue-factory #76; Lightning-AI/litgpt #542.
"""

from isotype.rules.kit.groups import SCATTERS, Claim

_HEADLINE = "{given} instead of {expected} in a scatter, which requires equal dtypes"
CLAIMS = (Claim("operator", lambda broken: broken.runs(*SCATTERS), _HEADLINE),)
