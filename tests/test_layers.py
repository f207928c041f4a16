"""The house: imports point down only, and nowhere in a circle."""

import ast
from pathlib import Path

import pytest
from tests.slow import mostly_slow

import floatline

ROOT = Path(floatline.__file__).parent
# From the top floor to the ground. A module may import from its own floor's room and from any floor below.
FLOORS = [
    {"cli"},
    {"workloads"},
    {"integrations"},
    {"report"},
    {"salvage"},
    {"validate"},
    {"diagnosis"},
    {"checkup", "training"},
    {"choose"},
    {"probe"},
    {"guard"},
    {"ledger", "lint", "optim", "rewrites"},
    {"hardware", "parameters", "workload"},
    {"numerics", "presets"},
    {"fixes", "plan"},
    {"findings"},
    {"causes", "formats"},
    {"errors", "private_names", "whole_files"},
]
FLOOR = {room: height for height, floor in enumerate(FLOORS) for room in floor}


def imports_in(source: str) -> set[str]:
    """Dotted names under `floatline` that run-time imports of the source name, wherever they stand."""
    names: set[str] = set()
    for node in _run_time(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("floatline.") for name in names if name.startswith("floatline.")}


def _run_time(node: ast.AST):
    """Every node except those under `if TYPE_CHECKING:`, which no run ever reaches."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_time(child)


def room(name: str) -> str:
    return name.split(".")[0]


def violations(sources: dict[str, str]) -> list[str]:
    """Imports that point up or sideways, each as `from -> to`."""
    found = []
    for module, source in sources.items():
        for target in sorted({room(name) for name in imports_in(source)} - {room(module)}):
            if target == "__version__":
                continue
            if FLOOR[target] <= FLOOR[room(module)]:
                found.append(f"{module} -> {target}")
    return found


def circle(sources: dict[str, str]) -> list[str]:
    """One circle of modules that import each other, or nothing."""
    graph = {}
    for module, source in sources.items():
        homes = {home(name, sources) for name in imports_in(source)}
        graph[module] = homes - {module, ""}
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph[module]):
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


def home(name: str, sources: dict[str, str]) -> str:
    """The module that a dotted name lives in: the longest one that it starts with."""
    while name and name not in sources:
        name = name.rpartition(".")[0]
    return name


def own_sources() -> dict[str, str]:
    sources = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:  # the package itself loads its names lazily and may know everyone
            sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources


def test_imports_point_down_only():
    assert violations(own_sources()) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(own_sources()) == []


def test_every_room_has_a_floor():
    assert {room(module) for module in own_sources()} == set(FLOOR)


def test_an_import_that_points_up_would_be_found():
    sources = {"formats": "def f():\n    from floatline.numerics import ranges", "numerics.ranges": ""}
    assert violations(sources) == ["formats -> numerics"]


def test_a_circle_would_be_found():
    sources = {
        "numerics.a": "from floatline.numerics.b import x",
        "numerics.b": "import floatline.numerics.c",
        "numerics.c": "from floatline.numerics import a",
    }
    assert circle(sources) == ["numerics.a", "numerics.b", "numerics.c", "numerics.a"]


def test_type_checking_imports_do_not_count():
    source = "if TYPE_CHECKING:\n    from floatline.cli import main"
    assert imports_in(source) == set()


@pytest.mark.parametrize(
    "package", mostly_slow(["lightning", "accelerate", "transformers", "ray", "wandb", "scipy"], every=3)
)
def test_optional_packages_stay_out_of_the_core(package):
    for module, source in own_sources().items():
        if room(module) in ("integrations", "workloads", "validate"):
            continue
        assert package not in packages_in(source), module


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
