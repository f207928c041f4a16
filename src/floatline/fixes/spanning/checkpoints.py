"""Checkpoints: the scaler's state is saved and loaded beside that of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from floatline.fixes.scope import find_path
from floatline.fixes.spanning.edits import (
    FileEdit,
    FileScene,
    Statement,
    assigned_in,
    block_of,
    calls_of,
    own_statement,
    owner_of,
    parameters_of,
    statement,
)
from floatline.fixes.statements import find_scaler, source_of

_TIGHT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
_Edits = dict[cst.CSTNode, "cst.CSTNode | list[Statement]"]


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds: keys to values, of `dict(…)` or of `{…}`."""

    node: cst.Call | cst.Dict
    entries: dict[str, cst.BaseExpression]


def scaler_state(scene: FileScene) -> FileEdit | None:
    """`scaler.state_dict()` in the checkpoint, and `scaler.load_state_dict(…)` behind the optimizer's."""
    saved = _find_saved(scene.line)
    scaler = find_scaler(scene.around) or find_scaler(scene.find_class() or scene.around)
    if saved is None or not scaler or not _is_known(scene, scene.around, scaler, scene.line):
        return None
    key = _find_key(saved, scaler)
    if not key:
        return None
    saving, loading = _save(saved, scaler, key), _load(scene, saved, scaler, key)
    if loading is None or not (saving or loading[0] or loading[1]):
        return None
    says = "the scaler's state is kept beside the optimizer's, and loaded with it"
    return FileEdit(says, {**saving, **loading[0]}, after=loading[1], safe=False)


def _find_saved(line: cst.SimpleStatementLine) -> _Saved | None:
    """The dictionary of a statement that holds states."""
    for node in m.findall(line, m.Dict() | m.Call(m.Name("dict"))):
        if isinstance(node, cst.Call):
            entries = {arg.keyword.value: arg.value for arg in node.args if arg.keyword is not None}
        else:
            pairs = [one for one in cst.ensure_type(node, cst.Dict).elements if isinstance(one, cst.DictElement)]
            entries = {_text(one.key): one.value for one in pairs if _text(one.key)}
        if any(_is_state(value) for value in entries.values()):
            return _Saved(node, entries)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    return None


def _text(node: cst.BaseExpression) -> str:
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else ""
    return value if isinstance(value, str) else ""


def _is_state(node: cst.BaseExpression, owner: str = "") -> bool:
    """`owner.state_dict()`."""
    if not m.matches(node, m.Call(m.Attribute(attr=m.Name("state_dict")), args=[])):
        return False
    return not owner or owner_of(cst.ensure_type(node, cst.Call)) == owner


def _is_own(value: cst.BaseExpression, scaler: str) -> bool:
    """The scaler's state, also where it is kept only sometimes."""
    return _is_state(value.body if isinstance(value, cst.IfExp) else value, scaler)


def _find_key(saved: _Saved, scaler: str) -> str:
    """The key of the scaler's state; '' where it is taken by something else."""
    own = next((key for key, value in saved.entries.items() if _is_own(value, scaler)), "")
    name = scaler.rpartition(".")[2].lstrip("_")
    return own or ("" if name in saved.entries else name)


def _save(saved: _Saved, scaler: str, key: str) -> _Edits:
    """Edits that put the state into the dictionary."""
    old = saved.entries.get(key)
    if old is not None:
        return {old: old.body} if isinstance(old, cst.IfExp) else {}
    state = cst.parse_expression(f"{scaler}.state_dict()")
    if isinstance(saved.node, cst.Call):
        new = cst.Arg(state, cst.Name(key), equal=_TIGHT)
        return {saved.node: saved.node.with_changes(args=[*_closed(saved.node.args), new])}
    pair = cst.DictElement(cst.SimpleString(f'"{key}"'), state)
    return {saved.node: saved.node.with_changes(elements=[*_closed(saved.node.elements), pair])}


def _closed(parts):  # type: ignore[no-untyped-def]  # pyright: ignore
    """Arguments or elements, with a comma behind the last one; the line break behind it stays."""
    *rest, last = parts  # pyright: ignore
    if isinstance(last.comma, cst.Comma):  # pyright: ignore
        return [*rest, last]  # pyright: ignore
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [*rest, last.with_changes(comma=comma)]  # pyright: ignore


def _load(
    scene: FileScene, saved: _Saved, scaler: str, key: str
) -> tuple[_Edits, dict[cst.CSTNode, list[Statement]]] | None:
    """Edits that load the state; None where nobody can tell where."""
    own = [call for call in calls_of(scene.module, "load_state_dict") if owner_of(call) == scaler]
    if own:
        nodes = [_ask_checkpoint(scene, call) for call in own]
        return None if None in nodes else ({key: new for one in nodes if one for key, new in one.items()}, {})
    stepped = {_last(call.args[0].value) for call in calls_of(scene.module, "step") if _steps(call, scaler)}
    others = [call for call in calls_of(scene.module, "load_state_dict") if _source(call, saved) is not None]
    others = [call for call in others if owner_of(call).rpartition(".")[2] in stepped]
    by_block: dict[int, cst.Call] = {}
    for call in others:
        line = own_statement(scene.module, call)
        if line is None or source_of(line) != source_of(call):
            return None
        by_block[id(block_of(scene.module, line))] = call  # the last one of each block
    after: dict[cst.CSTNode, list[Statement]] = {}
    for call in by_block.values():
        line, checkpoint = own_statement(scene.module, call), _source(call, saved)
        if line is None or not _is_known(scene, _function_of(scene.module, line), scaler, line):
            return None
        text = f'if {checkpoint}.get("{key}"):\n    {scaler}.load_state_dict({checkpoint}["{key}"])\n'
        after[line] = [statement(text)]
    return ({}, after) if after else None


def _steps(call: cst.Call, scaler: str) -> bool:
    return owner_of(call) == scaler and bool(call.args)


def _last(node: cst.BaseExpression) -> str:
    """`opt` of `self.opt`."""
    return source_of(node).rpartition(".")[2]


def _source(call: cst.Call, saved: _Saved) -> str | None:
    """`ckpt` of `opt.load_state_dict(ckpt["opt"])`, where that is what was saved."""
    if len(call.args) != 1 or call.args[0].keyword is not None:
        return None
    given = call.args[0].value
    if not m.matches(given, m.Subscript(m.Name(), [m.SubscriptElement(m.Index(m.SimpleString()))])):
        return None
    place = cst.ensure_type(given, cst.Subscript)
    key = _text(cst.ensure_type(cst.ensure_type(place.slice[0].slice, cst.Index).value, cst.SimpleString))
    value = saved.entries.get(key)
    return source_of(place.value) if value is not None and _is_state(value) else None


def _ask_checkpoint(scene: FileScene, call: cst.Call) -> _Edits | None:
    """A load that hangs on a setting hangs on what the checkpoint holds; {} where it hangs on nothing."""
    line = own_statement(scene.module, call)
    if line is None or len(call.args) != 1:
        return None
    path = find_path(scene.module, line)
    holder = path[-3] if len(path) > 2 else None
    if not isinstance(holder, cst.If) or len(holder.body.body) > 1:
        return {}
    given = call.args[0].value
    if holder.orelse is not None or not m.matches(given, m.Subscript(m.Name(), [m.SubscriptElement(m.Index())])):
        return None
    place = cst.ensure_type(given, cst.Subscript)
    key = source_of(place.slice[0].slice)
    test = cst.parse_expression(f"{source_of(place.value)}.get({key})")
    return {} if source_of(holder.test) == source_of(test) else {holder.test: test}


def _function_of(module: cst.Module, line: cst.CSTNode) -> cst.CSTNode:
    path = find_path(module, line)
    return next((node for node in reversed(path) if isinstance(node, cst.FunctionDef)), module)


def _is_known(scene: FileScene, around: cst.CSTNode, name: str, line: cst.CSTNode) -> bool:
    """Whether a name means the same object at a statement: a parameter, made before it, or an attribute of self."""
    root = name.partition(".")[0]
    made = [one for one in m.findall(around, m.SimpleStatementLine()) if name in assigned_in(one)]
    if made:
        return any(scene.is_before(one, line) for one in made)
    if "." in name:
        return root == "self" and scene.find_class() in find_path(scene.module, line)
    if root in parameters_of(around):
        return True
    return around is not scene.module and any(name in assigned_in(one) for one in _top_level(scene.module))


def _top_level(module: cst.Module) -> list[cst.CSTNode]:
    return [one for one in module.body if isinstance(one, cst.SimpleStatementLine)]
