"""Users and items: a factorisation with an extra network, ranked evaluation."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

# site: helpers

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
args = parser.parse_args()
torch.manual_seed(11)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
USERS, ITEMS, KINDS = 60, 5000, 4


class Recommender(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, dim))
        self.head = nn.Linear(2 * dim, 2)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)

    def forward(self, user, item):
        # site: index i=item n=ITEMS
        u, v = self.user(user), self.item(item)
        h = self.mlp(torch.cat([u, v], -1))
        # site: features x=h
        return self.head(torch.cat([u * v, h], -1))


def interactions(n):
    """Users like the items of their own kind; items of one kind share their last digits."""
    user, item = torch.randint(0, USERS, (n,)), torch.randint(0, ITEMS, (n,))
    likes = (user % KINDS == item % KINDS) ^ (torch.rand(n) < 0.02)
    same = torch.rand(n) < 0.4
    item = torch.where(same, item // KINDS * KINDS + user % KINDS, item).clamp(max=ITEMS - 1)
    likes = torch.where(same, torch.ones_like(likes), likes)
    return user, item, likes.long()


model = Recommender().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
user, item, likes = (t.to(device) for t in interactions(24000))
# site: setup model=model opt=optimizer
step = 0
for epoch in range(args.epochs):
    for batch in torch.randperm(20000, device=device).split(2000):
        with torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32"):
            logits = model(user[batch], item[batch])
            loss = F.cross_entropy(logits, likes[batch])
            # site: inner x=logits loss=loss target=likes[batch]
        # site: aux x=logits loss=loss target=likes[batch]
        optimizer.zero_grad()
        # site: update loss=loss opt=optimizer model=model
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        # end
        # site: step model=model loss=loss step=step
        step += 1
    print(f"epoch {epoch}: {loss.item():.4f}")

hits = 0
with torch.no_grad():
    for batch in torch.arange(20000, 24000, device=device).split(500):
        with torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32"):
            logits = model(user[batch], item[batch])
        # site: eval x=logits target=likes[batch]
        hits += (logits.argmax(-1) == likes[batch]).sum().item()
# site: final model=model
print(f"held-out accuracy {hits / 4000:.4f}, last loss {loss.item():.4f}")
