"""What `make demo` rescues is broken, and for the reason that it says."""

from pathlib import Path

from tests.slow import slow

from floatline.diagnosis.target_diagnosis import diagnose

EXAMPLES = Path(__file__).parents[2] / "examples"


@slow
def test_the_demo_s_target_is_broken_in_its_norm_and_nowhere_else():
    found = diagnose(str(EXAMPLES / "broken_gpt.py"), steps=5).primary
    assert (found.cause.id, found.module, found.op) == ("product-overflow", "norm", "aten.mul")
    line = (EXAMPLES / "broken_gpt.py").read_text().splitlines()[found.line - 1]
    assert "(x * x).mean" in line
