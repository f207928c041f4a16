"""Numbers that a script spoils in 16 bits before it trains are told at the line that spoils them."""

import pytest
import torch
from tests.diagnosis.scripts.test_scripts import observe
from tests.slow import slow

LOOP = """
import torch
torch.manual_seed(0)
{setup}
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(24):
    rows = torch.randn(16, 6)
    {use}
    loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SPOILT = {
    "data that FP16 cannot hold": (
        "seconds = torch.linspace(0, 90_000, 600).reshape(100, 6)\nseconds = seconds.half()  # here",
        "rows = seconds[-16:].float() / 1e4",
        "input-out-of-range",
    ),
    "a variance of squares beyond FP16": (
        "seen = (1000 + torch.randn(64)).half()\nspread = (seen * seen).mean() - seen.mean() ** 2  # here",
        "rows = rows * spread.float()",
        "product-overflow",
    ),
    "a running product in BF16": (
        "signal = torch.ones((), dtype=torch.bfloat16)\nfor i in range(500):\n    signal *= 1 - 1.5e-3  # here",
        "rows = rows * (1 + signal.float())",
        "accumulator-stagnation",
    ),
    "a count in BF16": (
        "count = torch.zeros((), dtype=torch.bfloat16)\nfor i in range(600):\n    count += 1  # here",
        "rows = rows / count.float()",
        "accumulator-stagnation",
    ),
}
HARMLESS = {
    "nothing in 16 bits": ("table = torch.arange(3000.0)", ""),
    "data rounded once": ("table = torch.randn(200, 6).bfloat16()", "rows = table[:16].float()"),
    "a mask of -inf": (
        "mask = torch.full((6,), -1e9).half()\nmask[:3] = 0",
        "rows = rows * torch.softmax(mask.float(), 0)",
    ),
    "a short sum": ("total = sum(torch.rand(6).bfloat16() for _ in range(20))", "rows = rows * total.float()"),
    "an overflow that nobody keeps": ("print((torch.full((4,), 9e4).half() > 1).sum())", ""),
}


def write(tmp_path, setup, use):
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(setup=setup, use=use or "pass"), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_spoilt_before_training_is_told_at_its_line(tmp_path, name):
    setup, use, cause = SPOILT[name]
    path = write(tmp_path, setup, use)
    found = observe(str(path))["findings"]
    assert [finding["cause"] for finding in found][:1] == [cause]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert "# here" in lines[found[0]["line"] - 1]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_before_training_is_left_in_peace(tmp_path, name):
    report = observe(str(write(tmp_path, *HARMLESS[name])))
    assert not report["findings"] and not report["unexplained"]


@slow
def test_the_number_of_operations_that_were_not_looked_at_is_told(tmp_path):
    setup = "x = torch.zeros((), dtype=torch.bfloat16)\nfor i in range(5000):\n    x.fill_(i % 7)"
    notes = observe(str(write(tmp_path, setup, "")))["notes"]
    assert any("4,096 operations in 16 bits were looked at, and 905 were not" in note for note in notes)


def test_a_mode_that_the_script_has_entered_stays_entered(tmp_path):
    setup = (
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Counts(TorchDispatchMode):\n"
        "    seen = 0\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        Counts.seen += 1\n"
        "        return func(*args, **(kwargs or {}))\n"
        "counts = Counts(); counts.__enter__()\n"
        "x = torch.ones(3).half() * 7e4"
    )
    use = "rows, before = rows * 1.0, Counts.seen; assert Counts.seen; rows = rows * 1.0; assert Counts.seen > before"
    path = write(tmp_path, setup, use)
    path.write_text(path.read_text(encoding="utf-8") + "counts.__exit__(None, None, None)\n", encoding="utf-8")
    report = observe(str(path))
    assert not report["exception"], report["exception"]
    assert not torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize(
    ("use", "causes"),
    [
        ("rows = rows * table[torch.arange(16), 0].long().remainder(7).unsqueeze(1)", ["integer-not-exact"]),
        ("rows = rows * table[:16, 1:2]", []),
    ],
    ids=["ids of a table", "data of a table"],
)
def test_ids_among_other_numbers_are_suspected_where_integers_are_made_of_them(tmp_path, use, causes):
    """A run in FP32 decides: nothing is told of a suspect alone."""
    setup = "ids, data = torch.arange(900.0), torch.randn(900)\ntable = torch.stack([ids, data], 1).bfloat16()  # here"
    report = observe(str(write(tmp_path, setup, use)))
    assert not report["findings"]
    assert [one["cause"] for one in report["suspects"] if one["cause"] == "integer-not-exact"] == causes
