"""Everything the documentation shows can be run: Python blocks, and the commands of console blocks."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import slow

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
QUICK = [ROOT / "README.md", ROOT / "docs" / "guard.md", ROOT / "docs" / "plans.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list:
    found = []
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8"))):
            if match.group(1) == language:
                marks = () if page in QUICK else slow
                found.append(pytest.param(match.group(2), id=f"{page.relative_to(ROOT)}:{number}", marks=marks))
    return found


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess:
    script = folder / "block.py"
    script.write_text(code, encoding="utf-8")
    return run_preloaded([str(script)], cwd=ROOT)


def run_command(line: str, folder: Path) -> subprocess.CompletedProcess:
    """Run `floatline …` or `python …` of this environment, in the project's folder, without a shell."""
    words = shlex.split(line)
    words[:1] = ["-c", COMMAND] if words[0] == "floatline" else []
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # as where it is activated
    return run_preloaded(words, cwd=ROOT, env={**os.environ, "PATH": path, "COLUMNS": "100"})


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_block_runs(code, tmp_path):
    run = run_python(code, tmp_path)
    assert run.returncode == 0, run.stderr


def read_console(text: str) -> list[tuple[str, list[str]]]:
    """Each command of a console block, and the lines that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def mask(line: str) -> str:
    """A line without what varies from run to run and from machine to machine: numbers, bars, and how lines are cut."""
    line = re.sub(r"[\u2580-\u259f\u2500-\u257f\u2800-\u28ff]+", "", line)
    return " ".join(re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?(\^[-\d]+)?", "0", line).split())


def find_missing(shown: list[str], printed: str) -> list[str]:
    """Lines of a page that the command does not print in their order, however it breaks them; an ellipsis cuts one."""
    text = " ".join(mask(line) for line in printed.splitlines())
    missing, at = [], 0
    for line in shown:
        words = mask(line.partition("…")[0])
        found = text.find(words, at)
        missing += [line] if found < 0 else []
        at = at if found < 0 else found + len(words)
    return missing


def remove_new(before: set[Path], named: list[str]) -> None:
    """Remove folders that a command was told to write to, and made."""
    for path in set(ROOT.iterdir()) - before:
        if path.name in named:
            shutil.rmtree(path)


@pytest.mark.parametrize("text", blocks("console"))
def test_the_commands_of_the_console_block_print_what_the_page_shows(text, tmp_path, request):
    commands = read_console(text)
    assert commands
    before = set(ROOT.iterdir())
    request.addfinalizer(lambda: remove_new(before, [word for line, _ in commands for word in line.split()]))
    for line, shown in commands:
        if line.split()[0] not in ("floatline", "python"):
            pytest.skip(f"{line.split()[0]} is not run by the tests")
        if "--as cuda" in line and torch.cuda.is_available():
            pytest.skip("the page shows a machine without a GPU")
        run = run_command(line, tmp_path)
        assert run.returncode in (0, 1), f"{line}\n{run.stderr}"
        missing = find_missing(shown, run.stdout + run.stderr)
        assert not missing, f"{line} does not print {missing}, but\n{run.stdout}{run.stderr}"


def test_a_line_that_is_not_printed_would_be_found():
    printed = "found 3 things in 1.25 s\nfirst\nsecond\n"
    assert find_missing(["found 8 things in 2.5 s", "second"], printed) == []
    assert find_missing(["found 3 thongs in 1.25 s"], printed) == ["found 3 thongs in 1.25 s"]
    assert find_missing(["second", "first"], printed) == ["first"]
    assert find_missing(["found …", "…", "second"], printed) == []


def test_a_block_that_fails_would_be_found(tmp_path):
    assert run_python("import floatline\nfloatline.no_such_name", tmp_path).returncode == 1
    assert run_command("floatline doctor --on no-such-device", tmp_path).returncode == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_of_the_project_leads_somewhere(page):
    text = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))  # code may look like a link
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
