"""transformers (5.20 to 5.23): how many GPUs a process trains on.

`TrainingArguments._n_gpu` is every visible GPU where no launcher was used; the Trainer would wrap the model in `nn.DataParallel`, which TRL's
trainers refuse, after the weights were loaded (`args.n_gpu > 1` in trl/trainer/sft_trainer.py). There is no argument for it; the Trainer sets
the same attribute for models that are split over devices. tests/train/test_launched.py fails where it is gone.
"""

from __future__ import annotations

from typing import Any


def train_on_first_gpu(training: Any) -> int:
    """Let a process without a launcher train on the first GPU that it sees; returns how many it leaves to others."""
    left = int(training.n_gpu) - 1
    if left > 0:
        training._n_gpu = 1
    return max(0, left)
