"""Lines that fail in any precision, and loops: roots of 0, masks, empty means, clamps, schedulers and penalties."""

import pytest
import torch
from tests.fixes.sources import candidates

CHANGES = [
    (
        "singular-gradient",
        "SqrtBackward0",
        "r = (x * x).sum(-1).sqrt()",
        {"vector-norm": "r = torch.linalg.vector_norm(x, dim=-1)"},
    ),
    (
        "singular-gradient",
        "SqrtBackward0",
        "r = torch.sqrt(y)",
        {"double-where": "r = torch.where(y != 0, torch.sqrt(torch.where(y != 0, y, 1.0)), 0.0)"},
    ),
    (
        "singular-gradient",
        "PowBackward0",
        "r = 2 * y ** 0.5",
        {"double-where": "r = 2 * torch.where(y != 0, torch.where(y != 0, y, 1.0) ** 0.5, 0.0)"},
    ),
    (
        "fully-masked-softmax",
        "aten._softmax",
        "r = x.masked_fill(mask, float('-inf')).softmax(-1)",
        {"mask-constant": "r = x.masked_fill(mask, torch.finfo(x.dtype).min).softmax(-1)"},
    ),
    (
        "fully-masked-softmax",
        "aten._softmax",
        "s = x.masked_fill(mask, -torch.inf)\nr = s.softmax(-1)",
        {"mask-constant": "s = x.masked_fill(mask, torch.finfo(x.dtype).min)"},
    ),
    (
        "empty-reduction",
        "aten.mean",
        "r = 3 - x[mask].mean()",
        {"mean-of-some": "r = 3 - (x[mask].sum() / max(x[mask].numel(), 1))"},
    ),
    (
        "empty-reduction",
        "aten.div",
        "r = (x * mask).sum() / mask.sum()",
        {"mean-of-some": "r = (x * mask).sum() / mask.sum().clamp(min=1)"},
    ),
    (
        "empty-reduction",
        "aten.div",
        "count = (x > 0).float().sum()\nr = x.relu().sum() / count",
        {"mean-of-some": "r = x.relu().sum() / count.clamp(min=1)"},
    ),
    (
        "empty-reduction",
        "aten.nll_loss_forward",
        "r = F.cross_entropy(x, i)",
        {"mean-of-some": 'r = (F.cross_entropy(x, i, reduction="sum") / (i != -100).sum().clamp(min=1))'},
    ),
    (
        "empty-reduction",
        "aten.nll_loss_forward",
        "r = F.cross_entropy(x, i.view(-1), ignore_index=0)",
        {
            "mean-of-some": 'r = (F.cross_entropy(x, i.view(-1), ignore_index=0, reduction="sum") '
            "/ (i.view(-1) != 0).sum().clamp(min=1))"
        },
    ),
    (
        "eps-too-large",
        "aten.add",
        "r = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)",
        {"fp32-eps": "r = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)"},
    ),
    (
        "eps-too-large",
        "aten.add",
        "eps = torch.finfo(x.dtype).eps\nr = x / (x.norm() + eps)",
        {"fp32-eps": "eps = torch.finfo(torch.float32).eps"},
    ),
]


@pytest.mark.parametrize(("cause", "op", "old", "new"), CHANGES)
def test_a_line_gets_these_changes(tmp_path, cause, op, old, new):
    assert candidates(tmp_path, cause, op, old) == new


@pytest.mark.parametrize(("cause", "op", "old", "new"), CHANGES)
def test_the_change_is_the_same_function_where_nothing_fails(cause, op, old, new):
    def compute(code):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        values = {"x": x, "y": x.abs(), "mask": x < 0.1, "i": torch.tensor([0, 1, 2, 3, 3]), "torch": torch}
        values["F"] = torch.nn.functional
        values["mask"][:, 0] = False
        exec(code, values)
        return values["r"]

    for line in new.values():
        whole = "\n".join(line if before[:3] == line[:3] else before for before in old.splitlines())
        torch.testing.assert_close(compute(whole), compute(old))


def test_a_root_of_0_has_a_gradient_of_0_behind_its_guard(tmp_path):
    (new,) = candidates(tmp_path, "singular-gradient", "SqrtBackward0", "r = y.sqrt()").values()
    y = torch.tensor([0.0, 4.0, -1.0, torch.nan], requires_grad=True)
    values = {"torch": torch, "y": y}
    exec(new, values)
    values["r"][:2].sum().backward()
    torch.testing.assert_close(values["r"][:2], torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(y.grad[:2], torch.tensor([0.0, 0.25]))
    assert values["r"][2:].isnan().all()  # what is wrong stays to be seen


@pytest.mark.parametrize(
    ("cause", "op", "old"),
    [
        ("singular-gradient", "SqrtBackward0", "r = torch.where(y > 0, y, 1.0).sqrt()"),
        ("singular-gradient", "PowBackward0", "r = y ** 2"),
        ("fully-masked-softmax", "aten._softmax", "r = x.softmax(-1)"),
        ("empty-reduction", "aten.mean", "r = x.mean(0)"),
        ("empty-reduction", "aten.mean", "r = self.net(x).mean()"),  # not computed twice
        ("empty-reduction", "aten.div", "r = x.sum() / w.sum()"),  # weights may add up to less than 1
        ("empty-reduction", "aten.nll_loss_forward", "r = F.cross_entropy(x, i, weight=w)"),
        ("empty-reduction", "aten.nll_loss_forward", "r = F.cross_entropy(x, i, reduction='sum')"),
        ("empty-reduction", "aten.sum", "r = F.cross_entropy(x, y)"),  # y may be probabilities
        ("eps-too-large", "aten.add", "r = x.relu() + torch.finfo(torch.float32).eps"),
        ("eps-too-large", "aten.add", "r = x.relu() + torch.finfo(x.dtype).tiny"),
        ("clamp-kills-gradient", "aten.clamp", "x.clamp_(max=6)"),
        ("clamp-kills-gradient", "aten.relu", "r = x.clamp(max=6)"),
        ("scaled-grad-in-penalty", "", "r = torch.autograd.grad(y.sum(), x)"),
    ],
)
def test_a_near_miss_stays(tmp_path, cause, op, old):
    assert candidates(tmp_path, cause, op, old) == {}


@pytest.mark.parametrize(
    ("cause", "op", "old", "new"),
    [
        ("clamp-kills-gradient", "aten.clamp", "r = x.mean().clamp(0, 6)", {"no-clamp": "r = x.mean()"}),
        ("clamp-kills-gradient", "aten.clamp_max", "r = -torch.clamp(x - y, max=6)", {"no-clamp": "r = -(x - y)"}),
        (
            "scaled-grad-in-penalty",
            "torch.autograd.grad",
            "r = torch.autograd.grad(scaler.scale(y.sum()), x, create_graph=True)[0]",
            {"unscaled-penalty": "r = torch.autograd.grad(y.sum(), x, create_graph=True)[0]"},
        ),
        (
            "scaler-misuse",
            "torch.amp.GradScaler.step",
            "scaler.scale(x).backward()\nscaler.step(opt)",
            {"update-after-step": "scaler.update()"},
        ),
        (
            "scaler-misuse",
            "torch.optim.SGD.step",
            "scaler.scale(x).backward()\nif mask:\n    scaler.update()\nelse:\n    opt.step()",
            {"step-through-scaler": "scaler.step(opt)\nscaler.update()"},
        ),
        (
            "scaler-misuse",
            "torch.optim.SGD.step",
            "scaler.scale(x).backward()\nif mask:\n    scaler.update()\nopt.step()",
            {"step-through-scaler": "scaler.step(opt)"},
        ),
    ],
)
def test_a_bug_of_the_line_itself_goes(tmp_path, cause, op, old, new):
    assert candidates(tmp_path, cause, op, old) == new


STEP = "scaler.scale(x).backward()\nscaler.step(opt)\n"
SCHEDULE = "scheduler-vs-skipped-step"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            STEP + "scaler.update()\nself.schedule.step()",
            "scale_before = scaler.get_scale()\nif scaler.get_scale() >= scale_before:\nself.schedule.step()",
        ),
        (
            "was = scaler.get_scale()\n" + STEP + "scaler.update()\nif y:\n    y.step()  # kept",
            "if scaler.get_scale() >= was:\ny.step()  # kept",
        ),
    ],
)
def test_a_schedule_counts_the_steps_that_were_made(tmp_path, old, new):
    assert candidates(tmp_path, SCHEDULE, "", old) == {"schedule-after-step": new}


@pytest.mark.parametrize(
    "old",
    [
        STEP + "y.step()",  # no update
        "for x in y:\n    scaler.scale(x).backward()\n    scaler.update()\ny.step()",  # once for many updates
        STEP + "scale_before = 1\nscaler.update()\ny.step()",  # the name is taken
        "y.step()",
    ],
)
def test_a_schedule_stays_where_the_scale_is_not_known(tmp_path, old):
    assert candidates(tmp_path, SCHEDULE, "", old) == {}
