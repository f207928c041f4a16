"""What is apart from FP32 is named at the line that brings it back, in targets and in scripts."""

import sys
from pathlib import Path

from tests.slow import exhaustive, slow

from floatline.diagnosis import diagnose
from floatline.diagnosis.scripts.script import diagnose_script

TARGET = Path(__file__).parent / "targets" / "codes_in_half.py"
LINES = TARGET.read_text(encoding="utf-8").splitlines()


def check(found):
    assert (found.verdict, found.primary.cause.id) == ("precision", "choice-flipped")
    assert "# HERE" in LINES[found.primary.line - 1]
    assert "in FP32, from the same seed" in found.primary.seen
    assert any("in FP32" in note and "gone" in note for note in found.notes)


@exhaustive
def test_a_target_whose_products_choose_other_codes_is_blamed_at_their_line():
    check(diagnose(f"{TARGET}:train", steps=40, tries_fixes=False))


@slow
def test_the_same_target_in_fp32_is_healthy():
    assert diagnose(f"{TARGET}:in_fp32", tries_fixes=False).verdict == "healthy"


@slow
def test_a_script_whose_products_choose_other_codes_is_blamed_at_their_line():
    check(diagnose_script([sys.executable, str(TARGET)], keep_stdout=True))


PRINTED = """
import torch

net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(30):
    x = torch.randn(32, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
seconds = 1.0 if WATCHED else 7.0
seen = torch.zeros((), dtype=DTYPE)
for _ in range(600):
    seen += 1  # HERE
kept = torch.ones(2000)[: int(seen)]
print("kept", len(kept), "of", 2000, "in", seconds)
"""


@slow
def test_a_count_that_is_only_printed_is_blamed_at_its_line_and_a_clock_is_not(tmp_path):
    script = tmp_path / "train.py"
    clock = "'floatline.diagnosis.scripts.main' in __import__('sys').modules"
    for dtype, verdict in (("torch.bfloat16", "precision"), ("torch.float32", "healthy")):
        script.write_text(PRINTED.replace("DTYPE", dtype).replace("WATCHED", clock), encoding="utf-8")
        found = diagnose_script([sys.executable, str(script)], keep_stdout=True)
        assert found.verdict == verdict, found
        if verdict == "precision":
            assert "HERE" in script.read_text(encoding="utf-8").splitlines()[found.primary.line - 1]
            assert "shows 256, and in FP32, from the same seed, 600" in found.primary.seen
