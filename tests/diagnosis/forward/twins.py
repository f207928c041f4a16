"""Small models that are never trained: each has a planted failure in 16 bits, and a twin without it."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, SYMBOLS, LENGTH = 32, 48, 24


class Block(nn.Module):
    """Attention and a gated layer over a residual stream; what is planted is given."""

    def __init__(self, *, hidden=float("-inf"), boost=1.0, eps=1e-5):
        super().__init__()
        self.norm, self.norm2 = RMSNorm(WIDTH, eps), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.hidden, self.boost = hidden, boost

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, self.hidden)
        x = x + self.out(scores.softmax(-1) @ v)
        h = self.norm2(x)
        gated = F.silu(self.gate(h) * self.boost) * (self.up(h) * self.boost)
        return x + self.down(gated) / self.boost**2


class RMSNorm(nn.Module):
    """As models write it, without FP32 inside."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Language(nn.Module):
    """Logits of tokens."""

    def __init__(self, blocks):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(SYMBOLS, WIDTH), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens():
    return torch.randint(0, SYMBOLS, (2, LENGTH))


def healthy(seed):
    return Language([Block(), Block()]), tokens()


def mask_of_1e9(seed):
    return Language([Block(), Block(hidden=-1e9)]), tokens()


def gate_overflows(seed):
    return Language([Block(), Block(boost=1000.0)]), tokens()


class Empty(nn.Module):
    """A norm of rows of which some are all but 0."""

    def __init__(self, eps):
        super().__init__()
        self.norm, self.head = RMSNorm(WIDTH, eps), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.norm(x))


def padded(seed=0):
    x = torch.randn(4, 6, WIDTH)
    x[:, 4:] = 0.0
    return x


def eps_of_1e8(seed):
    return Empty(1e-8), padded()


def eps_of_1e5(seed):
    return Empty(1e-5), padded()


class Energy(nn.Module):
    """Rows divided by their length."""

    def __init__(self, size):
        super().__init__()
        self.size, self.head = size, nn.Linear(256, 8)

    def forward(self, x):
        x = x * self.size
        x = x / x.pow(2).sum(-1, keepdim=True).sqrt()
        return self.head(x)


def square_overflows(seed):
    return Energy(40.0), torch.randn(4, 256)


def square_fits(seed):
    return Energy(1.0), torch.randn(4, 256)


class Positions(nn.Module):
    """Sines of positions that are counted in the format of the model, or in FP32."""

    def __init__(self, *, narrow):
        super().__init__()
        self.narrow, self.head = narrow, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        dtype = x.dtype if self.narrow else torch.float32
        place = torch.arange(x.shape[1], dtype=dtype)
        angle = place[:, None] * (0.9 ** torch.arange(WIDTH, dtype=torch.float32)).to(dtype)
        return self.head(x + angle.sin().to(x.dtype))


def half_positions(seed):
    return Positions(narrow=True), 0.1 * torch.randn(1, 5000, WIDTH)


def wide_positions(seed):
    return Positions(narrow=False), 0.1 * torch.randn(1, 5000, WIDTH)


class Nearest(nn.Module):
    """Looks up the row of a table that is nearest; the rows lie far from 0 and near to each other."""

    def __init__(self, *, far):
        super().__init__()
        torch.manual_seed(0)
        self.far = far
        self.table = nn.Parameter(torch.randn(64, 8))
        self.values = nn.Parameter(torch.randn(64, 8))

    def forward(self, x):
        distance = (x[:, None] - self.table).square().sum(-1) + self.far
        nearest = distance.argmin(-1)
        return self.values[nearest]


def choice_flips(seed):
    return Nearest(far=3000.0), torch.randn(200, 8)


def choice_stays(seed):
    return Nearest(far=0.0), torch.randn(200, 8)


class Outlier(Language):
    """One channel of the stream is as large as those that large models are known for, until the last block."""

    def __init__(self, size):
        super().__init__([Block(), Block(), Block()])
        with torch.no_grad():
            self.blocks[0].down.bias[3] = size
            self.blocks[2].down.bias[3] = -size


def outlier_too_large(seed):
    return Outlier(60000.0).bfloat16(), tokens()


def outlier_of_100(seed):
    return Outlier(100.0).bfloat16(), tokens()


def fails_everywhere(seed):
    return Energy(1.0), torch.zeros(4, 256)


def huge_weight(seed):
    model = Language([Block()]).bfloat16()
    with torch.no_grad():
        model.head.weight[0, 0] = 1e5
    return model, tokens()


class Swallowing(nn.Module):
    """Numbers that are not finite are brought back to some, as models do that know FP16."""

    def __init__(self, top):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.up.weight[0, 0] = top

    def forward(self, x):
        x = self.up(x).clamp(-60000.0, 60000.0)
        return self.down(x / 60000.0)


def swallowed_weight(seed):
    return Swallowing(7e4).bfloat16(), torch.rand(4, WIDTH)


def small_weights(seed):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH, eps=0.0))
    with torch.no_grad():
        model[0].weight.mul_(1e-6)
    return model.bfloat16(), torch.randn(4, WIDTH)


class Fourier(nn.Module):
    """Sines of coordinates at growing frequencies."""

    def __init__(self, num):
        super().__init__()
        self.out, self.powers = nn.Linear(num, 8), [2.0**i for i in range(num)]

    def forward(self, x):
        phase = x[..., None] * torch.tensor(self.powers, dtype=x.dtype)
        return self.out(phase.sin()).mean(1)


def coarse_inputs(seed):
    return Fourier(15), torch.rand(16, 3)


def fine_inputs(seed):
    return Fourier(4), torch.rand(16, 3)


def of_a_function(seed):
    return lambda x: (x.square().sum(-1) - x.sum(-1)).sqrt(), 100.0 * torch.rand(4, 64)


def names_its_precision(seed):
    return Language([Block()]), tokens(), "bf16-true"


def gives_no_tensor(seed):
    return (lambda x: "text"), torch.randn(2)


def gives_no_pair(seed):
    return Language([Block()])
