"""The rooms: how many files a folder holds, names that mean one thing, tests where the code is, docs at the door."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.slow import slow
from tools import rooms

import floatline

ROOT = Path(floatline.__file__).parent
PROJECT = Path(__file__).parents[2]
MOST_FILES = 16
# One file is one rule, or one command.
LONG_LISTS = ("lint/rules", "cli")
# Folders of tests that belong to no room: the project itself, attacks, and the cases and scripts that are tried.
OF_NO_ROOM = {"house", "hostile", "cases", "scripts", "plants", "data"}
# What stands beside the tests of a room for them to read.
MATERIAL = {"diagnosis/targets", "diagnosis/loops", "manifests/traps"}


def too_full(counts: dict[str, int]) -> dict[str, int]:
    """Folders that hold more files than someone new can take in."""
    return {name: n for name, n in counts.items() if n > MOST_FILES and not name.startswith(LONG_LISTS)}


def count_files(root: Path) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for path in root.rglob("*.py"):
        counts[path.parent.relative_to(root).as_posix()] += 1
    return counts


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Names of classes that several files define."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file)
    return {name: sorted(files) for name, files in homes.items() if len(files) > 1}


def deep_imports(text: str, rooms: set[str]) -> list[str]:
    """Modules below a room that a page or an example imports from."""
    named = re.findall(r"^ *(?:>>> )?(?:from|import) floatline\.([\w.]+)", text, flags=re.MULTILINE)
    return [name for name in named if name not in rooms]


def own_rooms() -> set[str]:
    """What may be imported from: files at the top, rooms, frameworks, the reference systems."""
    tops = {path.stem for path in ROOT.glob("[!_]*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    inner = {f"{top}.{path.stem}" for top in ("integrations", "systems") for path in (ROOT / top).glob("[!_]*")}
    return tops | inner


def test_no_folder_is_too_full():
    assert too_full(count_files(ROOT)) == {}


def test_a_folder_that_is_too_full_would_be_found():
    assert too_full({"probe": 17, "lint/rules/loop": 30, "guard": 16}) == {"probe": 17}


@slow
def test_no_two_classes_share_a_name():
    paths = [path for path in ROOT.rglob("*.py") if not {"integrations", "rules"} & set(path.relative_to(ROOT).parts)]
    shared = shared_names({path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths})
    assert {file.split("/")[0] for file in shared.pop("Config")} == {"systems"}  # where a target looks for its settings
    assert shared == {}


def test_a_shared_name_would_be_found():
    assert shared_names({"a.py": "class Place: ...", "b.py": "def f():\n    class Place: ..."}) == {
        "Place": ["a.py", "b.py"]
    }


def test_the_tests_lie_where_the_code_does():
    folders = {path.parent.relative_to(PROJECT / "tests").as_posix() for path in (PROJECT / "tests").rglob("*.py")}
    own = {folder for folder in folders if folder.split("/")[0] not in OF_NO_ROOM and folder != "."}
    assert {folder for folder in own if not (ROOT / folder).is_dir()} == MATERIAL


def test_every_room_has_tests():
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {room for room in rooms if not any((PROJECT / "tests" / room).rglob("test_*.py"))} == set()


def test_pages_and_examples_import_from_the_top_or_from_a_room():
    pages = [*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md"), *(PROJECT / "examples").rglob("*.py")]
    found = {page.relative_to(PROJECT).as_posix(): deep_imports(page.read_text("utf-8"), own_rooms()) for page in pages}
    assert {page: names for page, names in found.items() if names} == {}


def test_an_import_from_inside_a_room_would_be_found():
    text = "    from floatline.guard.policy import Policy\nimport floatline.guard\nfrom floatline import Plan\n"
    assert deep_imports(text, {"guard"}) == ["guard.policy"]


def test_the_table_of_rooms_is_up_to_date():
    page = (PROJECT / "CONTRIBUTING.md").read_text("utf-8")
    assert rooms.fill(page) == page


def test_a_room_that_is_not_in_the_table_would_be_found():
    page = (PROJECT / "CONTRIBUTING.md").read_text("utf-8")
    assert rooms.fill(page.replace("| `guard/step/` |", "| `guard/stop/` |")) == page
