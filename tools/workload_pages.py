"""Writes down what the pages of the reference workloads say of runs and settings.

Each `floatline diagnose` on a page is run, and its table of settings is made from the workload's own. A
`floatline rescue` takes minutes, and is run where it is asked for.

python tools/workload_pages.py                    every page of docs/workloads
python tools/workload_pages.py mmgcn              one page
python tools/workload_pages.py mmgcn --rescues    with its rescues
python tools/workload_pages.py --settings         the tables alone, which takes seconds
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from floatline.workload import WorkloadConfig

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "workloads"
_BLOCK = re.compile(
    r"^```(?:text|console)\n\$ (floatline (diagnose|rescue|train) [^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL
)
# What follows the findings: a chart of exponents, whose bars are for a terminal.
_CHART = "\nThe step in "
_PLACE = re.compile(r"^  where  (\S+):(\d+)[^\n]*\n +(\d+) \| ([^\n]*)$", re.MULTILINE)
_ALSO = re.compile(r"^  \d+\. \S+  (\S+:\d+) in |^  \d+\. \S+  (\S+:\d+), ", re.MULTILINE)
_FOUND = re.compile(r"^  found  (.*)$", re.MULTILINE)
_LINE = re.compile(r"[\w/]+\.py:\d+")
_MORE = "…\n"  # what is printed below it is not shown
_TABLE = re.compile(r"(<!-- Settings: made by tools/workload_pages.py -->\n).*?(\n<!-- End of settings -->)", re.DOTALL)
_ARGUMENT = re.compile(r"^ {8}(\w+): (.*?)(?=^ {8}\w+: |\Z)", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?(\^[-\d]+)?")
_AGAIN = re.compile(rf"({_LINE.pattern})|{_NUMBER.pattern}")
# A study of 800 steps, on a GPU.
LONGEST = "rescue dbnet:"


def read_blocks(page: str, verb: str = "diagnose") -> list[tuple[str, str]]:
    """Each command of this kind on a page, and what is shown below it; a list of commands shows nothing."""
    return [(found[1], found[3]) for found in _BLOCK.finditer(page) if found[2] == verb and found[3][:2] != "$ "]


def run_command(command: str) -> str:
    """What the command prints today, up to the chart; a rescue begins again, in a folder that is left out of it."""
    words = [sys.executable, "-m", "floatline", *shlex.split(command)[1:]]
    with tempfile.TemporaryDirectory() as folder:
        if words[3] == "rescue":
            shown = words[words.index("--folder") + 1] if "--folder" in words else f"floatline-runs/rescue/{words[4]}"
            words += ["--folder", folder]
        run = subprocess.run(
            words, cwd=ROOT, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, check=False
        )
    if run.returncode not in (0, 1):
        raise SystemExit(f"{command}: {run.stderr}")
    said = name_environment(run.stdout.partition(_CHART)[0].rstrip() + "\n")
    return said.replace(folder, shown.replace(":", "_")) if words[3] == "rescue" else said


def name_environment(said: str) -> str:
    """What was printed, with the environment's folder as it is named where it lies in the project."""
    return said.replace(f"{sys.prefix}/", ".venv/")


def fill(page: str, verb: str = "diagnose") -> str:
    """The page, with what its commands of this kind print today."""
    for command, shown in read_blocks(page, verb):
        if LONGEST not in command:
            page = page.replace(f"$ {command}\n{shown}", f"$ {command}\n{cut_as(shown, run_command(command))}")
    return page


def cut_as(shown: str, printed: str) -> str:
    """What was printed, up to the last line of the kind that a page shows before it leaves out the rest."""
    if not shown.endswith(_MORE):
        return printed
    label = shown.splitlines()[-2][:9]
    lines = printed.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith(label))
    return "\n".join(lines[: last + 1]) + "\n" + _MORE


def fill_settings(page: str, name: str) -> str:
    """The page, with a row for each setting that its workload has today."""
    config = importlib.import_module(f"floatline.systems.{name}").Config
    return _TABLE.sub(lambda found: f"{found[1]}\n{make_table(config)}{found[2]}", page)


def make_table(config: type[WorkloadConfig]) -> str:
    """Every setting: its name, what the docstring of the settings says of it, and what it is by default."""
    said = {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(config.__doc__ or "")}
    rows = ["| setting | meaning | default |", "|---|---|---|"]
    for name, field in config.model_fields.items():
        default = field.get_default(call_default_factory=True)
        rows.append(f"| `{name}` | {said[name]} | `{show_value(default)}` |")
    return "\n".join(rows) + "\n"


def show_value(value: Any) -> str:
    """A value as it is written in a YAML file."""
    plain = (
        value.model_dump(exclude_none=True)
        if isinstance(value, BaseModel)
        else list(value)
        if isinstance(value, tuple)
        else value
    )
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def comparable(text: str) -> str:
    """What is shown without what differs from machine to machine; places and their lines of code are kept whole."""
    placed = {line for found in _PLACE.finditer(text) for line in found[0].splitlines()}
    lines = [line if line in placed else _AGAIN.sub(lambda one: one[1] or "0", line) for line in text.splitlines()]
    return " ".join(" ".join(lines).split())


def find_moved(page: str) -> Iterator[str]:
    """Places on a page whose line of code is not, or no longer, the one that the source has there."""
    for found in _PLACE.finditer(page):
        file, line, shown, code = ROOT / found[1], int(found[2]), int(found[3]), found[4]
        if not file.is_file():
            continue  # in another package
        source = file.read_text(encoding="utf-8").splitlines()
        if line != shown or line > len(source) or source[line - 1].strip() != code.strip():
            yield f"{found[1]}:{line} shows {shown} | {code}"


def find_strays(page: str) -> list[str]:
    """Lines that a rescue on a page names and no diagnosis on it: one of them is older than the source.

    What a rescue found has to have its line, in full.
    """
    places = [found[1] + ":" + found[2] for found in _PLACE.finditer(page)]
    places += [first or second for first, second in _ALSO.findall(page)]
    known = {Path(place).name for place in places}
    strays = list[str]()
    for _, shown in read_blocks(page, "rescue"):
        strays += [found for found in _FOUND.findall(shown) if not _LINE.search(found)]
        strays += [line for line in _LINE.findall(shown) if Path(line).name not in known]
    return strays


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if not word.startswith("--")]
    for name in names or sorted(path.stem for path in PAGES.glob("*.md")):
        path = PAGES / f"{name}.md"
        text = path.read_text(encoding="utf-8")
        text = fill_settings(text, name) if _TABLE.search(text) else text
        text = text if "--settings" in sys.argv else fill(text)
        path.write_text(fill(text, "rescue") if "--rescues" in sys.argv else text, encoding="utf-8")
