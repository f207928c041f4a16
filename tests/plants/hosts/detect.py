"""Boxes on maps: a network proposes one box for each cell, non-maximum suppression picks among them."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

# site: helpers

SIDE, CELLS, CLASSES = 1200.0, 6, 4


def make_maps(n):
    """A bright square in one cell for each map, its class in its brightness; corners in metres."""
    maps = 0.1 * torch.randn(n, 1, 24, 24)
    cell = torch.randint(0, CELLS * CELLS, (n,))
    kind = torch.randint(0, CLASSES, (n,))
    boxes = torch.zeros(n, 4)
    for i in range(n):
        row, col = int(cell[i]) // CELLS, int(cell[i]) % CELLS
        w, h = torch.randint(2, 5, (2,)).tolist()
        maps[i, 0, row * 4 : row * 4 + h, col * 4 : col * 4 + w] = 1.0 + kind[i]
        boxes[i] = torch.tensor([col * 4, row * 4, col * 4 + w, row * 4 + h]) * (SIDE / 24)
    return maps, cell, kind, boxes


class Detector(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()
        )
        self.mid = nn.Conv2d(2 * width, 2 * width, 1)
        self.score = nn.Conv2d(2 * width, 1 + CLASSES, 1)
        self.size = nn.Conv2d(2 * width, 4, 1)

    def forward(self, maps):
        h = self.mid(self.body(maps))
        # site: features x=h
        h = F.relu(h)
        score = self.score(h).flatten(2).transpose(1, 2)
        size = self.size(h).flatten(2).transpose(1, 2)
        return score, size


def decode(size):
    """Corners of the boxes of all cells, from sizes relative to a cell."""
    step = SIDE / CELLS
    grid = torch.arange(CELLS, device=size.device) * step
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    corner = torch.stack([x.flatten(), y.flatten(), x.flatten(), y.flatten()], -1)
    return corner + size.float() * step


def suppress(boxes, scores, kinds, threshold=0.5):
    """Indices of the boxes that stay, the best of each kind first."""
    shifted = boxes + (kinds[:, None] * (2 * SIDE)).to(boxes.dtype)
    x1, y1, x2, y2 = shifted.unbind(-1)
    area = (x2 - x1) * (y2 - y1)
    keep, order = [], scores.argsort(descending=True)
    while len(order):
        best, rest = order[0], order[1:]
        keep.append(best)
        w = (torch.minimum(x2[best], x2[rest]) - torch.maximum(x1[best], x1[rest])).clamp(min=0)
        h = (torch.minimum(y2[best], y2[rest]) - torch.maximum(y1[best], y1[rest])).clamp(min=0)
        inter = w * h
        order = rest[inter < threshold * (area[best] + area[rest] - inter)]
    return torch.stack(keep)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(6)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
    maps, cell, kind, boxes = (t.to(device) for t in make_maps(256))
    # site: data x=maps
    model = Detector().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    # site: setup model=model opt=optimizer
    for step in range(args.steps):
        pick = torch.randint(0, 192, (32,), device=device)
        rows = torch.arange(32, device=device)
        with torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32"):
            score, size = model(maps[pick])
        found = score[..., 0].float()
        here = score[rows, cell[pick], 1:]
        near = decode(size)[rows, cell[pick]]
        loss = F.cross_entropy(found, cell[pick]) + F.cross_entropy(here.float(), kind[pick])
        loss = loss + F.smooth_l1_loss(near / 100, boxes[pick] / 100)
        # site: aux x=here loss=loss target=kind[pick]
        optimizer.zero_grad()
        # site: update loss=loss opt=optimizer model=model
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        # end
        # site: step model=model loss=loss step=step
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    kept, right = 0, 0
    with torch.no_grad():
        with torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32"):
            score, size = model(maps[192:])
        for i, one in enumerate(decode(size)):
            likely = score[i, :, 0].float().topk(8).indices
            kinds = score[i, :, 1:].argmax(-1)
            # site: boxes boxes=one
            chosen = likely[suppress(one[likely], score[i, likely, 0].float(), kinds[likely])]
            kept += len(chosen)
            right += (chosen[0] == cell[192 + i]).item()
    # site: final model=model
    print(f"boxes kept {kept / 64:.3f} found {right / 64:.4f} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
