"""A whole function in FP32: what its parameters bring is widened, and autocast is off in it."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from floatline.fixes.origins import find_origins, names_used
from floatline.fixes.scope import LinePlace
from floatline.fixes.spanning.edits import FileEdit, FileScene, calls_of, parameters_of, statement
from floatline.fixes.statements import source_of

_OPEN = m.Yield() | m.Await() | m.Global() | m.Nonlocal()


def fp32_function(scene: FileScene) -> FileEdit | None:
    """The body of the function without autocast, with `.float()` on the parameters that reach the line."""
    autocast, function = scene.context.names.spell("torch.autocast"), scene.around
    if (
        autocast is None
        or not isinstance(function, cst.FunctionDef)
        or not isinstance(function.body, cst.IndentedBlock)
    ):
        return None
    if calls_of(function, "backward") or m.findall(function, _OPEN | m.FunctionDef()) != [function]:
        return None
    given = parameters_of(function, with_defaults=False) - {"self", "cls", _owner_of(function, scene)}
    reaching = names_used(scene.line)
    for place in find_origins(scene.module, LinePlace(scene.line, function)):
        reaching |= names_used(place.line) if place.around is function else set()
    called = [cst.ensure_type(one, cst.Call).func for one in m.findall(function, m.Call(m.Name()))]
    modules = {name for one in called for name in names_used(one)}  # what is called is no tensor
    order = [one.name.value for one in function.params.params if one.name.value in (given & reaching) - modules]
    if not order:
        return None
    lines = list(function.body.body)
    doc = lines[:1] if function.get_docstring() is not None else []
    widened = [
        statement(f"{name} = {name}.float() if {name}.is_floating_point() else {name}")
        for name in order
        if not _is_index(name, function, scene)
    ]
    region = cst.parse_expression(f"{source_of(autocast)}({order[0]}.device.type, enabled=False)")
    whole = cst.With([cst.WithItem(region)], cst.IndentedBlock([*widened, *lines[len(doc) :]]))
    new = function.with_changes(body=function.body.with_changes(body=[*doc, whole]))
    return FileEdit(f"{function.name.value} is computed in FP32, without autocast", {function: new})


def _is_index(name: str, function: cst.FunctionDef, scene: FileScene) -> bool:
    """Whether a parameter holds whole numbers: it picks rows of an embedding or elements, and is used for nothing else.

    Its device and shape may be asked for, and it may be compared.
    """
    picks = m.Subscript(slice=[m.ZeroOrMore(), m.SubscriptElement(m.Index(m.Name(name))), m.ZeroOrMore()])
    given = m.Arg(m.Name(name), keyword=None)
    looks_up = [
        one
        for one in m.findall(function, m.Call(args=[given]))
        if _is_embedding(cst.ensure_type(one, cst.Call).func, scene)
    ]
    asked = m.Attribute(m.Name(name), m.Name("device") | m.Name("shape") | m.Name("ndim"))
    compared = m.Comparison(m.Name(name), comparisons=[m.ComparisonTarget(m.Equal() | m.NotEqual(), m.Integer())])
    sure = [*m.findall(function.body, picks), *looks_up]
    known = {id(use) for one in (*sure, *m.findall(function.body, asked | compared)) for use in _uses(one, name)}
    return bool(sure) and known == {id(use) for use in _uses(function.body, name)}


def _uses(node: cst.CSTNode, name: str) -> Sequence[cst.CSTNode]:
    return m.findall(node, m.Name(name))


def _is_embedding(called: cst.BaseExpression, scene: FileScene) -> bool:
    """Whether `self.tokens` is an nn.Embedding wherever the file makes it."""
    if not isinstance(called, cst.Attribute) or not m.matches(called.value, m.Name("self")):
        return False
    target = m.AssignTarget(m.Attribute(attr=m.Name(called.attr.value)))
    made = [cst.ensure_type(one, cst.Assign).value for one in m.findall(scene.module, m.Assign(targets=[target]))]
    paths = [scene.context.names.resolve(one.func) if isinstance(one, cst.Call) else "" for one in made]
    return bool(paths) and all(path.removesuffix(".from_pretrained") == "torch.nn.Embedding" for path in paths)


def _owner_of(function: cst.FunctionDef, scene: FileScene) -> str:
    """What a method calls its object, which need not be `self`; '' of a plain function and a static method."""
    owner, params = scene.find_class(), function.params.params
    is_method = owner is not None and any(one is function for one in owner.body.body)
    is_static = any(m.matches(one.decorator, m.Name("staticmethod")) for one in function.decorators)
    return params[0].name.value if is_method and params and not is_static else ""
