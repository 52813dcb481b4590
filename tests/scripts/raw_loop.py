"""A raw loop, as in a first tutorial: the loss is computed outside of the model.

`python raw_loop.py MODE [STEPS]`: healthy; broken (a float32 norm feeds a bfloat16 head); caught (the same, and the
script leaves by itself with status 7); late (the norm becomes float32 after the second step); exit (healthy, status 3).
"""

import sys

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import nn


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embed = nn.Embedding(64, 32, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(32, dtype=norm)
        self.head = nn.Linear(32, 64, dtype=torch.bfloat16)

    def forward(self, ids):
        hidden = self.embed(ids)
        hidden = self.norm(hidden.to(self.norm.weight.dtype))
        return self.head(hidden)


def main(mode, steps=3):
    torch.manual_seed(0)
    model = Net(torch.float32 if mode in ("broken", "caught") else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids = torch.randint(0, 64, (4, 8))
        try:
            logits = model(ids)
        except RuntimeError:
            if mode != "caught":
                raise
            print("gave up")
            sys.exit(7)
        loss = F.cross_entropy(logits.float().view(-1, 64), ids.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.6f}")
        if mode == "late" and step == 1:
            model.norm.float()
    if mode == "exit":
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
