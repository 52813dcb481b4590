"""Processes of a sharded training that run different modules

**What it means.** A part of the model runs only in some batches. For example, rows with images run the vision tower, but rows with only
text do not. When such a part runs, FSDP2 and ZeRO-3 gather its weights in a collective operation, in which all processes must take part.

**Why it happens.** Each process of a sharded training has its own batches. A process whose batch has no image skips the vision tower and
starts its next collective operation, while the other processes gather the weights of the tower. The two collective operations have
different sizes, so the training hangs (NCCL) or crashes (gloo).

**An example that fails**

    data = interleave_datasets([with_images, text_alone])
    SFTTrainer(model, SFTConfig(fsdp="full_shard"), train_dataset=data)

**Repaired**

    batch = collate([*rows, row_with_an_image])     # if no row has an image; all labels of the new row are -100

`isotype sft` adds a row without labels that runs these modules to such batches.

**What is not reported.** The rule ignores experts and other modules inside of a layer, because their weights are gathered with the layer.
IST705 reports the same problem under DDP.

**How safe is the fix?** The fix is safe: a row without labels adds nothing to the gradients, and neither does 0 times the output of a
module.

**Seen in** isotype's own training of rows with and without images over two processes.
"""

from isotype.core.names import listed
from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.findings import Findings, advice, reach_of


def find(trace: Trace) -> Findings:
    reach = reach_of(trace)
    if not trace.setup.fsdp or not (reach.skipped or reach.mismatch):
        return
    if reach.skipped:
        what = f"only some batches run {listed(reach.skipped, 3)}"
        how = "add a row that runs these modules, with labels of -100, to every batch that does not run them"
    else:
        what = "the gradients of different batches reach different modules"
        how = "let every batch use all trained modules, or add 0 times their outputs to the loss"
    notes = []
    if reach.mismatch is not None:
        first, other = (call or "ends its step" for call in (reach.mismatch.first, reach.mismatch.other))
        place = f"in collective {reach.mismatch.at + 1} of the step"
        notes.append(f"{place}, one process {first} and another {other} (FSDP2 with a fake process group)")
    yield Finding(
        "error",
        f"{what}: the processes of a sharded model then wait for each other forever",
        module=reach.skipped[0] if reach.skipped else "",
        cause="when a module runs, FSDP gathers the module's weights in all processes together",
        notes=(*notes, "measured on the first batches of the training data"),
        fixes=(advice("data_collator", how),),
        places=reach.skipped,
    )
