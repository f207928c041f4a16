"""GAN discriminator loss written as -log(1 - sigmoid(x)).

Symptom:   FP16 autocast: as soon as the discriminator wins, the loss is inf and the scale collapses; FP32 keeps
           training.
Truth:     sigmoid(x) rounds to exactly 1.0 in half for x > 8.3, so log(1 - 1) = -inf. In FP32 that needs x > 17.
Right fix: binary_cross_entropy_with_logits / logsigmoid(-x).
Wrong fix: label smoothing or weaker discriminator; + 1e-8 inside the log (also 0 in half); clamp(max=1-1e-6) (also
           1.0).
Source:    pytorch/pytorch#40497 (comment on sigmoid + log), zylo117/Yet-Another-EfficientDet-Pytorch#502
CUDA:      same (sigmoid stays half under autocast; promoting log afterwards is too late).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 3.0, True, 40


class Critic(nn.Module):
    """Scores real and generated samples in one pass; the generator side is frozen here."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        with torch.no_grad():  # the generator has just moved: the critic is confidently wrong
            self.net[2].bias.fill_(12.0)  # calls everything real

    def forward(self, real, fake):
        return self.net(real).squeeze(1), self.net(fake).squeeze(1)


def _loss(alt):
    def loss_fn(out):
        r, f = out
        if alt:
            return F.softplus(-r.float()).mean() + F.softplus(f.float()).mean()
        return -torch.log(torch.sigmoid(r)).mean() - torch.log(1 - torch.sigmoid(f)).mean()

    return loss_fn


def _make(alt):
    g = torch.Generator().manual_seed(31)
    batches = []
    for _ in range(3):
        real = torch.randn(24, 2, generator=g) * 0.4 + torch.tensor([1.5, 0.0])
        fake = torch.randn(24, 2, generator=g) * 0.4 - torch.tensor([1.5, 0.0])
        batches.append(((real, fake), ()))
    return Critic(), batches, _loss(alt), "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 8e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="rounded-onto-singularity",
    where="loss_fn|031_adversary_log_one_minus.py:38",
    code="return -torch.log(torch.sigmoid(r)).mean() - torch.log(1 - torch.sigmoid(f)).mean()",
    op="aten.log",
    fix="use softplus / binary_cross_entropy_with_logits on the logits",
)
