"""Memory lookup by cosine among near-duplicate keys, scores under BF16 autocast.

Symptom:   accuracy stays near chance in BF16 and is 100 % in FP32; the loss falls slowly and is finite throughout.
Truth:     cosines of near-duplicates are 0.997 to 1, where BF16's spacing is 0.0039: most rows tie, and argmax takes
           the first of them. The value that is looked up is another entry's, and is trained for it.
Right fix: compute the scores in FP32 (autocast off around the product).
Wrong fix: scores.float().argmax(-1): the ties are there already; a lower learning rate.
Source:    vllm-project/vllm#14027 (experts chosen by BF16 scores); lookup form own repro
CUDA:      same: matmul is on autocast's 16-bit list.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.25, True, 60


class Memory(nn.Module):
    def __init__(self, alt, keys):
        super().__init__()
        self.alt = alt
        self.register_buffer("keys", keys)
        self.values = nn.Embedding(len(keys), 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        if self.alt:
            with torch.autocast(x.device.type, enabled=False):
                score = x.float() @ self.keys.t()
        else:
            score = x @ self.keys.t()
        best = score.argmax(-1)
        return self.head(self.values(best))


def _make(alt):
    g = torch.Generator().manual_seed(52)
    keys = F.normalize(torch.randn(1, 16, generator=g) + 0.04 * torch.randn(32, 16, generator=g), dim=-1)
    batches = []
    for _ in range(4):
        entry = torch.randint(0, 32, (64,), generator=g)
        x = F.normalize(keys[entry] + 0.0005 * torch.randn(64, 16, generator=g), dim=-1)
        batches.append(((x,), (entry % 4,)))
    return Memory(alt, keys), batches, F.cross_entropy, "bf16-mixed", lambda m: torch.optim.Adam(m.parameters(), 0.05)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="choice-flipped",
    where="052_nearest_of_near_duplicates.py:32",
    code="score = x @ self.keys.t()",
    op="aten.mm",
    fix="the scores in FP32, with autocast off around the product",
)
