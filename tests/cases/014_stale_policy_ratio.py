"""Policy-gradient update with importance ratios and a validity mask.

Symptom:   RL fine-tuning in FP16: loss NaN although the offending tokens are masked out. FP32 is fine.
Truth:     masked (padding / stale) tokens have log-ratio ~12; exp() overflows to inf in half, and inf * 0 (the mask) is
           NaN. Multiplying by a mask does not remove a non-finite value.
Right fix: compute the ratio in FP32, and select with torch.where instead of multiplying.
Wrong fix: PPO clipping (min(inf*0, ...) is NaN); grad-norm clipping; mask the loss once more.
Source:    PrimeIntellect-ai/prime-rl#2972, OpenRLHF/OpenRLHF#1314
CUDA:      same; inside of the region CUDA autocast would promote exp.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = -0.02, True, 40


class Policy(nn.Module):
    def __init__(self, obs=4, act=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, 12), nn.Tanh(), nn.Linear(12, act))

    def forward(self, obs):
        return self.net(obs)


def _loss(alt):
    def loss_fn(logits, act, old_logp, adv, mask):
        logp = logits.float().log_softmax(-1).to(logits.dtype).gather(-1, act[..., None])[..., 0]
        if alt:
            logp = logp.float()
        with torch.autocast(logp.device.type, enabled=False):
            ratio = torch.exp(logp - old_logp.to(logp.dtype))
        if alt:
            ratio = torch.where(mask > 0, ratio, torch.ones_like(ratio))
        surr = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        return -(surr * mask).sum() / mask.sum()

    return loss_fn


def _make(alt):
    g = torch.Generator().manual_seed(14)
    torch.manual_seed(14)
    model = Policy()
    batches = []
    for _ in range(2):
        obs = torch.randn(8, 6, 4, generator=g)
        act = torch.randint(0, 3, (8, 6), generator=g)
        with torch.no_grad():
            old = model(obs).log_softmax(-1).gather(-1, act[..., None])[..., 0]
        good = (act == obs[..., :3].argmax(-1)).float()
        mask = torch.ones(8, 6)
        mask[:, 4:] = 0
        old[:, 4:] = -13.0  # padding positions keep whatever the sampler left there
        batches.append(((obs,), (act, old, 2 * good - 0.7, mask)))
    return model, batches, _loss(alt), "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 3e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="exp-overflow",
    where="loss_fn|014_stale_policy_ratio.py:33",
    code="ratio = torch.exp(logp - old_logp.to(logp.dtype))",
    op="aten.exp",
    fix="take the ratio in FP32 and drop masked tokens with torch.where, not by multiplying with 0",
)
