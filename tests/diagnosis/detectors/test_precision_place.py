"""16-bit weights of a build(): the finding names the line of the precision, and none where it is not written out."""

from floatline.diagnosis import diagnose

SOURCE = """\
import torch
from torch.nn import functional as F

KIND = {kind}


def build():
    net = torch.nn.Linear(8, 2)
    torch.nn.init.constant_(net.weight, 1.5)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return net, [((x,), (x[:, :2],))], F.mse_loss, {named}, lambda m: torch.optim.SGD(m.parameters(), 1e-3)
"""


def find(tmp_path, **words):
    path = tmp_path / "small.py"
    path.write_text(SOURCE.format(**words), encoding="utf-8")
    found = diagnose(str(path)).primary
    assert found is not None and found.cause.id == "update-lost-to-rounding"
    return found


def test_the_line_of_the_precision_is_named(tmp_path):
    found = find(tmp_path, kind=None, named='"bf16-true"')
    assert (found.file, found.line) == (str(tmp_path / "small.py"), 11)


def test_no_line_is_named_where_the_precision_comes_from_elsewhere(tmp_path):
    found = find(tmp_path, kind='"bf16-true"', named="KIND")
    assert (found.file, found.line, found.module) == ("", 0, "optimizer.step")
