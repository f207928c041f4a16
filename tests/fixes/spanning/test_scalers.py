"""Loss scales: a scaler that is off, a scale that never falls, unscaling for every micro-batch, no scaler at all."""

import pytest
import torch
from tests.fixes.sources import spans
from tests.slow import slow

OFF = """

def fit(net, opt, loader, *, amp=True, scale_loss=False):
    grad_scaler = torch.amp.GradScaler(
        "cuda",
        init_scale=2.0**10,
        enabled=scale_loss,  # off by default
    )
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
            loss = net(x, y)
        grad_scaler.scale(loss).backward()  # here
        grad_scaler.step(opt)
        grad_scaler.update()
"""


def test_a_scaler_is_on_wherever_autocast_is(tmp_path):
    after = spans(tmp_path, "gradient-underflow", OFF)["scaler-with-autocast"]
    assert "enabled=amp" in after.partition("for x")[0]
    assert "scale_loss)" not in after
    whole = OFF.replace(", enabled=amp", "")
    plain = spans(tmp_path, "gradient-underflow", whole)["scaler-with-autocast"]
    assert "enabled" not in plain and "init_scale=2.0**10" in plain


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("enabled=scale_loss", "enabled=amp"),  # it is on
        ("        enabled=scale_loss,  # off by default\n", ""),
        ("torch.float16", "torch.bfloat16"),
        ("torch.float16", "kinds[len(x)]"),  # not asked for twice
        ("enabled=amp)", "enabled=y is not None)"),  # not known where the scaler is made
        ("        with torch.autocast", "        amp = True\n        with torch.autocast"),
        ('"cuda", dtype=torch.float16, enabled=amp', '"cuda", enabled=False'),
    ],
)
def test_a_scaler_stays_where_autocast_says_nothing_else(tmp_path, old, new):
    assert old in OFF
    assert "scaler-with-autocast" not in spans(tmp_path, "gradient-underflow", OFF.replace(old, new))


STATIC = """

def fit(net, opt, batches, loss_scale=2.0**24):
    skipped = 0
    for x, y in batches:
        opt.zero_grad()
        loss = F.mse_loss(net(x), y)
        scaled = loss_scale * loss
        scaled.backward()  # here
        for p in net.parameters():
            p.grad = p.grad.half().float() / loss_scale
        if all(torch.isfinite(p.grad).all() for p in net.parameters()):
            opt.step()
    return float(loss.detach()), skipped
"""
SKIPS = """
        if any(p.grad.isnan().any() or p.grad.isinf().any() for p in net.parameters()):
            skipped += 1  # next time
            continue
        opt.step()
"""
ELSE = """
        if torch.stack([p.grad.isfinite().all() for p in net.parameters()]).all():
            opt.step()
        else:
            skipped += 1
"""
CHECK = STATIC.partition("        if all")[2].partition("    return")[0]
STATICS = [STATIC, *(STATIC.replace(f"        if all{CHECK}", other[1:]) for other in (SKIPS, ELSE))]


def train(text, scale=None):
    torch.manual_seed(0)
    values = {}
    exec("import torch\nimport torch.nn.functional as F\n" + text.removeprefix("import torch\n"), values)
    net = torch.nn.Linear(3, 1)
    x = torch.randn(8, 3)
    batches = [(x, x.sum(1, keepdim=True))] * 60
    options = {} if scale is None else {"loss_scale": scale}
    return values["fit"](net, torch.optim.SGD(net.parameters(), 0.1), batches, **options)[0]


@slow
@pytest.mark.parametrize("text", STATICS)
def test_a_scale_of_ones_own_falls_until_gradients_fit(tmp_path, text):
    after = spans(tmp_path, "gradient-overflow", text, op="backward")["scale-back-off"]
    assert "loss_scale = loss_scale / 2" in after
    assert train(text) > 1
    assert train(after) < 0.1
    assert train(after, 1.0) == train(text, 1.0)  # where nothing overflows, nothing is another


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" / loss_scale", " / loss_scale_of_last_year"),
        (" / loss_scale", ""),  # gradients keep the scale: half of it is another learning rate
        ("        opt.zero_grad()", "        loss_scale *= 0.5\n        opt.zero_grad()"),  # it falls already
        (", loss_scale=2.0**24", ""),  # a global
        ("if all(torch.isfinite(p.grad).all() for p in net.parameters())", "if skipped == 0"),
        ("scaled = loss_scale * loss", "scaled = loss * len(x)"),
        ("    for x, y in batches:", "    if batches:\n        x, y = batches[0]"),  # no loop: it would begin again
    ],
)
def test_a_scale_stays_where_it_does_not_cancel_or_does_not_last(tmp_path, old, new):
    assert old in STATIC
    assert "scale-back-off" not in spans(tmp_path, "gradient-overflow", STATIC.replace(old, new), op="backward")


NESTED = """

def fit(net, opt, scaler, epochs):
    for chunks in epochs:
        opt.zero_grad()
        for x, y in chunks:
            scaler.scale(F.mse_loss(net(x), y) / len(chunks)).backward()
            scaler.unscale_(opt)  # here
            # large ones are cut
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=5.0)
            scaler.update()
        # once an epoch
        opt.step()
"""
EVERY_NTH = """

class Trainer:
    def fit(self, loader, every):
        for i, (x, y) in enumerate(loader):
            self.scaler.scale(F.mse_loss(self.net(x), y) / every).backward()
            self.scaler.unscale_(self.opt)  # here
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
            if 1 < (i + 1) % every + 2 < 3:
                self.scaler.step(self.opt)
                self.scaler.update()
                self.opt.zero_grad()
"""


def test_gradients_are_unscaled_once_for_all_micro_batches(tmp_path):
    after = spans(tmp_path, "scaler-misuse", NESTED)["unscale-once"]
    inner, _, outer = after.partition("        # once an epoch\n")
    assert "unscale_" not in inner and "clip" not in inner and "update" not in inner
    lines = [line.strip().partition("  #")[0] for line in outer.splitlines()]
    assert [line for line in lines if not line.startswith("#")] == [
        "scaler.unscale_(opt)",
        "torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=5.0)",
        "scaler.step(opt)",
        "scaler.update()",
    ]


@slow
def test_they_are_unscaled_only_where_the_step_is_made(tmp_path):
    after = spans(tmp_path, "scaler-misuse", EVERY_NTH)["unscale-once"]
    before, _, guarded = after.partition("% every + 2 < 3:\n")
    assert "unscale_" not in before and "clip" not in before
    assert guarded.count("unscale_(") == guarded.count("clip_grad_norm_(") == guarded.count(".update()") == 1

    values = {}
    exec(after, values)
    torch.manual_seed(0)
    trainer = values["Trainer"]()
    trainer.net = torch.nn.Linear(3, 1)
    trainer.opt = torch.optim.SGD(trainer.net.parameters(), 0.2)
    trainer.scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(8, 3)
    trainer.fit([(x, x.sum(1, keepdim=True))] * 100, 2)
    assert (trainer.net(x) - x.sum(1, keepdim=True)).detach().abs().max() < 0.5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_norm=5.0", "max_norm=float(y.max())"),  # of the micro-batch
        ("            # large", "            log(net.weight.grad)\n            # large"),  # sees unscaled gradients
        ("        opt.step()\n", "        net.step()\n"),
        ("scaler.unscale_(opt)", "scaler.unscale_(x)"),
        ("        for x, y in chunks:", "        for x, y, opt in chunks:"),
    ],
)
def test_unscaling_stays_where_it_cannot_be_moved(tmp_path, old, new):
    assert old in NESTED
    assert "unscale-once" not in spans(tmp_path, "scaler-misuse", NESTED.replace(old, new))


BARE = """

def fit(net, opt, batches, epochs=3, amp=True):
    # every epoch
    for epoch in range(epochs):
        for x, y in batches:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                loss = F.mse_loss(net(x), y) * 1e-7
            (loss * 1.0).backward()  # here
            if (norm := torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)) > 0:
                opt.step()
    return norm
"""


def test_a_loop_without_a_scaler_gets_one(tmp_path):
    clip = "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)"
    text = BARE.replace(
        f"            if (norm := {clip}) > 0:\n                opt.step()",
        f"            norm = {clip}\n            opt.step()  # kept",
    )
    after = spans(tmp_path, "gradient-underflow", text)["add-scaler"]
    assert '    # every epoch\n    scaler = torch.amp.GradScaler("cpu", enabled=amp)\n    for epoch' in after
    assert "scaler.scale(loss * 1.0).backward()  # here\n            scaler.unscale_(opt)\n            norm = " in after
    assert "scaler.step(opt)  # kept\n            scaler.update()\n" in after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("opt.zero_grad(set_to_none=True)", "opt.zero_grad()"),  # clipped in the head of an `if`, before every step
        ("torch.float16", "torch.bfloat16"),
        (
            "    for epoch in range(epochs):\n        for x, y in batches:\n",
            "    x, y = batches[0]\n    if x:\n        if y:\n",
        ),
        ("return norm", "scaler = norm"),
        ("amp=True", "amp=True, epoch=0"),  # called for every epoch
        ("opt.step()", "opt.step(closure)"),
        ("(loss * 1.0).backward()", "loss.backward()\n            norm.backward()"),
        ("torch.autocast(", "region("),
    ],
)
def test_a_loop_that_is_not_plain_gets_no_scaler(tmp_path, old, new):
    assert old in BARE
    assert "add-scaler" not in spans(tmp_path, "gradient-underflow", BARE.replace(old, new))
