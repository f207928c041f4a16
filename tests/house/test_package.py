"""What is shipped: the wheel and sdist build, and installing floatline brings no torch."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from tests.slow import slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    return folder


def metadata(dist: Path):
    wheel = next(dist.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@slow
def test_installing_floatline_does_not_bring_torch(dist):
    required = [r for r in metadata(dist).get_all("Requires-Dist") if "extra ==" not in r]
    assert required
    assert not any(r.lower().startswith(("torch", "triton", "scipy")) for r in required)


def test_the_torch_extra_brings_torch(dist):
    extras = [r for r in metadata(dist).get_all("Requires-Dist") if 'extra == "torch"' in r or "extra == 'torch'" in r]
    assert any(r.startswith("torch") for r in extras)


def test_the_wheel_holds_the_package_and_its_licence(dist):
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        names = archive.namelist()
    assert "floatline/cli/main.py" in names
    assert any(n.endswith("LICENSE") for n in names)
    assert not any(n.startswith("tests/") for n in names)


def test_the_wheel_holds_what_a_report_is_made_of(dist):
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        names = {n.removeprefix("floatline/report/") for n in archive.namelist()}
    assert {
        f"templates/{name}"
        for name in ("charts.js", "look.css", "run.js", "validation.css", "validation.js", "validation.html.j2")
    } <= names
    assert {f"vendor/uplot/{name}" for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE")} <= names


def test_the_sdist_can_be_tested(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    assert {
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "tests/house/test_package.py",
        "tools/bootstrap.py",
    } <= names
