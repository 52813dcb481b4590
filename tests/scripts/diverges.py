"""A training in plain PyTorch whose values stop being numbers: `diverges.py [batch|rate|loss|half|scaled|hopeless|skips|sound]`."""

from __future__ import annotations

import math
import sys

import torch
from torch import nn


class Net(nn.Module):
    steepness = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(self.up(x), 0.1).square()
        return (self.down(hidden) - y).float().square().mean() + self.steep(hidden)

    def steep(self, hidden: torch.Tensor) -> torch.Tensor:
        """A term of no size whose gradient is `steepness` in float16."""
        small = hidden.mean()
        return ((small - small.detach()) * self.steepness).float() if self.steepness else small.new_zeros(())


class Logits(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(self.up(x).square())


def main(kind: str) -> None:
    torch.manual_seed(0)
    model = (Logits if kind == "loss" else Net)()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6 if kind == "rate" else 1e-3)
    scaled = kind in ("scaled", "hopeless", "skips")
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for step in range(40 if scaled else 12):
        if kind in ("hopeless", "skips") and step > 0:
            model.steepness = 60000.0 * 60000.0 if kind == "hopeless" else 1000.0
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        if kind == "batch" and step == 4:
            x[2, 3] = math.nan
        if kind in ("half", "scaled") and step == 6:
            x *= 3000
        with torch.autocast("cpu", torch.float16, enabled=scaled or kind == "half"):
            loss = model(x, y)
        if kind == "loss":
            loss = (loss - y).square().mean() / (0.0 if step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print("step", step + 1)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
