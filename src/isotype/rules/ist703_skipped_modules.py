"""
**What it means.** Some batches run a part of the model and others do not: rows with pictures run the vision tower, rows of text alone do not.
FSDP2 and ZeRO-3 gather the weights of a part when it runs, in all processes together.

**Why it happens.** Each process of a sharded training has its own batches. A process whose batch has no picture skips the tower and meets the others in the
next collective: the sizes differ, and the run hangs (NCCL) or crashes (gloo).

**An example that fails**

    data = interleave_datasets([with_pictures, text_alone])
    SFTTrainer(model, SFTConfig(fsdp="full_shard"), train_dataset=data)

**Repaired**

    batch = collate([*rows, row_with_a_picture])               # for a batch without pictures: one more row, its labels -100

`isotype sft` adds such a row itself.

**What is not reported.** Experts and other modules inside of a layer, whose weights are gathered with the layer; DDP, whose `find_unused_parameters`
handles it.

**How safe is the fix?** Safe: a row without labels adds nothing to the loss or the gradients.

**Seen in** isotype's own training of rows with and without pictures over two processes.
"""

from __future__ import annotations

from collections.abc import Iterator

from isotype.core.names import listed
from isotype.records.finding import Finding
from isotype.records.trace import Trace
from isotype.rules.kit.words import advice

TITLE = "Processes that do not run the same modules"


def find(trace: Trace) -> Iterator[Finding]:
    """Yield the modules that only some of the processes' batches run, under FSDP."""
    skipped = () if trace.reach is None else trace.reach.skipped
    if trace.setup.fsdp and skipped:
        how = "give a batch that does not run it one more row that does, with labels of -100"
        yield Finding(
            "IST703",
            "error",
            f"only some batches run {listed(skipped, 3)}: processes that share the model wait for each other",
            module=skipped[0],
            cause="FSDP gathers the weights of a module in all processes together, when it runs",
            notes=("measured on the first batches of the training data",),
            fixes=(advice("data_collator", how),),
            places=skipped,
        )
