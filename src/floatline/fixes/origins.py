"""Where the names of a statement come from: through assignments, casts, loops, `self`, and the arguments of calls."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from floatline.fixes.operations import read_number
from floatline.fixes.scope import LinePlace

# Methods that change what they are called on: the statement makes its name.
_CHANGING = frozenset("half bfloat16 float to type data".split())  # noqa: SIM905
_Name = tuple[int, str]  # the function it belongs to, by identity, and its text


@dataclass
class _Statement:
    place: LinePlace
    home: cst.ClassDef | None
    made: set[str]
    used: set[str]


@dataclass
class _File:
    """The statements, loops, functions and calls of a file, each with the function that it stands in."""

    statements: list[_Statement] = field(default_factory=list["_Statement"])
    loops: list[tuple[cst.CSTNode, set[str], set[str]]] = field(
        default_factory=list[tuple[cst.CSTNode, set[str], set[str]]]
    )
    calls: list[tuple[cst.CSTNode, cst.Call]] = field(default_factory=list[tuple[cst.CSTNode, cst.Call]])
    homes: dict[int, cst.ClassDef | None] = field(default_factory=dict[int, "cst.ClassDef | None"])
    outer: dict[int, cst.CSTNode] = field(default_factory=dict[int, cst.CSTNode])


def find_origins(module: cst.Module, start: LinePlace) -> list[LinePlace]:
    """The statements that the names of a statement come from, the nearest first.

    Args:
        module: The file.
        start: The statement.
    """
    file = _read(module)
    found: list[LinePlace] = []
    left = deque((start.around, name) for name in sorted(names_used(start.line)))
    seen: set[_Name] = set()
    while left:
        around, name = left.popleft()
        if (id(around), name) in seen:
            continue
        seen.add((id(around), name))
        for one in _makers(file, around, name):
            if one.place.line is not start.line and one.place not in found:
                found.append(one.place)
            left.extend((one.place.around, used) for used in sorted(one.used))
        for where, targets, over in file.loops:
            left.extend((around, used) for used in sorted(over) if where is around and name in targets)
        left.extend(_given(file, around, name))
    return found


def names_used(node: cst.CSTNode) -> set[str]:
    """The names that stand in a node, attributes of self as `self.x`, without what is behind another dot."""
    found: set[str] = set()
    for one in m.findall(node, m.Attribute()):
        attribute = cst.ensure_type(one, cst.Attribute)
        if isinstance(attribute.value, cst.Name) and attribute.value.value == "self":
            found.add(f"self.{attribute.attr.value}")
    behind = [cst.ensure_type(one, cst.Attribute).attr for one in m.findall(node, m.Attribute())]
    words = [cst.ensure_type(one, cst.Arg).keyword for one in m.findall(node, m.Arg(keyword=m.Name()))]
    hidden = {id(one) for one in (*behind, *words)}
    names = {cst.ensure_type(one, cst.Name) for one in m.findall(node, m.Name())}
    return found | {one.value for one in names if id(one) not in hidden and one.value != "self"}


def find_numbers(module: cst.Module, place: LinePlace) -> dict[str, float]:
    """What names stand for that are given one number and nothing else: of the file, defaults, and attributes of self.

    Args:
        module: The file.
        place: A statement that may use them.
    """
    file = _read(module)
    home = file.homes.get(id(place.around))
    given: dict[str, list[float | None]] = {}
    for one in file.statements:
        is_own = one.place.around in (module, place.around) or (home is not None and one.home is home)
        for part in one.place.line.body if is_own else ():
            if isinstance(part, cst.Assign):
                for target in part.targets:
                    for name in names_used(target.target):
                        given.setdefault(name, []).append(read_number(part.value))
            elif isinstance(part, (cst.AnnAssign, cst.AugAssign)):
                for name in names_used(part.target):
                    number = None if part.value is None or isinstance(part, cst.AugAssign) else read_number(part.value)
                    given.setdefault(name, []).append(number)
    functions = [place.around]
    functions += m.findall(home, m.FunctionDef(m.Name("__init__"))) if home is not None else ()
    defaults = {name: number for one in functions for name, number in _defaults(one).items()}
    found = {name: values[0] for name, values in given.items() if len(values) == 1 and values[0] is not None}
    passed = {f"self.{name}": number for name, number in defaults.items() if _keeps(file, home, name)}
    own = _defaults(place.around)
    return {**found, **passed, **{name: number for name, number in own.items() if name not in given}}


def _defaults(function: cst.CSTNode) -> dict[str, float]:
    """Parameters whose default is a number."""
    if not isinstance(function, cst.FunctionDef):
        return {}
    every = [*function.params.posonly_params, *function.params.params, *function.params.kwonly_params]
    numbers = {one.name.value: read_number(one.default) for one in every if one.default is not None}
    return {name: number for name, number in numbers.items() if number is not None}


def _keeps(file: _File, home: cst.ClassDef | None, name: str) -> bool:
    """Whether the class keeps a parameter as an attribute of the same name, and never changes it."""
    lines = [one for one in file.statements if home is not None and one.home is home and f"self.{name}" in one.made]
    return len(lines) == 1 and name in lines[0].used


def _makers(file: _File, around: cst.CSTNode, name: str) -> list[_Statement]:
    """The statements that make a name of a function, the last one first; else those of what is around it."""
    if name.startswith("self."):
        home = file.homes.get(id(around))
        return [one for one in reversed(file.statements) if home is not None and one.home is home and name in one.made]
    own = [one for one in reversed(file.statements) if one.place.around is around and name in one.made]
    above = file.outer.get(id(around))
    is_given = isinstance(around, cst.FunctionDef) and name in _parameters(around)
    return own if own or is_given or above is None else _makers(file, above, name)


def _given(file: _File, around: cst.CSTNode, name: str) -> list[tuple[cst.CSTNode, str]]:
    """For a parameter: the names in what callers of this file give."""
    if not isinstance(around, cst.FunctionDef) or name not in (known := _parameters(around)):
        return []
    home = file.homes.get(id(around))
    called = home.name.value if home is not None and around.name.value == "__init__" else around.name.value
    places = known[1:] if home is not None else known
    found: list[tuple[cst.CSTNode, str]] = []
    for where, call in file.calls:
        last = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
        if not isinstance(last, cst.Name) or last.value != called:
            continue
        plain = [arg for arg in call.args if arg.keyword is None and not arg.star]
        words = {arg.keyword.value: arg for arg in call.args if arg.keyword is not None}
        arg = words.get(name) or (plain[places.index(name)] if places.index(name) < len(plain) else None)
        if arg is not None:
            found += [(where, used) for used in sorted(names_used(arg.value))]
    return found


def _parameters(function: cst.FunctionDef) -> list[str]:
    own = function.params
    return [one.name.value for one in (*own.posonly_params, *own.params, *own.kwonly_params)]


def _read(module: cst.Module) -> _File:
    reader = _ReadFile()
    module.visit(reader)
    return reader.file


class _ReadFile(cst.CSTVisitor):
    def __init__(self) -> None:
        self.file = _File()
        self._around: list[cst.CSTNode] = []
        self._homes: list[cst.ClassDef | None] = [None]

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        self._around.append(node)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        self._homes.append(node)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:  # noqa: N802
        del original_node
        self._homes.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self.file.outer[id(node)] = self._around[-1]
        self.file.homes[id(node)] = self._homes[-1]
        self._around.append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:  # noqa: N802
        del original_node
        self._around.pop()

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        self.file.loops.append((self._around[-1], names_used(node.target), names_used(node.iter)))

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        self.file.calls.append((self._around[-1], node))

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:  # noqa: N802
        made: set[str] = set()
        for part in node.body:
            if isinstance(part, cst.Assign):
                made |= {name for target in part.targets for name in names_used(target.target)}
            elif isinstance(part, (cst.AnnAssign, cst.AugAssign)):
                made |= names_used(part.target)
            elif isinstance(part, cst.Expr) and isinstance(part.value, cst.Call):
                made |= _changed_by(part.value)
        place = LinePlace(node, self._around[-1])
        self.file.statements.append(_Statement(place, self._homes[-1], made, names_used(node)))


def _changed_by(call: cst.Call) -> set[str]:
    """model of `model.half()` and `model.to(dtype)` as statements of their own."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in _CHANGING:
        return set()
    return names_used(call.func.value)
