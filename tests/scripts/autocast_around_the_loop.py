"""A raw loop that autocast is around as a whole: every step computes with the first weights."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(64, 8)
with torch.autocast("cpu", torch.bfloat16):
    for _ in range(3):
        loss = (model(rows).float() - rows[:, :1]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
