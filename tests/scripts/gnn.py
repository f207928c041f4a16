"""Node classification on a synthetic citation graph, message passing by index_add."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def make_graph(nodes=600, classes=5, features=32, hub_edges=2600, seed=0):
    """Papers cite papers of their own field. Node 0 is a survey that everyone cites, the last nodes are not cited."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (nodes,), generator=g)
    centers = torch.randn(classes, features, generator=g)
    x = centers[y] * 0.4 + torch.randn(nodes, features, generator=g)
    src = torch.randint(0, nodes, (6000,), generator=g)
    dst = torch.randint(0, nodes - 20, (6000,), generator=g)
    keep = (y[src] == y[dst]) | (torch.rand(6000, generator=g) < 0.1)
    hub = torch.randint(1, nodes, (hub_edges,), generator=g)
    src, dst = torch.cat([src[keep], hub]), torch.cat([dst[keep], torch.zeros_like(hub)])
    return x, y, src, dst


class SageLayer(nn.Module):
    """Mean of the neighbours, beside the node itself."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.lin_self = nn.Linear(d_in, d_out)
        self.lin_neigh = nn.Linear(d_in, d_out, bias=False)

    def forward(self, h, src, dst):
        msg = self.lin_neigh(h)[src].float()
        agg = torch.zeros(h.size(0), msg.size(1), dtype=msg.dtype, device=h.device)
        agg.index_add_(0, dst, msg)
        deg = torch.zeros(h.size(0), dtype=msg.dtype, device=h.device)
        deg.index_add_(0, dst, torch.ones_like(dst, dtype=msg.dtype))
        agg = agg / deg.clamp(min=1).unsqueeze(1)
        return self.lin_self(h) + agg.to(h.dtype)


class AttentionLayer(nn.Module):
    """Neighbours weighted by a softmax over the edges of each node, one head."""

    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.scale = d**-0.5

    def forward(self, h, src, dst):
        score = ((self.q(h)[dst] * self.k(h)[src]).sum(-1) * self.scale).float()
        top = torch.full((h.size(0),), -1e4, device=h.device).scatter_reduce(0, dst, score.detach(), "amax")
        weight = torch.exp(score - top[dst])
        total = torch.zeros(h.size(0), device=h.device).index_add(0, dst, weight)
        value = self.v(h)[src].float() * (weight / total[dst]).unsqueeze(1)
        out = torch.zeros(h.size(0), value.size(1), device=h.device).index_add(0, dst, value)
        return h + out.to(h.dtype)


class GNN(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.sage1 = SageLayer(features, hidden)
        self.att = AttentionLayer(hidden)
        self.sage2 = SageLayer(hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x, src, dst):
        h = F.relu(self.norm1(self.sage1(x, src, dst)))
        h = self.att(h, src, dst)
        h = F.relu(self.norm2(self.sage2(h, src, dst)))
        return self.out(h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(12)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp_dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16

    x, y, src, dst = (t.to(device) for t in make_graph())
    train_mask = torch.rand(len(y), device=device) < 0.5
    model = GNN(x.size(1), args.hidden, int(y.max()) + 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, weight_decay=5e-4)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")

    for epoch in range(1, args.epochs + 1):
        model.train()
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=amp_dtype, enabled=args.precision != "fp32"):
            out = model(x, src, dst)
            loss = F.cross_entropy(out[train_mask], y[train_mask])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if epoch % 5 == 0 or epoch == 1:
            acc = (out.argmax(1) == y)[~train_mask].float().mean().item()
            print(f"Epoch: {epoch:03d}, Loss: {loss.item():.4f}, Test: {acc:.4f}")


if __name__ == "__main__":
    main()
