"""Writes down what the pages of the reference workloads say of runs and settings.

Each `floatline diagnose` on a page is run, and its table of settings is made from the workload's own.

python tools/workload_pages.py              every page of docs/workloads
python tools/workload_pages.py mmgcn        one page
python tools/workload_pages.py --settings   the tables alone, which takes seconds
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from floatline.workload import WorkloadConfig

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "workloads"
_BLOCK = re.compile(r"^```(?:text|console)\n\$ (floatline diagnose [^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What follows the findings: a chart of exponents, whose bars are for a terminal.
_CHART = "\nThe step in "
_PLACE = re.compile(r"^  where  (\S+):(\d+)[^\n]*\n +(\d+) \| ([^\n]*)$", re.MULTILINE)
_FOUND = re.compile(r"^  found  [^\n]*, at (\S+\.py:\d+)$", re.MULTILINE)
_TABLE = re.compile(r"(<!-- Settings: made by tools/workload_pages.py -->\n).*?(\n<!-- End of settings -->)", re.DOTALL)
_ARGUMENT = re.compile(r"^ {8}(\w+): (.*?)(?=^ {8}\w+: |\Z)", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?(\^[-\d]+)?")


def read_blocks(page: str) -> list[tuple[str, str]]:
    """Each command on a page, and what is shown below it."""
    return [(found[1], found[2]) for found in _BLOCK.finditer(page)]


def run_command(command: str) -> str:
    """What the command prints today, up to the chart."""
    words = [sys.executable, "-m", "floatline", *shlex.split(command)[1:]]
    run = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, check=False
    )
    if run.returncode not in (0, 1):
        raise SystemExit(f"{command}: {run.stderr}")
    return run.stdout.partition(_CHART)[0].rstrip() + "\n"


def fill(page: str) -> str:
    """The page, with what its commands print today."""
    for command, shown in read_blocks(page):
        page = page.replace(f"$ {command}\n{shown}", f"$ {command}\n{run_command(command)}")
    return page


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
    lines = [line if line in placed else _NUMBER.sub("0", line) for line in text.splitlines()]
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
    """Places that a rescue on a page found, and no diagnosis on it: one of them is older than the source."""
    known = {f"{Path(found[1]).name}:{found[2]}" for found in _PLACE.finditer(page)}
    return [place for place in _FOUND.findall(page) if place not in known]


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word != "--settings"]
    for name in names or sorted(path.stem for path in PAGES.glob("*.md")):
        path = PAGES / f"{name}.md"
        text = path.read_text(encoding="utf-8")
        text = fill_settings(text, name) if _TABLE.search(text) else text
        path.write_text(text if "--settings" in sys.argv else fill(text), encoding="utf-8")
