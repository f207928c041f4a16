"""A class is its own: other files assign to a few of its attributes only."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.slow import slow

import floatline

ROOT = Path(floatline.__file__).parent
MOST_ASSIGNED = 12


def assigned(sources: dict[str, str]) -> dict[str, set[str]]:
    """For each class, its attributes that another file assigns, by name: what a name is of, a reader cannot tell."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    foreign: dict[str, set[str]] = defaultdict(set)  # the files that assign to an attribute of something else
    for file, tree in trees.items():
        for target in _targets(tree):
            if not _is_own(target):
                foreign[target.attr].add(file)
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name] = {name for name in _attributes(node) if foreign.get(name, set()) - {file}}
    return found


def _targets(tree: ast.AST) -> list[ast.Attribute]:
    """What is assigned as `something.attribute = …`, augmented, annotated, in a tuple or deleted."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, (ast.Store, ast.Del))]


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def _attributes(node: ast.ClassDef) -> set[str]:
    """The fields of a class, and what its methods assign to `self`."""
    fields = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    return fields | {target.attr for target in _targets(node) if _is_own(target)}


@slow
def test_no_class_has_many_attributes_that_other_files_assign():
    sources = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in ROOT.rglob("*.py")}
    found = assigned(sources)
    assert len(found) > 500
    assert {name: sorted(attributes) for name, attributes in found.items() if len(attributes) > MOST_ASSIGNED} == {}


def test_such_a_class_would_be_found():
    names = [f"part_{i}" for i in range(MOST_ASSIGNED + 1)]
    fields = "".join(f"        self.{name} = 0\n" for name in names)
    sources = {
        "watch.py": f"class Watch:\n    def __init__(self):\n{fields}    def f(self):\n        self.own = 1\n",
        "calls.py": "".join(f"seen.{name} {'+=' if i % 2 else '='} 1\n" for i, name in enumerate(names)),
        "other.py": "class Other:\n    def f(self):\n        self.own, self.seen.own_too = 1, 2\n",
    }
    assert assigned(sources) == {"Watch": set(names), "Other": set()}


def test_every_way_to_assign_is_seen():
    sources = {
        "a.py": "class A:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n",
        "b.py": "x.a = 1\nx.y.b += 1\nx.c, z = 1, 2\nwith f() as x.d:\n    pass\nx.e[0] = 1\n",
    }
    assert assigned(sources) == {"A": {"a", "b", "c", "d"}}
