"""What benchmarks, tools and examples import from floatline is there: most of them run on no machine that tests see."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "tools", "examples") for path in (ROOT / folder).rglob("*.py"))


def missing(source: str) -> list[str]:
    """Names that a script imports from floatline, from benchmarks or from tools and that are not there."""
    names = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("floatline", "benchmarks")
        for alias in node.names
    ]
    return [f"{module}.{name}" for module, name in names if not _is_there(module, name)]


def _is_there(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
    except ModuleNotFoundError as missing:
        return missing.name is not None and missing.name.split(".")[0] not in ("floatline", "benchmarks")
    try:
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_script_imports_is_there(script):
    assert missing(script.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_script_that_imports_from_the_projects_folder_finds_it(script):
    source = script.read_text(encoding="utf-8")
    is_run = "__main__" in source and "PYTHONPATH=" not in source  # else it is imported, or says what it needs
    assert finds_the_folder(source) or not is_run


def finds_the_folder(source: str) -> bool:
    """Whether a script that is run by its path has what it imports on its path."""
    names = {
        node.module.split(".")[0] for node in ast.parse(source).body if isinstance(node, ast.ImportFrom) and node.module
    }
    return not names & {"benchmarks", "tests", "tools"} or "sys.path" in source


def test_a_script_that_would_not_find_it_is_seen():
    assert not finds_the_folder("from benchmarks import fold_models")
    assert finds_the_folder("import sys\nsys.path.insert(0, str(ROOT))\nfrom benchmarks import fold_models")


def test_a_name_that_is_gone_is_found():
    source = "from floatline.numerics.orthogonal import newton_schulz, orthogonalize\nfrom floatline import nothing\n"
    assert missing(source) == ["floatline.numerics.orthogonal.orthogonalize", "floatline.nothing"]
