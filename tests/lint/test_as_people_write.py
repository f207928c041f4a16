"""Hazards as people write them, each with a twin that is sound; and what looks like one and is none."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from floatline.lint.engine import lint_text
from floatline.lint.fixing import fix_text
from floatline.lint.paths import PROJECT, lint_paths
from floatline.lint.reading.under_autocast import WIDENED as UNDER_AUTOCAST
from floatline.lint.rules import RULES
from floatline.lint.settings import Settings
from floatline.numerics.cuda_autocast import _LISTS  # pyright: ignore[reportPrivateUsage]

HAZARDS = {
    "FL206 param": (
        """import torch
def train_one_epoch(model, optimizer, loader, lr_scheduler, scaler):
    for x, y in loader:
        with torch.cuda.amp.autocast():
            loss = model(x, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        lr_scheduler.step()
""",
        ("lr_scheduler.step()\n", "if scaler.get_scale() >= before:\n            lr_scheduler.step()\n"),
    ),
    "FL206 self": (
        """import torch
from base import Base
class T(Base):
    def train_one_epoch(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.cuda.amp.autocast(enabled=self.fp16):
                loss = self.step(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.lr_scheduler.step()
""",
        ("self.lr_scheduler.step()\n", "print(self.lr_scheduler)\n"),
    ),
    "FL208": (
        """import torch
class Trainer:
    def train(self):
        for x in self.loader:
            loss = self.model(x)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
    def save_ckpt(self, name):
        ckpt_state = {"epoch": 1, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        save_checkpoint(ckpt_state, True, self.name, name)
""",
        (
            '"optimizer": self.optimizer.state_dict()}',
            '"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}',
        ),
    ),
    "FL218": (
        """import torch
from torch.cuda.amp import GradScaler, autocast
def run(hps, model, opt, loader):
    scaler = GradScaler(enabled=hps.train.bf16_run)
    for x in loader:
        with autocast(enabled=hps.train.bf16_run, dtype=torch.bfloat16):
            loss = model(x)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
""",
        ("GradScaler(enabled=hps.train.bf16_run)", "GradScaler(enabled=hps.train.fp16_run)"),
    ),
    "FL207": (
        """import torch
from torch import amp
class Trainer:
    def _train_epoch(self, train_data, epoch_idx):
        scaler = torch.amp.GradScaler(enabled=self.enable_scaler)
        for batch in train_data:
            self.optimizer.zero_grad()
            loss = self.model(batch)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
""",
        ("scaler = torch.amp.GradScaler(enabled=self.enable_scaler)", "scaler = self.scaler"),
    ),
    "FL133": (
        """import torch
from torch import nn
class ArcFace(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps
    def forward(self, x, w):
        cos_theta = torch.nn.functional.linear(x, w)
        theta = torch.acos(torch.clamp(cos_theta, -1.0 + self.eps, 1.0 - self.eps))
        return theta
""",
        ("eps=1e-6", "eps=1e-3"),
    ),
    "FL125 diff": (
        """import torch
from torch import nn
class LocalState(nn.Module):
    def forward(self, x):
        B, C, T = x.shape
        indexes = torch.arange(T, device=x.device, dtype=x.dtype)
        delta = indexes[:, None] - indexes[None, :]
        return delta
""",
        ("dtype=x.dtype", "dtype=torch.float32"),
    ),
    "FL125 to": (
        """import torch
from torch import nn
class P(nn.Module):
    def forward(self, inp):
        pos_seq = torch.arange(inp.size(1), device=inp.device).to(inp.dtype)
        return self.pos(pos_seq)
""",
        (".to(inp.dtype)", ".float()"),
    ),
    "FL106": (
        """import torch
def pnp(exponent):
    exponent = torch.clamp(exponent, min=-50, max=50)
    y = 1.0 / (1.0 + torch.exp(exponent))
    return y
""",
        ("min=-50, max=50", "min=-10, max=10"),
    ),
    "FL107": (
        """import torch
def loss(scale, neg, off):
    return torch.log(1 + torch.sum(torch.exp(scale * (neg - off))))
""",
        ("scale * (neg - off)", "neg - neg.max()"),
    ),
    "FL105 finfo": (
        """import torch
def attend(scores, m):
    scores = scores.masked_fill(m, torch.finfo(torch.float32).min)
    return scores.softmax(-1)
""",
        ("torch.finfo(torch.float32)", "torch.finfo(scores.dtype)"),
    ),
    "FL105 mul": (
        """import torch
def attend(s, mask):
    s = s + mask * -1e9
    return s.softmax(-1)
""",
        ("-1e9", "-1e4"),
    ),
    "FL203": (
        """import torch
def train(model, opt, scaler, loader):
    for x in loader:
        with torch.cuda.amp.autocast():
            loss = model(x)
        if torch.isnan(loss):
            scaler.update()
            continue
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
""",
        ("            scaler.update()\n            continue", "            continue"),
    ),
    "FL128": (
        """import torch
from torch import nn
criterion = nn.CrossEntropyLoss()
def step(model, x, y):
    logits = model(x)
    logits = torch.clamp(logits, -5, 5)
    return criterion(logits, y)
""",
        ("logits = torch.clamp(logits, -5, 5)", "logits = logits.float()"),
    ),
    "FL211": (
        """import torch
def focal(p, target):
    with torch.autocast("cuda", enabled=False):
        return -(target * torch.sigmoid(p).log()).mean()
with torch.autocast("cuda"):
    loss = focal(model(x), target)
""",
        ("sigmoid(p)", "sigmoid(p.float())"),
    ),
    "FL108": (
        """import torch
def norm(x, y):
    assert y.shape == x.shape
    return x / (y + 1e-8)
""",
        ("1e-8", "1e-4"),
    ),
}


def codes_of(text, *, file="train.py", half=True):
    return {one.rule.code for one in lint_text(text, file, rules=list(RULES.values()), half=half)}


@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard_is_found_and_its_sound_twin_is_not(name):
    text, (before, after) = HAZARDS[name]
    code = name.split()[0]
    assert code in codes_of(text)
    assert code not in codes_of(text.replace(before, after))


def test_a_quotient_by_a_bare_parameter_is_told_on_demand_unless_it_is_said_to_be_a_number():
    text = "import torch\ndef ratio(x, y):\n    return x / (y + 1e-8)\n"
    assert "FL108" in codes_of(text)
    assert "FL108" not in codes_of(text, half=False)
    for before, after in (("x, y", "x, y: float"), ("x, y", "x, y=2.0"), ("torch", "math")):
        assert "FL108" not in codes_of(text.replace(before, after))


def test_bounds_that_few_logits_reach_are_told_on_demand():
    text = "import torch\ny = torch.softmax(torch.clamp(model(x), -{0}, {0}), dim=-1)\n"
    assert "FL128" in codes_of(text.format(5), half=False)
    assert "FL128" not in codes_of(text.format(10), half=False)
    assert "FL128" in codes_of(text.format(10))


INNOCENT = {
    "a maximum out of a tuple": (
        "FL107",
        "def lse(t):\n    m, _ = t.max(-1)\n    s = t - m.unsqueeze(-1)\n    return m + torch.log(s.exp().sum(-1))\n",
        ("s = t - m.unsqueeze(-1)", "s = t"),
    ),
    "a maximum that is subtracted in place": (
        "FL107",
        "def lse(x):\n    x.sub_(x.max(-1)[0].unsqueeze(-1))\n    return torch.log(torch.exp(x).sum(-1))\n",
        ("x.sub_(x.max(-1)[0].unsqueeze(-1))", "pass"),
    ),
    "a maximum on both ways": (
        "FL107",
        "def lse(x, keep):\n    top = x.amax(-1, keepdim=True)\n    if keep:\n        s = x - top\n    else:\n"
        "        s = x - top.detach()\n    return torch.log(torch.exp(s).sum(-1))\n",
        ("s = x - top.detach()", "s = x"),
    ),
    "a cast behind a test of the dtype": (
        "FL108",
        "def sdr(t):\n    if t.dtype in (torch.float16, torch.bfloat16):\n        t = t.float()\n"
        "    return t / (torch.std(t, dim=-1, keepdim=True) + 1e-8)\n",
        ("t = t.float()", "pass"),
    ),
    "a cast by a helper": (
        "FL135",
        "from torch import nn\n\n\ndef compute_dtype(dtype):\n"
        "    return torch.float32 if dtype == torch.half else dtype\n\n\n"
        "class Norm(nn.Module):\n    def forward(self, x):\n        h = x.to(compute_dtype(x.dtype))\n"
        "        return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)\n",
        ("x.to(compute_dtype(x.dtype))", "x.to(x.dtype)"),
    ),
    "a region without autocast": (
        "FL108",
        "def unit(x):\n    with torch.autocast('cuda', enabled=False):\n"
        "        return x / (torch.std(x, dim=-1, keepdim=True) + 1e-8)\n",
        ("enabled=False", "enabled=True"),
    ),
    "the real part of complex numbers": (
        "FL108",
        "def scale(w, x):\n    power = torch.einsum('ij,ij->i', w, x).real\n    return x / (power + 1e-8)\n",
        (".real", ".abs()"),
    ),
    "a metric": (
        "FL104",
        "class Entropy(Metric):\n    def update(self, p):\n        q = torch.relu(p)\n"
        "        self.total += -(q * torch.log(q + 1e-8)).sum()\n",
        ("class Entropy(Metric)", "class Entropy(Loss)"),
    ),
    "a cost that pairs are matched by": (
        "FL102",
        "class FocalCost:\n    def __call__(self, logits):\n        return -(logits.sigmoid() + 1e-12).log()\n",
        ("class FocalCost", "class FocalTerm"),
    ),
    "a function for CPUs": (
        "FL102",
        "def focal_loss_cpu(logits):\n    return -torch.log(1 - torch.sigmoid(logits)).sum()\n",
        ("focal_loss_cpu", "focal_loss"),
    ),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_what_only_looks_like_a_hazard_is_left_alone(name):
    code, text, (before, after) = INNOCENT[name]
    text = "import torch\n" + text
    assert code not in codes_of(text)
    assert code in codes_of(text.replace(before, after))


WIDENED = {
    "a sum": "x / (x.sum(dim=-1, keepdim=True) + 1e-8)",
    "a norm": "x / (x.norm(dim=-1, keepdim=True) + 1e-8)",
    "a softmax": "torch.log(torch.softmax(x, -1) + 1e-8)",
    "a reciprocal": "x / (1.0 / x + 1e-8)",
    "a power": "torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-8)",
    "a module of its own": "torch.log(self.soft(x) + 1e-8)",
    "a function of its own": "torch.log(shares(x) + 1e-8)",
}
NARROW = {
    "a sigmoid": "torch.log(torch.sigmoid(x).clamp(min=1e-8))",
    "a mean": "torch.sqrt(torch.mean(self.layer(x), dim=-1, keepdim=True) + 1e-8)",
    "a matrix product": "torch.sqrt(torch.matmul(x, self.w) + 1e-9)",
    "a matrix product as a sign": "(x @ self.w + 1e-9).sqrt()",
    "a clamp": "torch.log(torch.clamp(self.layer(x), 0, 1) + 1e-8)",
    "a product of itself": "torch.rsqrt((self.layer(x) * self.layer(x)).mean(-1, keepdim=True) + 1e-8)",
    "a matrix product of a softmax": "torch.sqrt(torch.matmul(torch.softmax(x, -1), self.w) + 1e-9)",
}
MODULE = """import torch
from torch import nn

fp16 = True


def shares(x):
    return torch.softmax(x, -1)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.soft, self.w = nn.Softmax(-1), nn.Parameter(torch.ones(4, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor):
        return {expression}
"""


@pytest.mark.parametrize("name", [*WIDENED, *NARROW])
def test_what_autocast_widens_holds_in_pure_half_only(name):
    text = MODULE.format(expression=(WIDENED | NARROW)[name])
    (one,) = {found.holds for found in lint_text(text, "part.py", rules=list(RULES.values()), half=True)}
    assert one == ("half" if name in WIDENED else "autocast")
    assert bool(codes_of(text, file="part.py", half=False)) is (name in NARROW)
    assert codes_of(text + "\n\nmodel = Part().half()\n", file="part.py", half=False)


@pytest.mark.parametrize(
    ("before", "made", "after"),
    [
        ("", "self.w[0] + self.layer(x)", "self.layer(x)"),
        ("with torch.autocast('cuda', dtype=torch.float32):", "self.layer(x)", ""),
        ("with torch.autocast('cuda', enabled=False):", "self.layer(x)", ""),
        ("", "torch.linalg.eigh(self.layer(x))", "self.layer(x), self.layer(x)"),
    ],
)
def test_what_parameters_regions_and_linear_algebra_keep_in_fp32_is_no_hazard_under_autocast(before, made, after):
    body = "first, second = " if "," in after or "eigh" in made else "first = "
    text = (
        "import torch\nfrom torch import nn\n\n\nclass Part(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.layer = nn.Linear(4, 4)\n"
        "        self.rows = nn.ParameterList([nn.Parameter(torch.ones(4))])\n        self.w = self.rows[:1]\n\n"
        f"    def forward(self, x):\n        {before or 'if True:'}\n            {body}{made}\n"
        "        first = torch.clamp(first, min=0.0)\n        return torch.sqrt(first + 1e-9)\n"
    )
    assert codes_of(text, half=False) == set()
    twin = text.replace(made, after) if after else text.replace(before, "with torch.autocast('cuda'):")
    assert codes_of(twin, half=False) == {"FL108"}


def test_a_mask_that_is_written_by_its_index_is_told_on_demand_only():
    text = "import torch\n\n\ndef mask(q, k, hidden):\n    scores = torch.matmul(q, k)\n    scores[hidden] = -1e9\n"
    assert codes_of(text, half=False) == set()
    assert codes_of(text, half=True) == {"FL105"}
    filled = text.replace("scores[hidden] = -1e9", "return scores.masked_fill(hidden, -1e9)")
    assert codes_of(filled, half=False) == {"FL105"}  # the twin: this raises


def test_behind_a_region_of_autocast_nothing_is_widened():
    text = (
        "import torch\n\n\ndef step(model, x):\n    with torch.autocast('cuda'):\n        out = model(x)\n"
        "    return torch.log(torch.softmax(out, -1) + 1e-8)\n"
    )
    inside = text.replace("    return", "        return")
    assert "FL104" in codes_of(text, half=False)
    assert "FL104" not in codes_of(inside, half=False)


def test_a_cpus_autocast_widens_less():
    text = "import torch\nwith torch.autocast('{device}'):\n    y = torch.log(torch.softmax(model(x), -1) + 1e-8)\n"
    assert "FL104" in codes_of(text.format(device="cpu"), half=False)
    assert "FL104" not in codes_of(text.format(device="cuda"), half=False)


def test_what_a_product_gives_is_16_bits_whatever_goes_into_it():
    text = """import torch
def policy(p, c):
    return c, c @ p
with torch.autocast('cuda', dtype=torch.float16):
    c = torch.randn(64, 8)
    pi, q = policy(p, c)
    loss = -torch.log(q + 1e-12).mean()
    loss.backward()
"""
    assert "FL104" in codes_of(text, half=True)
    assert "FL104" not in codes_of(text.replace("log(q +", "log(c +"), half=True)


def test_the_dtype_of_autocast_is_no_pure_half():
    text = (
        "import torch\nwith torch.autocast('cuda', dtype=torch.float16):\n    y = x / (model(x).norm(dim=-1) + 1e-8)\n"
    )
    assert "FL108" not in codes_of(text, half=False)
    assert "FL108" in codes_of(text + "model = Net.from_pretrained('a', dtype=torch.float16)\n", half=False)


def test_what_nothing_shows_to_be_16_bits_is_told_on_demand_only():
    text = "import torch\n\n\ndef log(t, eps=1e-20):\n    return torch.log(t.clamp(min=eps))\n"
    (one,) = lint_text(text, "helpers.py", rules=list(RULES.values()), half=True)
    assert (one.rule.code, one.holds) == ("FL104", "input")
    assert codes_of(text, half=False) == set()
    called = "fp16 = True\n" + text + "\n\ndef step(model, x):\n    return log(torch.sigmoid(model(x))).mean()\n"
    assert codes_of(called, half=False) == {"FL104"}  # the twin: what it is given is shown


def test_a_default_that_every_caller_changes_is_told_on_demand_only():
    text = "import torch\ndef unit(x, eps=1e-8):\n    return torch.sqrt(torch.mean(net(x), -1) + eps)\n{0}\n"
    assert "FL108" in codes_of(text.format("y = unit(x)"), half=False)
    assert "FL108" not in codes_of(text.format("y = unit(x, eps=1e-4)"), half=False)
    assert "FL108" in codes_of(text.format("y = unit(x, eps=1e-4)"))


def test_weights_are_fp32_until_a_product_reads_them():
    text = """import torch
from torch import nn
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(4))
    def forward(self, x):
        return torch.log(torch.sigmoid({0}) + 1e-8)
fp16 = True
"""
    assert not codes_of(text.format("self.gate"), half=False)
    assert "FL102" in codes_of(text.format("x @ self.gate"), half=False)


def test_what_has_no_kernel_for_16_bits_is_fp32():
    text = "import torch\nfp16 = True\ny = torch.sqrt(torch.linalg.{0}(model(x)) + 1e-8)\n"
    assert "FL108" not in codes_of(text.format("det"), half=False)
    assert "FL108" in codes_of(text.replace("torch.linalg.{0}", "torch.mean"), half=False)


def test_a_quotient_by_what_seldom_is_zero_is_told_on_demand_only_and_a_root_by_itself():
    text = "import torch\nwith torch.autocast('cuda'):\n    y = x / (torch.mean(model(x), -1) + 1e-8)\n"
    assert codes_of(text, half=False) == set()
    (one,) = lint_text(text, "train.py", rules=[RULES["FL108"]], half=True)
    assert one.holds == "seldom"
    assert "seldom" in one.when
    root = text.replace("x / (torch.mean(model(x), -1) + 1e-8)", "torch.sqrt(torch.mean(model(x), -1) + 1e-8)")
    assert codes_of(root, half=False) == {"FL108"}
    clamped = text.replace("x / (torch.mean(model(x), -1) + 1e-8)", "torch.mean(model(x), -1).clamp(min=1e-8).sqrt()")
    assert codes_of(clamped, half=False) == {"FL108"}
    assert codes_of(clamped.replace(".sqrt()", ".neg()"), half=False) == set()


def test_a_sigmoid_that_is_a_width_is_seldom_zero():
    text = (
        "import torch\nwith torch.autocast('cuda'):\n    {0} = torch.sigmoid(model(x) + 2.0)\n    y = torch.log({0})\n"
    )
    assert "FL102" in codes_of(text.format("p"), half=False)
    assert "FL102" not in codes_of(text.format("scale"), half=False)
    (one,) = lint_text(text.format("sigmas"), "train.py", rules=[RULES["FL102"]], half=True)
    assert one.holds == "seldom"


def test_what_is_computed_of_a_detached_copy_has_no_gradient():
    text = (
        "import torch\ndef pack(x):\n    small = x{0}.clone()\n    small = torch.nan_to_num(small)\n"
        "    small = small.clamp(-65504, 65504)\n    return small + 1\nloss = pack(x)\n"
    )
    assert "FL134" in codes_of(text.format(""), half=False)
    assert "FL134" not in codes_of(text.format(".detach()"))


def test_a_clamp_behind_a_test_of_the_dtype_is_for_pure_half():
    text = (
        "import torch\nfrom torch import nn\nclass Layer(nn.Module):\n    def forward(self, x):\n        if {0}:\n"
        "            x = torch.clamp(x, -65504, 65504)\n        return x\n"
    )
    assert "FL134" in codes_of(text.format("self.clamped"), half=False)
    noted = text.format("is_fp16").replace("        if", "        is_fp16 = x.dtype == torch.float16\n        if")
    assert "FL134" not in codes_of(noted, half=False)
    assert "FL134" in codes_of(noted.replace("x.dtype == torch.float16", "self.clamped"), half=False)
    asked = text.format("x.dtype == torch.float16")
    assert "FL134" not in codes_of(asked, half=False)
    assert "FL134" in codes_of(asked + "model = Layer().half()\n", half=False)


METHODS = """import torch
from torch import nn
class Near(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = self._{0}
        self.lin = nn.Linear(4, 4)
    def _squared(self, a, b):
        return -((a - b) ** 2).mean(-1)
    def _product(self, a, b):
        return -(a @ b).mean(-1)
    def forward(self, a, b, gone):
        d = {1}
        return d.masked_fill(gone, -1e9)
"""


def test_what_a_method_returns_is_known_also_by_another_name():
    assert "FL105" not in codes_of(METHODS.format("squared", "self.near(self.lin(a), b)"), half=False)
    assert "FL105" in codes_of(METHODS.format("product", "self.near(self.lin(a), b)"), half=False)
    assert "FL105" in codes_of(METHODS.format("product", "self._product(a, b)"), half=False)
    assert "FL105" not in codes_of(METHODS.format("product", "self._squared(self.lin(a), b)"), half=False)


def test_a_cast_behind_a_test_of_the_dtype_holds_for_what_a_layer_made():
    text = (
        "import torch\nfrom torch import nn\nclass Unit(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.lin = nn.Linear(4, 4)\n    def forward(self, x):\n"
        "        h = self.lin(x)\n        if h.dtype in (torch.half, torch.bfloat16):\n            h = {0}\n"
        "        return torch.sqrt(h.mean() + 1e-8)\n"
    )
    assert "FL108" in codes_of(text.format("h * 2"), half=False)
    assert "FL108" not in codes_of(text.format("h.float()"))


def test_what_einops_makes_has_the_dtype_of_what_it_is_given_and_sums_are_fp32():
    text = (
        "import torch\nfrom einops import einsum, rearrange, reduce\ndef cdist(model, y):\n    x = model(y)\n"
        "    xx = reduce({0}, 'b n d -> b n', '{1}')\n    xy = einsum(x, y, 'b i d, b j d -> b i j') * -2\n"
        "    return (rearrange(xx, 'b i -> b i 1') + xy).clamp(min=1e-8).sqrt()\n"
    )
    assert "FL108" in codes_of(text.format("x.abs()", "mean"), half=False)
    for square, how in (("x ** 2", "mean"), ("x.abs()", "sum")):
        assert "FL108" not in codes_of(text.format(square, how), half=False)


def test_what_is_made_of_data_has_no_gradient():
    text = (
        "import torch\nimport torch.nn.functional as F\ndef start(x, w, scale):\n    made = F.conv2d(x, w){0}\n"
        "    flat = made.transpose(0, 1).contiguous().view(8, -1)\n"
        "    mean, var = flat.mean(1).squeeze(1), flat.var(1).squeeze(1)\n    return scale / torch.sqrt(var + 1e-10)\n"
    )
    assert "FL108" in codes_of(text.format(""), half=False)
    assert "FL108" not in codes_of(text.format(".data"))


def test_a_mask_that_masks_something_else_may_be_boolean_and_is_not_rewritten():
    text = "import torch\ndef f(h, m):\n    a = h.masked_fill({0}, 0.0)\n    return a, m.masked_fill(h > 0, -1e9)\n"
    for given, left in (("m", True), ("h < 0", False)):
        after, _ = fix_text(text.format(given), "f.py", rules=[RULES["FL105"]], unsafe=True)
        assert ("m.masked_fill(h > 0, -1e9)" in after) is left


def test_two_scalers_of_one_name_are_both_looked_at():
    text = """import torch
class A:
    def _train_epoch(self, data, epoch):
        scaler = torch.amp.GradScaler("cuda")
        for batch in data:
            scaler.scale(self.model(batch)).backward()
            scaler.step(self.optimizer)
            scaler.update()
"""
    found = lint_text(text + text.replace("class A", "class B"), "train.py", rules=[RULES["FL207"]])
    assert [one.line for one in found] == [4, 12]


OWN_SCALER = """import torch
from scalers import {made}
class Trainer:
    def __init__(self, fp16):
        self.scaler = {made}() if fp16 else None
    def train(self, batches):
        for x, y in batches:
            self.scaler.scale(self.model(x, y)).backward()
            self.scaler.unscale_(self.optimizer)
            if self.overflows():
                self.optimizer.zero_grad()
                continue
            self.optimizer.step()
            self.scaler.update()
            self.optimizer.zero_grad()
"""


def test_a_scaler_of_another_class_has_an_order_of_its_own():
    assert codes_of(OWN_SCALER.format(made="DynamicLossScaler")) == set()
    assert "FL202" in codes_of(OWN_SCALER.format(made="GradScaler"))
    torchs = OWN_SCALER.replace("from scalers", "from torch.amp").format(made="GradScaler")
    assert "FL202" in codes_of(torchs)


UNSCALED = """import torch
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("name", ["tests/loop.py", "src/test_loop.py", "loop_test.py", "pkg/testing/conftest.py"])
def test_what_a_test_trains_is_told_on_demand_or_where_the_test_is_given(tmp_path, name):
    file = tmp_path / "tests" / name  # what lies above the folder that is linted says nothing
    file.parent.mkdir(parents=True)
    file.write_text(UNSCALED)
    (tmp_path / "tests" / "train.py").write_text(UNSCALED)
    folder = tmp_path / "tests"
    result = lint_paths([folder], jobs=1)
    assert [(one.rule.code, Path(one.file).name) for one in result.findings] == [("FL221", "train.py")]
    assert [one.file for one in result.only_in_half] == [str(file)]
    assert len(lint_paths([folder], settings=Settings(half=True, select=("FL221",)), jobs=1).findings) == 2
    assert len(lint_paths([folder, file], jobs=1).findings) == 2
    assert len(lint_paths([file], jobs=1).findings) == 1


def test_an_old_name_in_a_test_is_told(tmp_path):
    (tmp_path / "test_loop.py").write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n")
    assert [one.rule.code for one in lint_paths([tmp_path], jobs=1).findings] == ["FL214"]


def test_a_large_project_without_a_word_of_16_bits_is_left_alone(tmp_path):
    text = "import torch\n\n\ndef step(model, x):\n    return torch.log(torch.sigmoid(model(x))).mean()\n"
    for number in range(PROJECT):
        (tmp_path / f"part{number}.py").write_text(text + "\n\nstep(model, x)\n")
    result = lint_paths([tmp_path], jobs=1)
    assert (len(result.findings), len(result.only_in_half)) == (0, PROJECT)
    (tmp_path / "train.py").write_text("import torch\nscaler = torch.amp.GradScaler('cuda')\n")
    assert len(lint_paths([tmp_path], jobs=1).findings) == PROJECT


def test_a_file_that_python_cannot_read_is_a_finding_and_told_as_unread(tmp_path):
    (tmp_path / "train.py").write_text("import torch\ndef broken(:\n    pass\n")
    result = lint_paths([tmp_path], jobs=1)
    assert [one.rule.code for one in result.findings] == ["FL001"]
    assert [Path(file).name for file, _ in result.unread] == ["train.py"]


@pytest.mark.parametrize(
    ("name", "data"),
    [("latin.py", b"import torch\nname = '\xff'\n"), ("cut.ipynb", b'{"cells": [{"source": ["import torch'),
     ("deep.py", b"import torch\ny = " + b"-" * 45000)],
)  # fmt: skip
def test_a_file_about_training_that_cannot_be_read_is_a_finding_and_another_is_not(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert [one.rule.code for one in lint_paths([tmp_path], jobs=1).findings] == ["FL001"]
    (tmp_path / name).write_bytes(data.replace(b"torch", b"numpy"))
    assert lint_paths([tmp_path], jobs=1).findings == ()


def test_a_file_that_is_asked_about_by_its_name_is_told_as_unread_whatever_it_is_about(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text("def broken(:\n    pass\n")
    assert [one.rule.code for one in lint_paths([file], jobs=1).findings] == ["FL001"]
    assert lint_paths([tmp_path], jobs=1).findings == ()
    file.write_text("def whole():\n    pass\n")
    assert lint_paths([file], jobs=1).findings == ()


def test_a_file_that_may_not_be_opened_is_a_finding_and_one_that_is_too_large_is_not(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("y = 1\n")
    for error, told in ((PermissionError(13, "Permission denied"), ["FL001"]), (OSError(27, "it is too large"), [])):
        monkeypatch.setattr("floatline.lint.fixing.read_bounded", Mock(side_effect=error))
        result = lint_paths([tmp_path], jobs=1)
        assert [one.rule.code for one in result.findings] == told
        assert len(result.unread) == 1


def test_only_what_is_told_is_fixed(tmp_path):
    text = "import torch\n\n\ndef unit(x):\n    y = x.norm(dim=-1)\n    return x / (y + 1e-8)\n"
    file = tmp_path / "units.py"
    file.write_text(text)
    assert not lint_paths([file], jobs=1, fix=True, unsafe=True).changes
    (change,) = lint_paths([file], settings=Settings(half=True), jobs=1, fix=True, unsafe=True).changes
    assert "y.to(torch.promote_types(y.dtype, torch.float32)) + 1e-8" in change[2]


IN_A_LAYER = """import torch
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x, mask):
        with torch.autocast("cuda", dtype=torch.float16):
            h = self.layer(x)
            return {}
"""
SELDOM = {
    "a row that is masked as a whole": "torch.where(mask, h, -1e9).softmax(-1)",
    "the same in the other order": "torch.where(mask, -1e9, h).softmax(-1)",
    "two vectors with one direction": "torch.acos(torch.einsum('ij,ij->i', h, h).clamp(-1 + 1e-6, 1 - 1e-6))",
}


@pytest.mark.parametrize("name", SELDOM)
def test_what_does_harm_at_numbers_that_are_seldom_met_says_so(name):
    found = lint_text(IN_A_LAYER.format(SELDOM[name]), rules=list(RULES.values()), half=True)
    assert {one.holds for one in found} == {"seldom"}
    raised = lint_text(IN_A_LAYER.format("h.masked_fill(mask, -1e9).softmax(-1)"), rules=list(RULES.values()))
    assert {(one.rule.code, one.holds) for one in raised} == {("FL105", "autocast")}


def test_a_mask_that_where_fills_may_be_boolean_and_is_not_rewritten():
    text = "import torch\ndef f(keep, x, mask):\n    y = {}\n    return y, torch.where({}, x, 0.0)\n"
    for filled, same in (("keep", True), ("x", False)):
        before = text.format(f"torch.where(mask, {filled}, -1e9)", "keep")
        after, _ = fix_text(before, "train.py", rules=[RULES["FL105"]], unsafe=True)
        assert (after == before) == same


@pytest.mark.parametrize("name", ["units", "attn_mask"])
def test_what_may_be_a_boolean_mask_is_not_filled_with_a_number_of_its_dtype(name):
    text = f"import torch\n{name} = model(x).masked_fill(keep, -1e9)\ny = {name}.masked_fill(keep, -1e9)\n"
    fixed, _ = fix_text(text, "a.py", rules=[RULES["FL105"]], unsafe=True)
    assert (f"torch.finfo({name}.dtype).min" in fixed) == (name == "units")


def test_a_mask_may_be_of_whole_numbers_and_bf16_has_the_range_of_fp32():
    text = "import torch\n{0} = model(x)\ny = {0}.masked_fill(keep == 0, -9e15)\n"
    assert "FL105" in codes_of(text.format("scores"), half=False)
    assert "FL105" not in codes_of(
        "def f(attention_mask):\n    return attention_mask.masked_fill(keep == 0, -9e15)\n", half=False
    )
    made = "import torch\nb = torch.ones(3, 4, dtype=torch.{0})\nb[0] = 1e20\n"
    assert "FL105" in codes_of(made.format("float16"))
    assert "FL105" not in codes_of(made.format("bfloat16"))


def test_a_code_behind_noqa_is_left_alone():
    text = "import torch\ny = torch.log(torch.sigmoid(model(x)))  # noqa: E501, FL102\n"
    assert "FL102" not in codes_of(text)
    assert "FL102" in codes_of(text.replace("FL102", "FL103"))


def test_the_cells_of_a_notebook_are_read(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# text"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "import torch\n", "!pip list \\\n", "  --user"]},
        {"cell_type": "code", "source": "cd folder"},
        {"cell_type": "code", "source": "x = model(x)\ny = torch.log(torch.sigmoid(x))"},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    (one,) = lint_paths([tmp_path], jobs=1, fix=True).findings
    assert (one.rule.code, one.line, one.file.endswith("a.ipynb:cell 4")) == ("FL102", 2, True)
    (tmp_path / "a.ipynb").write_text("{")
    assert len(lint_paths([tmp_path], jobs=1).unread) == 1


def test_what_lint_takes_for_widened_is_what_was_recorded_of_torch():
    def names(*lists):
        return {one.partition(".")[0].removeprefix("linalg_") for kind in lists for one in _LISTS[kind].split()}

    # Kernels that nobody calls by these names; F.interpolate is what calls the upsamplings.
    inner = ("_", "cudnn_", "native_", "upsample_", "nll_loss2d", "convolution", "conv_tbc")
    wide = {name for name in names("float32", "dtype", "append") if not name.startswith(inner)}
    composed = {"cross_entropy", "gaussian_nll_loss", "normalize", "pairwise_distance", "softmin", "square"}
    assert wide | composed | {"trace", "interpolate", "upsample"} == UNDER_AUTOCAST
    assert not UNDER_AUTOCAST & names("low", "widest")


USED = {
    "nobody": ("", False),
    "another file": ("from part import Pool\npool = Pool()\n", True),
    "a configuration": ("model: part.Pool\n", True),
    "a comment": ("x = 1\n    # pool = Pool(x)\n", False),
    "another class of that name": ("class Pool:\n    def run(self):\n        super(Pool, self).run()\n", False),
}


@pytest.mark.parametrize("name", USED)
def test_what_nothing_in_a_project_names_is_told_on_demand_only(tmp_path, name):
    text, is_told = USED[name]
    part = "import torch\nclass Pool(torch.nn.Module):\n    def forward(self, q, k, gone):\n"
    part += "        return torch.matmul(q, k).masked_fill(gone, -1e9)\n\n\nuse_amp = True\n"
    (tmp_path / "part.py").write_text(part)
    (tmp_path / ("run.yaml" if name == "a configuration" else "run.py")).write_text(text)
    (alone,) = lint_paths([tmp_path]).findings
    assert alone.rule.code == "FL105"
    for number in range(PROJECT):
        (tmp_path / f"more{number}.py").write_text("x = 1\n")
    assert bool(lint_paths([tmp_path]).findings) is is_told
    (asked,) = lint_paths([tmp_path], settings=Settings(half=True)).findings
    assert asked.rule.code == "FL105"
    (tmp_path / "part.py").write_text(part.replace("\nuse_amp", "\npool = Pool()\nuse_amp"))
    assert lint_paths([tmp_path]).findings
    (tmp_path / "part.py").write_text(part.replace("class Pool", "@register\nclass Pool"))
    assert lint_paths([tmp_path]).findings


HELPER = """import torch
def mask(q, k, gone):
    return torch.matmul(q, k).masked_fill(gone, -1e9)


def attend(q, k, gone):
    return mask(q, k, gone).softmax(-1)


use_amp = True
"""


@pytest.mark.parametrize("called", ["", "from part import attend\n", "from part import mask\n"])
def test_what_only_unnamed_functions_of_its_file_call_is_told_on_demand_only(tmp_path, called):
    (tmp_path / "part.py").write_text(HELPER)
    (tmp_path / "run.py").write_text(called)
    for number in range(PROJECT):
        (tmp_path / f"more{number}.py").write_text("x = 1\n")
    assert bool(lint_paths([tmp_path]).findings) is bool(called)
    (tmp_path / "part.py").write_text(HELPER + "y = attend(q, k, gone)\n")
    assert lint_paths([tmp_path]).findings
