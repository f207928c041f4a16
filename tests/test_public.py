"""The public face: what `floatline` offers, and what importing it does not load."""

import importlib
import subprocess
import sys

import pytest

import floatline

PUBLIC = {
    "CAUSES",
    "Cause",
    "Diagnoser",
    "FORMATS",
    "Finding",
    "FloatlineError",
    "Format",
    "LossScaler",
    "Ledger",
    "Plan",
    "Policy",
    "Ranges",
    "Workload",
    "__version__",
    "choose_plan",
    "compare",
    "cuda_autocast_lists",
    "describe_plan",
    "draw_ranges",
    "find_cause",
    "find_format",
    "Guard",
    "GuardStop",
    "HalfOnCPU",
    "join_master",
    "lint_paths",
    "match_message",
    "measure_ranges",
    "optim",
    "rescue",
    "round_nearest",
    "round_stochastic",
    "split_master",
    "validate",
}
WITHOUT_TORCH = ("floatline", "floatline.formats", "floatline.causes", "floatline.findings", "floatline.plan")


def modules_after(code: str) -> set[str]:
    """Names of the modules loaded by running the code in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stderr.split())


def test_the_public_names_are_exactly_these():
    assert set(floatline.__all__) == PUBLIC
    assert set(dir(floatline)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_loads(name):
    assert getattr(floatline, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Optimiser'"):
        _ = floatline.Optimiser


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_does_not_load_torch(module):
    assert "torch" not in modules_after(f"import {module}")


def test_help_does_not_load_torch():
    code = "sys.argv = ['floatline', '--help']\nfrom floatline.cli.main import app\napp(standalone_mode=False)"
    assert "torch" not in modules_after(code)


def test_the_checks_above_can_fail():
    assert "torch" in modules_after("import floatline\nfloatline.measure_ranges")


def test_a_name_that_needs_torch_says_so_where_there_is_none():
    code = "import sys; sys.modules['torch'] = None; import floatline; floatline.measure_ranges"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: floatline.measure_ranges needs torch. Install it with: pip install" in run.stderr


def test_every_module_opens_with_a_line_that_says_what_it_holds():
    root = importlib.import_module("pathlib").Path(floatline.__file__).parent
    for path in root.rglob("*.py"):
        assert path.read_text(encoding="utf-8").startswith('"""'), path
