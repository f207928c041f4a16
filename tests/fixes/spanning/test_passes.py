"""Backward passes beside a scaler: what is not scaled, unscaled by hand, cleared too seldom, or unscaled in part."""

import pytest
from tests.fixes.sources import spans

TWO_LOSSES = """

def fit(net, opt, scaler, loader):
    for x, y in loader:
        opt.zero_grad()
        first, second = net(x, y)
        scaler.scale(first).backward(retain_graph=True)
        (second / 2).backward()  # here
        scaler.step(opt)
        scaler.update()
"""


def test_every_loss_of_a_step_is_scaled(tmp_path):
    after = spans(tmp_path, "scaler-misuse", TWO_LOSSES)["scale-backward"]
    assert "        scaler.scale(second / 2).backward()  # here\n" in after
    assert after.count("scaler.scale(") == 2


def test_a_loss_that_is_scaled_stays_and_so_does_one_without_a_scaler(tmp_path):
    scaled = TWO_LOSSES.replace("(second / 2)", "scaler.scale(second / 2)")
    bare = TWO_LOSSES.replace("scaler.scale(first)", "first")
    for text in (scaled, bare):
        assert text != TWO_LOSSES
        assert "scale-backward" not in spans(tmp_path, "scaler-misuse", text)


LOGGED = """

def norm_of(net, scaler):
    total = 0.0
    for p in net.parameters():
        p.grad.data.div_(scaler.get_scale())  # here
        total += p.grad.norm().item() ** 2
    return total**0.5


def fit(net, opt, scaler, loss):
    scaler.scale(loss).backward()
    print(norm_of(net, scaler))
    scaler.step(opt)
"""


def test_gradients_are_read_and_not_divided_twice(tmp_path):
    after = spans(tmp_path, "scaler-misuse", LOGGED)["unscale-by-scaler"]
    assert "div_" not in after
    assert "        total += (p.grad / scaler.get_scale()).norm().item() ** 2\n" in after
    other = LOGGED.replace("div_(scaler.get_scale())", "div_(2)")
    assert "unscale-by-scaler" not in spans(tmp_path, "scaler-misuse", other)


CLEARED = """

def fit(net, opt, scaler, loader):
    for x, y in loader:
        scale = scaler.get_scale()
        scaler.scale(F.mse_loss(net(x), y)).backward()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() >= scale:
            opt.zero_grad()  # here
            print("made")
"""


def test_gradients_of_a_step_that_was_left_out_are_cleared(tmp_path):
    after = spans(tmp_path, "scaler-misuse", CLEARED)["clear-always"]
    assert (
        '        opt.zero_grad()  # here\n        if scaler.get_scale() >= scale:\n            print("made")\n' in after
    )
    alone = spans(tmp_path, "scaler-misuse", CLEARED.replace('            print("made")\n', ""))["clear-always"]
    assert alone.endswith("if scaler.get_scale() >= scale:\n            pass\n")
    accumulated = CLEARED.replace("if scaler.get_scale() >= scale:", "if len(x) == 8:")
    assert "clear-always" not in spans(tmp_path, "scaler-misuse", accumulated)


TWO_OPTIMIZERS = """

def fit(net, first, second, scaler, loader):
    both = [first, second]
    for x, y in loader:
        scaler.scale(F.mse_loss(net(x), y)).backward()
        scaler.unscale_(first)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # here
        for opt in both:
            scaler.step(opt)
        scaler.update()
"""


def test_gradients_of_every_optimizer_are_unscaled_before_they_are_clipped(tmp_path):
    after = spans(tmp_path, "clip-before-unscale", TWO_OPTIMIZERS)["unscale-all"]
    assert "scaler.unscale_(first)\n        scaler.unscale_(second)\n        torch.nn.utils.clip_grad_norm_(" in after


@pytest.mark.parametrize(
    ("old", "new"), [("[first, second]", "make()"), ("[first, second]", "[first]"), ("scaler.unscale_(first)", "pass")]
)
def test_nothing_is_unscaled_that_is_not_known_to_be_missing(tmp_path, old, new):
    assert old in TWO_OPTIMIZERS
    assert "unscale-all" not in spans(tmp_path, "clip-before-unscale", TWO_OPTIMIZERS.replace(old, new))
