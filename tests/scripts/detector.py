"""One-stage detector of bright boxes, trained with focal loss and IoU loss under AMP."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

IMAGE, GRID, PIXELS = 48, 6, 1024.0  # network input, cells per side, side of the original photo in pixels


class BoxImages(torch.utils.data.Dataset):
    """16-bit photos with one or two bright boxes; boxes are (x1, y1, x2, y2) in pixels of the original photo."""

    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            image = torch.randint(2000, 9000, (1, IMAGE, IMAGE), generator=g)
            boxes = torch.zeros(0, 4)
            for _ in range(int(torch.randint(1, 3, (1,), generator=g))):
                w, h = torch.randint(10, 24, (2,), generator=g).tolist()
                x, y = (
                    int(torch.randint(0, IMAGE - w, (1,), generator=g)),
                    int(torch.randint(0, IMAGE - h, (1,), generator=g)),
                )
                image[:, y : y + h, x : x + w] = 65535
                boxes = torch.cat([boxes, torch.tensor([[x, y, x + w, y + h]]) * (PIXELS / IMAGE)])
            self.items.append((image, boxes))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    images = torch.stack([image for image, _ in batch]).float() / 65535
    return images, [boxes for _, boxes in batch]


def block(cin, cout, stride):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class Detector(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.backbone = nn.Sequential(block(1, width, 2), block(width, width * 2, 2), block(width * 2, width * 2, 2))
        self.cls = nn.Conv2d(width * 2, 1, 1)
        self.box = nn.Conv2d(width * 2, 4, 1)
        nn.init.constant_(self.cls.bias, -2.0)  # prior of the focal loss

    def forward(self, images):
        feat = self.backbone(images)
        obj = self.cls(feat).flatten(1)
        dist = F.relu(self.box(feat) + 1.0).flatten(2).transpose(1, 2)
        return obj, dist * (PIXELS / GRID)


def cell_centers(device):
    c = (torch.arange(GRID, device=device) + 0.5) * (PIXELS / GRID)
    yy, xx = torch.meshgrid(c, c, indexing="ij")
    return torch.stack([xx.flatten(), yy.flatten()], -1)


@torch.no_grad()
def match(centers, boxes_per_image):
    """For each cell the box whose middle it is in the inner half of, or -1."""
    labels, targets = [], []
    for boxes in boxes_per_image:
        boxes = boxes.to(centers.device)
        mid, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
        off = (centers[:, None] - mid[None]).abs() / size[None]
        inside = (off < 0.4).all(-1)
        near = off.sum(-1).masked_fill(~inside, float("inf"))
        best = near.argmin(1)
        labels.append(inside.any(1))
        targets.append(boxes[best])
    return torch.stack(labels), torch.stack(targets)


def focal_loss(logits, target, alpha=0.5, gamma=2.0):
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = torch.sigmoid(logits)
    p_t = p * target + (1 - p) * (1 - target)
    a_t = alpha * target + (1 - alpha) * (1 - target)
    return a_t * (1 - p_t) ** gamma * ce


def iou_loss(dist, centers, target):
    dist = dist.float()
    x1, y1 = centers[:, 0] - dist[:, 0], centers[:, 1] - dist[:, 1]
    x2, y2 = centers[:, 0] + dist[:, 2], centers[:, 1] + dist[:, 3]
    inter_w = (torch.minimum(x2, target[:, 2]) - torch.maximum(x1, target[:, 0])).clamp(min=0)
    inter_h = (torch.minimum(y2, target[:, 3]) - torch.maximum(y1, target[:, 1])).clamp(min=0)
    inter = inter_w * inter_h
    area_p = (dist[:, 0] + dist[:, 2]) * (dist[:, 1] + dist[:, 3])
    area_t = (target[:, 2] - target[:, 0]) * (target[:, 3] - target[:, 1])
    iou = inter / (area_p + area_t - inter + 1e-6)
    return 1 - iou


def hard_negatives(obj, positive, ratio=3):
    """The negatives that look most like objects, three for each positive."""
    with torch.no_grad():
        scores = obj.masked_fill(positive, float("-inf")).flatten()
        k = min(int(positive.sum()) * ratio + 8, int((~positive).sum()))
        keep = torch.zeros_like(positive).flatten()
        keep[scores.topk(k).indices] = True
    return keep.view_as(positive)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = dict(device_type=device, dtype=torch.bfloat16 if args.precision == "bf16" else torch.float16)

    loader = torch.utils.data.DataLoader(BoxImages(160), args.batch_size, shuffle=True, collate_fn=collate)
    model = Detector().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    centers = cell_centers(device)

    for epoch in range(args.epochs):
        for i, (images, boxes) in enumerate(loader):
            images = images.to(device)
            positive, target = match(centers, boxes)
            with torch.autocast(**amp, enabled=args.precision != "fp32"):
                obj, dist = model(images)
                keep = hard_negatives(obj, positive) | positive
                loss_cls = focal_loss(obj, positive.float())[keep].sum() / positive.sum().clamp(min=1)
                where = centers.expand(len(images), -1, -1)
                loss_box = iou_loss(dist[positive], where[positive], target[positive]).mean()
                loss = loss_cls + loss_box
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            if i % 3 == 0:
                print(
                    f"epoch {epoch} it {i} loss {loss.item():.4f} cls {loss_cls.item():.4f} box {loss_box.item():.4f}"
                )


if __name__ == "__main__":
    main()
