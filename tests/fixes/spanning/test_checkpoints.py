"""Checkpoints: the scaler's state is saved and loaded, and older checkpoints stay loadable."""

import pytest
import torch
from tests.fixes.sources import spans

ONE_FUNCTION = """

def resume(path, net, sgd):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    if path.exists():
        old = torch.load(path)
        net.load_state_dict(old["net"])
        sgd.load_state_dict(old["sgd"])  # in place
    begun = scaler.get_scale()
    scaler.scale(net(torch.ones(2, 3)).sum()).backward()
    scaler.step(sgd)
    scaler.update(8.0)
    torch.save(
        {
            "net": net.state_dict(),
            'sgd': sgd.state_dict(),
        },  # all of it
        path,
    )  # here
    return begun
"""
METHODS = """

class Trainer:
    def __init__(self, net):
        self.net, self.opt = net, torch.optim.SGD(net.parameters(), 0.1)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(self, x):
        self._scaler.scale(self.net(x).sum()).backward()
        self._scaler.step(self.opt)
        self._scaler.update(8.0)

    def state(self):
        return dict(step=1, net=self.net.state_dict(), opt=self.opt.state_dict())  # here

    def restore(self, state):
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
"""


def test_a_function_saves_and_loads_the_scale(tmp_path):
    after = spans(tmp_path, "scaler-state-lost", ONE_FUNCTION)["scaler-state"]
    assert '        sgd.load_state_dict(old["sgd"])  # in place\n        if old.get("scaler"):' in after
    values = {}
    exec(after, values)
    for begins_with in (64.0, 8.0):
        net = torch.nn.Linear(3, 1)
        assert values["resume"](tmp_path / "state.pt", net, torch.optim.SGD(net.parameters(), 0.1)) == begins_with


def test_without_the_change_a_session_forgets_the_scale(tmp_path):
    values = {}
    exec("import torch\n" + ONE_FUNCTION, values)
    for _ in range(2):
        net = torch.nn.Linear(3, 1)
        assert values["resume"](tmp_path / "state.pt", net, torch.optim.SGD(net.parameters(), 0.1)) == 64.0


def test_methods_save_and_load_the_scale_under_its_own_name(tmp_path):
    after = spans(tmp_path, "scaler-state-lost", METHODS)["scaler-state"]
    assert "opt=self.opt.state_dict(), scaler=self._scaler.state_dict())" in after
    values = {}
    exec(after, values)
    first, second = (values["Trainer"](torch.nn.Linear(3, 1)) for _ in range(2))
    first.step(torch.ones(2, 3))
    second.restore(first.state())
    assert second._scaler.get_scale() == 8.0
    old = {key: value for key, value in first.state().items() if key != "scaler"}
    third = values["Trainer"](torch.nn.Linear(3, 1))
    third.restore(old)  # as older sessions saved it
    assert third._scaler.get_scale() == 64.0


def test_a_state_that_hangs_on_a_setting_is_kept_always(tmp_path):
    text = METHODS.replace(
        "opt=self.opt.state_dict())", "opt=self.opt.state_dict(), amp=self._scaler.state_dict() if self.keep else None)"
    )
    text += '        if self.keep:\n            self._scaler.load_state_dict(state["amp"])\n'
    after = spans(tmp_path, "scaler-state-lost", text)["scaler-state"]
    assert "amp=self._scaler.state_dict())" in after
    assert 'if state.get("amp"):\n            self._scaler.load_state_dict(state["amp"])' in after


LOADS = '        net.load_state_dict(old["net"])\n        sgd.load_state_dict(old["sgd"])'
OUTSIDE = "def restore(self):\n        return\n\n\nif True:\n    def restore(self, state):"


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (ONE_FUNCTION, 'old["sgd"]', "old.sgd"),
        (ONE_FUNCTION, LOADS, "        pass"),
        (ONE_FUNCTION, '"net": net.state_dict(),', '"net": net.state_dict(), "scaler": 1,'),
        (ONE_FUNCTION, "scaler.scale(net(torch.ones(2, 3)).sum())", "net(torch.ones(2, 3)).sum()"),
        (METHODS, "def restore(self, state):", OUTSIDE),
        (METHODS, 'self.opt.load_state_dict(state["opt"])', 'print(self.opt.load_state_dict(state["opt"]))'),
    ],
)
def test_a_checkpoint_stays_where_nobody_can_tell_what_loads_it(tmp_path, text, old, new):
    assert old in text
    assert spans(tmp_path, "scaler-state-lost", text.replace(old, new)) == {}


def test_a_scaler_that_is_made_after_the_load_is_not_loaded(tmp_path):
    made = '    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)\n'
    text = ONE_FUNCTION.replace(made, "").replace("    scaler.scale(", f"{made}    scaler.scale(")
    assert spans(tmp_path, "scaler-state-lost", text) == {}
