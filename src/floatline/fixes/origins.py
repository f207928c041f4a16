"""Where the names of a statement come from: through assignments, casts, loops, `self`, and the arguments of calls."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from floatline.fixes.names import Names
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


_LARGEST = {"torch.float16": 65504.0, "torch.half": 65504.0, "numpy.float16": 65504.0}
_INFINITE = ("math.inf", "torch.inf", "numpy.inf", "numpy.Inf", "numpy.infty", "numpy.PINF")
# Where a call takes the number that all it makes holds: `torch.full_like(x, -1e9)`.
_FILLED = {"tensor": 0, "as_tensor": 0, "scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 1, "new_tensor": 0}
_Value = tuple[cst.BaseExpression | None, cst.CSTNode]  # with the function that it is written in


class ConstantReader:
    """What constants at one place stand for, so that what takes their place has their sign.

    A name counts where everything that the file shows it to be given has one sign: assignments, defaults, and the
    arguments of calls. A parameter that the file itself never calls with anything may be given anything.

    Args:
        module: The file.
        around: The function around the place, or the module.
        names: The file's imports.
    """

    def __init__(self, module: cst.Module, around: cst.CSTNode, names: Names) -> None:
        self._module, self._around, self._names = module, around, names
        self._known: _File | None = None
        self._open: set[tuple[int, str]] = set()  # names that are being followed

    def read(self, node: cst.BaseExpression) -> float | None:
        """A number, infinite where only its sign is known; None where not even that is."""
        try:
            return self._read(node, self._around)
        except (OverflowError, ZeroDivisionError, ValueError):
            return None

    def _read(self, node: cst.BaseExpression, around: cst.CSTNode) -> float | None:
        if (number := read_number(node)) is not None:
            return number
        if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, (cst.Minus, cst.Plus)):
            inner = self._read(node.expression, around)
            return -inner if inner is not None and isinstance(node.operator, cst.Minus) else inner
        if isinstance(node, cst.BinaryOperation):
            return _compute(node.operator, self._read(node.left, around), self._read(node.right, around))
        if isinstance(node, cst.IfExp):
            return _agree([self._read(side, around) for side in (node.body, node.orelse)])
        if isinstance(node, cst.Call):
            return self._read_call(node, around)
        if isinstance(node, cst.Attribute):
            return self._read_attribute(node, around)
        if not isinstance(node, cst.Name):
            return None
        if self._names.resolve(node) in _INFINITE:
            return math.inf
        return self._follow(node.value, around, self._values(node.value, around))

    def _read_call(self, node: cst.Call, around: cst.CSTNode) -> float | None:
        """`float("-inf")`, and what one number fills."""
        plain = [arg.value for arg in node.args if arg.keyword is None and not arg.star]
        if m.matches(node.func, m.Name("float")) and len(plain) == 1:
            text = plain[0].evaluated_value if isinstance(plain[0], cst.SimpleString) else None
            return float(text) if isinstance(text, str) else self._read(plain[0], around)
        last = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        is_maker = self._names.resolve(node.func).startswith("torch.") or last.startswith("new_")
        if not is_maker or last not in _FILLED:
            return None
        named = next((arg.value for arg in node.args if m.matches(arg, m.Arg(keyword=m.Name("fill_value")))), None)
        given = plain[_FILLED[last]] if named is None and len(plain) > _FILLED[last] else named
        return None if given is None else self._read(given, around)

    def _read_attribute(self, node: cst.Attribute, around: cst.CSTNode) -> float | None:
        """`torch.finfo(dtype).min`, `math.inf`, `sys.float_info.max` and `self.fill`."""
        path = self._names.resolve(node)
        if path in _INFINITE or path in ("sys.float_info.max", "sys.maxsize"):
            return math.inf
        owner = node.value
        if isinstance(owner, cst.Name):
            made = self._values(owner.value, around)
            owner = made[0][0] if len(made) == 1 and made[0][0] is not None else owner
        if isinstance(owner, cst.Call) and self._names.resolve(owner.func).endswith((".finfo", ".iinfo")):
            dtype = self._names.resolve(owner.args[0].value) if owner.args else ""
            sign = {"max": 1.0, "min": -1.0}.get(node.attr.value)
            return None if sign is None else sign * _LARGEST.get(dtype, math.inf)
        if not m.matches(node.value, m.Name("self") | m.Name("cls")):
            return None
        return self._follow(f".{node.attr.value}", self._module, self._owned(node.attr.value))

    def _follow(self, name: str, around: cst.CSTNode, values: Sequence[_Value]) -> float | None:
        """What all values of a name agree on."""
        key = (id(around), name)
        if key in self._open:
            return None
        self._open.add(key)
        try:
            return _agree([None if value is None else self._read(value, where) for value, where in values])
        finally:
            self._open.discard(key)

    def _values(self, name: str, around: cst.CSTNode) -> list[_Value]:
        """All that a name is given where it belongs; None for what is not one expression."""
        if m.findall(self._module, m.NameItem(m.Name(name))):  # global, nonlocal
            return [(None, around)]
        found: list[_Value] = [(value, around) for value in _bound_in(around, name)]
        if isinstance(around, cst.FunctionDef) and name in _parameters(around):
            found += self._given(around, name)
        above = self._file.outer.get(id(around))
        return found if found or above is None else self._values(name, above)

    def _given(self, function: cst.FunctionDef, name: str) -> list[_Value]:
        """What the calls of a file give a parameter, and its default; None where others may call it."""
        home, outer = self._file.homes.get(id(function)), self._file.outer[id(function)]
        is_made = home is not None and function.name.value == "__init__"
        called = home.name.value if is_made and home is not None else function.name.value
        known = _parameters(function)
        skipped = 1 if home is not None and known[:1] in (["self"], ["cls"]) else 0
        every = [*function.params.posonly_params, *function.params.params, *function.params.kwonly_params]
        default = next(one.default for one in every if one.name.value == name)
        calls = [(where, one) for where, one in self._file.calls if _last_name(one.func) == called]
        mentions = m.findall(self._module, m.Name(called))
        is_open = len(mentions) != len(calls) + 1  # handed on, or the base of another class
        found: list[_Value] = [] if default is None else [(default, outer)]
        for where, one in calls:
            if any(arg.star for arg in one.args):
                return [(None, function)]
            words = {arg.keyword.value: arg.value for arg in one.args if arg.keyword is not None}
            plain, place = [arg.value for arg in one.args if arg.keyword is None], known.index(name) - skipped
            value = words.get(name) or (plain[place] if place < len(plain) else default)
            found.append((value, where if value is not default else outer))
        return found if calls and not is_open else [(None, function)]

    def _owned(self, name: str) -> list[_Value]:
        """All that an attribute of this name is given, by any object of the file, and by classes."""
        found: list[_Value] = []
        for one in self._file.statements:
            is_class = one.home is not self._file.homes.get(id(one.place.around))
            for part in one.place.line.body:
                if isinstance(part, cst.Assign):
                    for target, value in _pairs(part):
                        is_own = is_class and m.matches(target, m.Name(name))
                        if is_own or m.matches(target, m.Attribute(attr=m.Name(name))):
                            found.append((value, one.place.around))
                elif isinstance(part, (cst.AnnAssign, cst.AugAssign)) and _last_name(part.target) == name:
                    is_plain = isinstance(part, cst.AnnAssign) and not is_class  # in a class it may be a field
                    found.append((part.value if is_plain else None, one.place.around))
        return found

    @property
    def _file(self) -> _File:
        self._known = _read(self._module) if self._known is None else self._known
        return self._known


def _agree(numbers: Sequence[float | None]) -> float | None:
    """The largest of numbers that have one sign; None of others, and of none."""
    known = [one for one in numbers if one is not None and one]
    if not known or len(known) != len(numbers) or len({one > 0 for one in known}) > 1:
        return None
    return max(known, key=abs)


def _compute(sign: cst.BaseBinaryOp, left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    if isinstance(sign, (cst.Multiply, cst.Divide)):
        number = left * right if isinstance(sign, cst.Multiply) else left / right
    elif isinstance(sign, (cst.Add, cst.Subtract)):
        number = left + right if isinstance(sign, cst.Add) else left - right
    else:
        return None
    return None if math.isnan(number) else number


def _last_name(node: cst.CSTNode) -> str:
    last = node.attr if isinstance(node, cst.Attribute) else node
    return last.value if isinstance(last, cst.Name) else ""


def _pairs(part: cst.Assign) -> list[tuple[cst.BaseExpression, cst.BaseExpression | None]]:
    """Targets with what each is given: `a, b = 1, 2` gives each its own."""
    found: list[tuple[cst.BaseExpression, cst.BaseExpression | None]] = []
    for one in part.targets:
        target, value = one.target, part.value
        if isinstance(target, (cst.Tuple, cst.List)):
            given = value.elements if isinstance(value, (cst.Tuple, cst.List)) else ()
            is_plain = all(isinstance(item, cst.Element) for item in (*given, *target.elements))
            values = [item.value for item in given] if is_plain and len(given) == len(target.elements) else []
            found += [(to.value, values[at] if values else None) for at, to in enumerate(target.elements)]
        else:
            found.append((target, value))
    return found


def _bound_in(around: cst.CSTNode, name: str) -> list[cst.BaseExpression | None]:
    """What a name is given in a function, or in the file outside of all functions and classes."""
    finder = _Bound(around, name)
    around.visit(finder)
    return finder.found


class _Bound(cst.CSTVisitor):
    def __init__(self, around: cst.CSTNode, name: str) -> None:
        super().__init__()
        self._around, self._name = around, name
        self.found: list[cst.BaseExpression | None] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802
        self._note(node.name if node is not self._around else None)
        return node is self._around

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:  # noqa: N802
        self._note(node.name)
        return False

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        for target, value in _pairs(node):
            if m.matches(target, m.Name(self._name)):
                self.found.append(value)
            else:
                self._note(target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:  # noqa: N802
        if m.matches(node.target, m.Name(self._name)) and node.value is not None:
            self.found.append(node.value)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:  # noqa: N802
        self._note(node.target)

    def visit_For(self, node: cst.For) -> None:  # noqa: N802
        self._note(node.target)

    def visit_CompFor(self, node: cst.CompFor) -> None:  # noqa: N802
        self._note(node.target)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:  # noqa: N802
        self._note(node.target)

    def visit_AsName(self, node: cst.AsName) -> None:  # noqa: N802
        self._note(node.name)

    def visit_ImportAlias(self, node: cst.ImportAlias) -> None:  # noqa: N802
        self._note(node.name)

    def visit_Lambda(self, node: cst.Lambda) -> None:  # noqa: N802
        self._note(node.params)

    def _note(self, node: cst.CSTNode | None) -> None:
        """What is not one expression."""
        if node is not None and self._name in names_used(node):
            self.found.append(None)
