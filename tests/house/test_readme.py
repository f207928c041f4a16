"""The README is short, true where it can be checked, and its links and pictures lead somewhere from any place."""

import re
from pathlib import Path

import pytest
from tests.preloaded import run_preloaded
from tools.site_pages import find_anchors, find_links

from floatline.cli.main import GROUPS
from floatline.lint.rules import RULES

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
RAW = HOME.replace("github.com", "raw.githubusercontent.com")
DIFFS = re.findall(r"^```diff\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def find_faults(text: str) -> list[str]:
    """Links that PyPI could not follow, or that lead nowhere in this tree."""
    faults: list[str] = []
    for link in find_links(text) + re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        place, _, anchor = link.partition("#")
        if place.startswith("https://img.shields.io/badge/"):
            continue
        if not place.startswith((f"{HOME}/blob/main/", f"{RAW}/main/")):
            faults.append(f"{link} is not an address of the project")
            continue
        path = ROOT / place.partition("/main/")[2]
        if not path.is_file():
            faults.append(f"{link} leads nowhere")
        elif anchor and anchor not in find_anchors(path.read_text(encoding="utf-8")):
            faults.append(f"{link} names no heading")
    return faults


def test_it_has_at_most_120_lines():
    assert len(README.splitlines()) <= 120


def test_every_link_and_picture_is_an_address_of_the_project_and_leads_somewhere():
    assert find_faults(README) == []


@pytest.mark.parametrize(
    "link", ["docs/index.md", f"{HOME}/blob/main/docs/no_such.md", f"{HOME}/blob/main/docs/index.md#no-such"]
)
def test_a_fault_of_a_link_is_found(link):
    assert len(find_faults(f"[text]({link})")) == 1


def test_the_commands_of_its_table_stand_in_the_groups_of_the_help():
    rows = re.findall(r"^\| (\w[\w ]*): [^|]*\| (`.*`) \|$", README, re.MULTILINE)
    assert len(rows) >= 4
    groups = {title.partition(":")[0].lower(): [f.__name__ for f in functions] for title, functions in GROUPS.items()}
    for name, commands in rows:
        assert set(re.findall(r"`(\w+)`", commands)) <= set(groups[name])


def test_the_first_thing_to_run_is_to_install_and_the_next_to_diagnose():
    commands = re.findall(r"^(?:\$ )?((?:pip|floatline|make) .*)", README, re.MULTILINE)
    assert [" ".join(line.split()[:2]) for line in commands[:3]] == ["pip install", "pip install", "floatline diagnose"]


def test_it_counts_the_rules_right():
    (number,) = re.findall(r"has (\d+) \[rules\]", README)
    assert int(number) == len(RULES)


def test_the_diffs_of_the_frameworks_are_those_of_their_pages():
    for diff, page in zip(DIFFS[:2], ("lightning", "transformers"), strict=True):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        changed = [line for line in diff.splitlines() if line.startswith(("+", "-"))]
        assert changed and all(line in text.splitlines() for line in changed)
    counts = [(diff.count("\n+"), diff.count("\n-")) for diff in DIFFS[:2]]
    assert counts == [(3, 1), (2, 0)]


LOOP = """
import torch
import floatline as fl

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = [torch.randn(8, 4) for _ in range(5)]
compute_loss = lambda batch: model(batch).float().square().mean()
{after}
assert guard.summary().startswith("5 attempted, 5 applied"), guard.summary()
"""


def test_the_loop_of_ones_own_runs_as_its_diff_leaves_it(tmp_path):
    kept = [line[1:] for line in DIFFS[2].splitlines() if not line.startswith("-")]
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(after="\n".join(kept)).replace("fp16-mixed", "bf16-mixed"), encoding="utf-8")
    ran = run_preloaded([str(script)], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
