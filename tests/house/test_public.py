"""The public face: what `floatline` offers, and what importing it does not load."""

import importlib
import subprocess
import sys

import pytest
from tests.slow import slow

import floatline
from floatline.base.offered import MODULES, NAMES

PUBLIC = {
    "FloatlineError",
    "Guard",
    "GuardStop",
    "HalfOnCPU",
    "Ledger",
    "LossScaler",
    "Plan",
    "Policy",
    "__version__",
    "diagnose",
    "fold",
    "manifest",
    "optim",
    "parity",
    "rescue",
    "validate",
}
WITHOUT_TORCH = ("floatline", "floatline.formats", "floatline.causes", "floatline.findings", "floatline.plans")


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


@slow
def test_a_guard_does_not_load_the_compiler():
    assert "torch._dynamo" not in modules_after("import floatline\nfloatline.Guard")


@slow
def test_the_checks_above_can_fail():
    assert "torch" in modules_after("import floatline\nfloatline.Guard")
    assert "torch._dynamo" in modules_after("import torch\ntorch.compiler.disable(print)")


def test_a_name_that_needs_torch_says_so_where_there_is_none():
    code = "import sys; sys.modules['torch'] = None; import floatline; floatline.Guard"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: floatline.Guard needs torch. Install it with: pip install" in run.stderr


def test_every_module_opens_with_a_line_that_says_what_it_holds():
    root = importlib.import_module("pathlib").Path(floatline.__file__).parent
    for path in root.rglob("*.py"):
        assert path.read_text(encoding="utf-8").startswith('"""'), path


@pytest.mark.parametrize("name", sorted(NAMES))
def test_older_names_work_and_say_where_they_are_now(name):
    with pytest.warns(DeprecationWarning, match=rf"floatline\.{name} is floatline\.{NAMES[name]}\.{name} now"):
        assert getattr(floatline, name) is getattr(importlib.import_module(f"floatline.{NAMES[name]}"), name)


@slow
def test_modules_that_were_documented_are_found_by_their_older_names():
    code = "\n".join(
        f"import floatline.{new} as new\nfrom floatline.{old} import __doc__ as old\nassert old == new.__doc__, '{old}'"
        for old, new in sorted(MODULES.items())
    )
    run = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(f"floatline.{old} is floatline.{new} now." in run.stderr for old, new in MODULES.items())


@pytest.mark.slow
def test_the_function_validate_is_not_hidden_by_the_older_modules_below_its_name():
    code = "from floatline.validate.terms import Terms\nimport floatline\n"
    code += "print(callable(floatline.validate), Terms.__module__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True floatline.validation.verdict.terms\n"
