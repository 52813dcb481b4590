"""A scatter whose source has another dtype than its destination

**What it means.** `index_put`, `index_add`, `scatter` and `masked_scatter` write rows into a tensor. The rows must have the dtype of this
tensor.

**Why it happens.** A mixture of experts collects the results of its experts in a bfloat16 buffer, but float32 weights of the router make
the results float32. A vision-language model may write image features into token embeddings of another dtype. A cache can also cause the
error: it was allocated in the dtype of one model, and a model of another dtype writes into it.

**An example that fails**

    combined = torch.zeros_like(hidden)                          # bfloat16
    combined.index_add_(0, rows, expert(hidden[rows]) * weights) # the router's weights are float32

**Repaired**

    combined.index_add_(0, rows, (expert(hidden[rows]) * weights).to(combined.dtype))

**How safe is the fix?** The fix is safe: it rounds the rows once, as every 16-bit operator rounds its result. If a module returns the rows,
`isotype.repair` casts the outputs of this module. In other cases, you edit the line that the report names, or the dtype of the cache.

**Seen in** hiyouga/LLaMA-Factory #5943, #3807; pytorch/torchtitan #2389; OneTrainer #824; pytorch/torchtune #1349; chemprop/chemprop #780;
cvg/glue-factory #76; Lightning-AI/litgpt #542.
"""

from isotype.rules.kit.groups import SCATTERS, Claim

_HEADLINE = "{given} instead of {expected} in a scatter, which requires equal dtypes"
CLAIMS = (Claim("operator", lambda broken: broken.runs(*SCATTERS), _HEADLINE),)
