"""Face-style angular margin head: acos(cos.clamp(-1 + 1e-6, 1 - 1e-6)).

Symptom:   finite loss, NaN gradients in FP16 once embeddings line up with their class centre; FP32 fine.
Truth:     1 - 1e-6 is 1.0 in half, so the clamp does nothing; cos rounds to 1.0 and the derivative of acos at 1 is inf.
Right fix: do the angle in FP32 (cos.float()), or a margin of 1e-3 in half.
Wrong fix: smaller s/margin; 1e-7 instead of 1e-6; gradient clipping (NaN stays NaN).
Source:    zylo117/Yet-Another-EfficientDet-Pytorch#502 (clamp near an integer rounds in fp16); face variant own repro
CUDA:      same for code that runs in half; CUDA autocast promotes acos, but cos has been rounded to 1.0 already.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.6, True, 40


class ArcHead(nn.Module):
    def __init__(self, d, classes, alt, s=8.0, m=0.2):
        super().__init__()
        self.alt, self.s, self.m = alt, s, m
        self.centre = nn.Parameter(torch.eye(classes, d))

    def forward(self, f, y):
        f, w = F.normalize(f.float(), dim=-1), F.normalize(self.centre, dim=-1)
        cos = F.linear(f, w)  # half under autocast
        if self.alt:
            cos = F.linear(f.double(), w.double()).float()
        theta = torch.acos(cos.clamp(-1 + 1e-6, 1 - 1e-6))
        hot = F.one_hot(y, cos.shape[1]).to(theta.dtype)
        return self.s * torch.cos(theta + self.m * hot)


class FaceNet(nn.Module):
    def __init__(self, alt):
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.arc = ArcHead(6, 3, alt)
        with torch.no_grad():
            self.embed.weight.copy_(torch.eye(6))

    def forward(self, x, y):
        return self.arc(self.embed(x), y)


def _make(alt):
    g = torch.Generator().manual_seed(33)
    batches = []
    for _ in range(2):
        y = torch.randint(0, 3, (12,), generator=g)
        x = F.one_hot(y, 6).float() + 0.6 * torch.randn(12, 6, generator=g)
        x[0] = F.one_hot(y[0], 6).float() + 0.004 * torch.randn(6, generator=g)  # an enrolment photo
        batches.append(((x, y), (y,)))
    return FaceNet(alt), batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 2e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="rounded-onto-singularity",
    where="arc|033_angular_margin_clamp.py:29",
    code="theta = torch.acos(cos.clamp(-1 + 1e-6, 1 - 1e-6))",
    op="AcosBackward0",
    fix="compute cos and acos in FP32",
)
