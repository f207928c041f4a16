"""Embeddings of points by a triplet loss; recall of the nearest neighbour at the end."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

# site: helpers


class Embedder(nn.Module):
    def __init__(self, d_in=24, width=64, dim=16):
        super().__init__()
        self.inp = nn.Linear(d_in, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, dim)

    def forward(self, x):
        h = F.relu(self.inp(x))
        h = self.hidden(h)
        # site: features x=h
        return self.out(F.relu(h))


def make_points(n, groups=10, dim=24):
    centers = torch.randn(groups, dim, generator=torch.Generator().manual_seed(3))
    group = torch.randint(0, groups, (n,))
    return 0.6 * centers[group] + 0.6 * torch.randn(n, dim), group


def triplet_loss(z, group, margin=1.0):
    z = z.float()
    d = torch.cdist(z, z)
    same = group[:, None] == group[None]
    far = (d - 10.0 * ~same).amax(1)
    near = (d + 10.0 * same).amin(1)
    return F.softplus(far - near + margin).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=44)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
    amp = torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32")

    points, group = make_points(600)
    queries, query_group = make_points(300)
    # site: data x=points other=queries
    points, group = points.to(device), group.to(device)
    queries, query_group = queries.to(device), query_group.to(device)
    net = Embedder().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    # site: setup model=net opt=opt

    for it in range(args.iters):
        idx = torch.randint(0, len(points), (64,), device=device)
        with amp:
            z = net(points[idx])
            # site: inner x=z target=group[idx]
        loss = triplet_loss(z, group[idx])
        # site: aux x=z loss=loss
        opt.zero_grad()
        # site: update loss=loss opt=opt model=net
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        # end
        # site: step model=net loss=loss step=it
        if it % 15 == 0:
            print(f"iter {it}: triplet {loss.item():.4f}")

    net.eval()
    hits = 0
    with torch.no_grad(), amp:
        gallery = net(points)
        for chunk, truth in zip(queries.split(100), query_group.split(100), strict=True):
            z = net(chunk)
            dist = torch.cdist(z.float(), gallery.float())
            hits += (group[dist.argmin(1)] == truth).sum().item()
    # site: final model=net
    print(f"recall@1 {hits / len(queries):.4f} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
