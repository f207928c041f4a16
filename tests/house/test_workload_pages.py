"""The pages of the reference workloads show what `floatline diagnose` and `train` say today, and every setting."""

import importlib
import re
import shlex
import sys

import pytest
from tests.house.test_docs import find_missing
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import mostly_slow
from tools import workload_pages

PAGES = sorted(path for path in workload_pages.PAGES.glob("*.md") if "diagnose" in path.read_text(encoding="utf-8"))
NAMES = ("audio_lora", "conditioned", "dbnet", "distill", "mmgcn")
COMMANDS = {
    command: shown for page in PAGES for command, shown in workload_pages.read_blocks(page.read_text(encoding="utf-8"))
}
TRAINED = {
    command: shown
    for page in PAGES
    for command, shown in workload_pages.read_blocks(page.read_text(encoding="utf-8"), "train")
    if shown
}
# Minutes on two cores: the whole model, at its full size.
LONG = ("dbnet:", "mmgcn:stagnating", "conditioned:overflow")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_place_on_a_page_shows_the_line_that_the_source_has(page):
    assert list(workload_pages.find_moved(page.read_text(encoding="utf-8"))) == []


def test_a_line_that_moved_would_be_found():
    page = next(page for page in PAGES if page.stem == "mmgcn").read_text(encoding="utf-8")
    assert "losses.py:48, LogBackward0\n         48 |" in page
    wrong = page.replace("losses.py:48, LogBackward0\n         48 |", "losses.py:47, LogBackward0\n         47 |")
    assert list(workload_pages.find_moved(wrong)) == [
        "src/floatline/systems/mmgcn/losses.py:47 shows 47 | "
        "return -torch.mean(torch.log(torch.sigmoid(difference) + 1e-8))"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_rescue_on_a_page_found_what_a_diagnosis_on_it_shows(page):
    assert workload_pages.find_strays(page.read_text(encoding="utf-8")) == []


def test_a_rescue_at_another_line_would_be_found():
    page = next(page for page in PAGES if page.stem == "mmgcn").read_text(encoding="utf-8")
    wrong = page.replace("singular point, at losses.py:35", "").replace(
        "zero, at losses.py:48", "zero, at losses.py:47"
    )
    assert wrong != page
    assert workload_pages.find_strays(wrong) == ["losses.py:47"]
    tried = page.replace("tried  losses.py:48 in FP32: trains", "tried  losses.py:46 in FP32: trains")
    assert tried != page and workload_pages.find_strays(tried) == ["losses.py:46"]


def test_a_rescue_whose_line_is_cut_would_be_found():
    page = (workload_pages.PAGES / "audio_lora.md").read_text(encoding="utf-8")
    cut = page.replace("A loss scaler meets FP16 parameters, at model.py:87", "A loss scaler meets FP16 parameters, …")
    assert workload_pages.find_strays(cut) == ["fp16-params-with-scaler: A loss scaler meets FP16 parameters, …"]


def test_a_rescue_is_shown_up_to_where_the_page_leaves_off():
    printed = "rescued  As FP32.\n  found  a\n  tried  b\n  tried  c\n  code   d\n  plan   e\n"
    assert (
        workload_pages.cut_as("rescued\n  found  a\n  tried  b\n…\n", printed) == printed.partition("  code")[0] + "…\n"
    )
    assert workload_pages.cut_as("rescued\n  plan   e\n", printed) == printed


def test_no_page_names_a_folder_of_the_machine_that_made_it():
    place = f"  where  {sys.prefix}/lib/scatter.py:70, aten.add\n"
    assert workload_pages.name_environment(place) == "  where  .venv/lib/scatter.py:70, aten.add\n"
    places = re.compile(r"^  where  /", re.MULTILINE)
    assert places.search(place)
    assert [page.name for page in PAGES if places.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "command", mostly_slow([one for one in COMMANDS if not any(word in one for word in LONG)], every=100, rare=6)
)
def test_the_page_shows_what_diagnose_says_today(command):
    printed = workload_pages.run_command(command)
    assert workload_pages.comparable(COMMANDS[command]) == workload_pages.comparable(printed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [one for one in COMMANDS if any(word in one for word in LONG)])
def test_the_page_shows_what_a_long_diagnosis_says_today(command):
    printed = workload_pages.run_command(command)
    assert workload_pages.comparable(COMMANDS[command]) == workload_pages.comparable(printed)


@pytest.mark.parametrize("command", mostly_slow(TRAINED, every=4, rare=2))
def test_the_page_shows_what_a_training_prints_today(command, tmp_path):
    run = run_preloaded(["-c", COMMAND, *shlex.split(command)[1:]], cwd=tmp_path)
    assert find_missing(TRAINED[command].splitlines(), run.stdout + run.stderr) == []


def test_a_training_whose_folder_or_events_are_others_would_be_found():
    printed = next(shown for command, shown in TRAINED.items() if "conditioned:overflow" in command)
    for now, then in (("runs/conditioned-overflow", "runs/conditioned_overflow"), ("last event: note", "no events")):
        assert find_missing(printed.replace(now, then).splitlines(), printed)


def test_another_place_is_another_answer_and_another_time_is_none():
    shown = next(shown for command, shown in COMMANDS.items() if "mmgcn:eps" in command)
    assert workload_pages.comparable(shown.replace(":48", ":49")) != workload_pages.comparable(shown)
    assert workload_pages.comparable(shown.replace(" s; a", "1 s; a")) == workload_pages.comparable(shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_every_setting_with_its_default(name):
    page = (workload_pages.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert workload_pages.fill_settings(page, name) == page
    for setting in importlib.import_module(f"floatline.systems.{name}").Config.model_fields:
        assert f"| `{setting}` |" in page


@pytest.mark.parametrize(("name", "count"), [("audio_lora", 1), ("distill", 1), ("mmgcn", 4)])
def test_a_page_has_the_tables_of_its_remedies_as_the_benchmark_made_them(name, count):
    page = (workload_pages.PAGES / f"{name}.md").read_text(encoding="utf-8")
    made = (workload_pages.ROOT / f"benchmarks/results/{name}_remedies_cpu.md").read_text(encoding="utf-8")
    tables = [part.strip() for part in made.split("\n\n") if part.startswith("|")]
    assert len(tables) == count
    for table in tables:
        row = table.splitlines()[-1]
        assert table in page and table not in page.replace(row, row.replace("|", "| 1", 1))


def test_the_page_of_dbnet_has_the_tables_that_its_benchmark_made():
    page = (workload_pages.PAGES / "dbnet.md").read_text(encoding="utf-8")
    made = (workload_pages.ROOT / "benchmarks/results/dbnet_formats_cpu.md").read_text(encoding="utf-8")
    shown = page.partition("made by benchmarks/dbnet_formats.py -->")[2].partition("<!-- End of formats -->")[0]
    assert shown.strip() == made.partition("\n")[2].strip()
    assert shown.replace("0.482", "0.483").strip() != made.partition("\n")[2].strip()


def test_a_default_that_was_changed_would_be_found():
    page = (workload_pages.PAGES / "mmgcn.md").read_text(encoding="utf-8")
    wrong = page.replace("| `0.005` |", "| `0.004` |")
    assert wrong != page
    assert workload_pages.fill_settings(wrong, "mmgcn") == page
