"""The house: imports point down only, and nowhere in a circle; names of modules in strings count as imports."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tests.slow import mostly_slow, slow

import floatline

ROOT = Path(floatline.__file__).parent
# From the top floor to the ground. A module may import from its own room and from any floor below.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"report", "systems"},
    {"integrations", "rescuing"},
    {"validation"},
    {"agreement", "diagnosis", "manifests", "training"},
    {"running"},
    {"checkup", "folding", "guard", "probe"},
    {"lint", "precision"},
    {"fixes", "optim", "workload"},
    {"findings", "ledger", "numerics", "plans"},
    {"base", "causes", "formats", "hardware"},
    {"errors"},
]
FLOOR = {room: height for height, floor in enumerate(FLOORS) for room in floor}
# Strings that point up, each for a reason: targets name the reference systems by where they lie; lint reads and fixes
# write code that imports from rooms above.
POINTING_UP = {
    "workload.target": {"systems"},
    "fixes.loops": {"optim"},
    "fixes.statements": {"guard"},
    "lint.reading.loop_events": {"guard"},
}
_NAMED = re.compile(r"floatline(?:\.\w+)+")


@cache
def imports_in(source: str) -> set[str]:
    """Dotted names under `floatline` that the source imports, for types too, or names in a string that is no prose."""
    tree, names = ast.parse(source), set[str]()
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            names |= {node.value.partition(":")[0].rstrip(".")} if _NAMED.match(node.value) else set()
    return {name.removeprefix("floatline.") for name in names if name.startswith("floatline.")}


def room(name: str) -> str:
    return name.split(".")[0]


def violations(sources: dict[str, str]) -> list[str]:
    """Imports that point up or sideways, each as `from -> to`."""
    found = []
    for module, source in sources.items():
        targets = {room(name) for name in imports_in(source)} & FLOOR.keys()
        for target in sorted(targets - {room(module)} - POINTING_UP.get(module, set())):
            found += [f"{module} -> {target}"] if FLOOR[target] <= FLOOR[room(module)] else []
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of things that need each other, or nothing."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            found = walk(target, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        found = walk(module, [])
        if found:
            return found
    return []


def modules_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Every module with those that it imports."""
    graph = {}
    for module, source in sources.items():
        homes = {home(name, sources) for name in imports_in(source)}
        graph[module] = {one for one in homes - {module, ""} if room(one) not in POINTING_UP.get(module, set())}
    return graph


def home(name: str, sources: dict[str, str]) -> str:
    """The module that a dotted name lives in: the longest one that it starts with."""
    while name and name not in sources:
        name = name.rpartition(".")[0]
    return name


def inside(folder: str, graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """What a folder holds, files and folders, with what of it each one needs: sub-rooms have floors as rooms do."""

    def part(module: str) -> str:
        return ".".join(module.split(".")[: folder.count(".") + 2])

    found: dict[str, set[str]] = {}
    for module, targets in graph.items():
        if module.startswith(f"{folder}."):
            parts = {part(target) for target in targets if target.startswith(f"{folder}.")}
            found.setdefault(part(module), set()).update(parts - {part(module)})
    return found


@cache
def own_sources() -> dict[str, str]:
    sources = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:  # the package itself loads its names lazily and may know everyone
            sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources


def own_folders() -> list[str]:
    return sorted({module.rpartition(".")[0] for module in own_sources()} - {""})


def test_imports_point_down_only():
    assert violations(own_sources()) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(modules_graph(own_sources())) == []


def test_what_a_folder_holds_is_not_needed_in_a_circle():
    graph = modules_graph(own_sources())
    assert [found for folder in own_folders() if (found := circle(inside(folder, graph)))] == []


def test_every_room_has_a_floor():
    assert {room(module) for module in own_sources()} == set(FLOOR)


def test_the_probe_does_not_know_the_guard():
    graph = modules_graph(own_sources())
    assert [m for m, found in graph.items() if room(m) == "probe" and any(room(one) == "guard" for one in found)] == []


def test_an_import_that_points_up_would_be_found():
    sources = {"formats": "def f():\n    from floatline.numerics import ranges", "numerics.ranges": ""}
    assert violations(sources) == ["formats -> numerics"]


def test_imports_for_types_and_names_in_strings_would_be_found():
    assert imports_in("if TYPE_CHECKING:\n    from floatline.cli import main") == {"cli.main"}
    assert imports_in("RUN = 'floatline.validation.study.commands:run_job'") == {"validation.study.commands"}
    assert imports_in("import_module(f'floatline.optim.kernels.{name}')") == {"optim.kernels"}
    assert imports_in('def f():\n    """floatline.cli is not imported."""') == set()


def test_a_circle_would_be_found():
    sources = {
        "numerics.a": "from floatline.numerics.b import x",
        "numerics.b": "import floatline.numerics.c",
        "numerics.c": "if TYPE_CHECKING:\n    from floatline.numerics import a",
    }
    assert circle(modules_graph(sources)) == ["numerics.a", "numerics.b", "numerics.c", "numerics.a"]


def test_a_circle_of_sub_rooms_would_be_found():
    sources = {
        "guard.step.a": "from floatline.guard.files.b import x",
        "guard.files.b": "",
        "guard.files.c": "from floatline.guard.step.d import x",
        "guard.step.d": "",
    }
    graph = modules_graph(sources)
    assert circle(graph) == []
    assert circle(inside("guard", graph)) == ["guard.files", "guard.step", "guard.files"]


@slow
@pytest.mark.parametrize(
    "package", mostly_slow(["lightning", "accelerate", "transformers", "ray", "wandb", "scipy"], every=3)
)
def test_optional_packages_stay_out_of_the_core(package):
    for module, source in own_sources().items():
        if room(module) in ("integrations", "systems", "validation"):
            continue
        assert package not in packages_in(source), module


@cache
def packages_in(source: str) -> set[str]:
    """The packages that a source imports; what stands in its strings is not imported."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_the_check_above_sees_every_import():
    assert packages_in("def f():\n    from ray.util import x\n    import wandb.sdk as w") == {"ray", "wandb"}
    assert packages_in("text = 'import ray'") == set()
