"""Predictions that depend on the token to predict

**What it means.** A prediction depends on the token that it should predict. The loss falls, but the model learns nothing useful for
generation.

**Why it happens.** A causal model lets a token attend to later tokens, or the model reads the labels. In other cases, the loss compares a
token with the logits of the same position, and not with those of the position before. A token attends to later tokens in these cases:

- a language model uses the class of an encoder (`BertLMHeadModel` without `is_decoder=True`);
- a 4-D mask of zeros replaces the model's mask;
- an attention function does not pass `is_causal` on;
- a convolution is padded on both sides.

**An example that fails**

    logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())       # each token predicts itself

**Repaired**

    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

**What is not reported.** The rule ignores models whose labels are not tokens of the input, and masked language models.

**How safe is the fix?** The fix is safe: you edit the model or the loss. The training then has the intended objective. The loss is then
higher, because the model no longer sees the answers.

**Seen in** huggingface/transformers #48745 (RoFormer, BigBird, RemBERT, MegatronBERT since 5.9), #31673 (Gemma 2);
tatp22/linformer-pytorch #25; keras-team/keras #23038.
"""

from isotype.core.names import plural
from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, finding_of_leak, reach_of


def find(trace: Trace) -> Findings:
    reach = reach_of(trace)
    later, label, rows = (reach.leak(source) for source in ("later token", "own label", "other row"))
    if later is not None and (rows is None or rows.module != later.module):  # or else IST907 reports both
        message = "predictions depend on the tokens that they predict"
        cause = f"{later.where} lets a token attend to later tokens"
        how = "enable the causal mask in this module (is_decoder=True, is_causal=True), and pass no mask that replaces it"
        yield finding_of_leak(reach, later, "error", message, cause, advice("causal mask", how))
    if label is not None:
        message = "predictions depend on the labels of the same positions"
        cause = f"{label.where} uses the labels as an input, and the prediction at a position depends on the label of this position"
        how = "if the model reads the labels as an input, shift this input to the right by one token"
        yield finding_of_leak(reach, label, "error", message, cause, advice("labels", how))
    if reach.labels is not None and reach.labels.shift == 0:
        yield Finding(
            "error",
            "every token predicts itself",
            cause="the loss compares the logits of a token with the id of the same token",
            notes=(f"{plural(reach.labels.learned, 'prediction')} count in the loss", reach.measured),
            fixes=(advice("loss", "compare the logits of a token with the id of the next token"),),
        )
