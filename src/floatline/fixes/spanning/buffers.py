"""Buffers whose small values a cast of the model loses: they keep their own dtype."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from floatline.fixes.scope import find_sources
from floatline.fixes.spanning.edits import FileEdit, FileScene, calls_of, statement


def buffer_keeps_dtype(scene: FileScene) -> FileEdit | None:
    """A module whose buffer keeps its dtype when the model is cast to 16 bits; its device follows."""
    home = scene.find_class()
    names = _find_buffers(scene, home) if home is not None else []
    if home is None or not names or not isinstance(home.body, cst.IndentedBlock):
        return None
    methods = [one for one in home.body.body if isinstance(one, cst.FunctionDef)]
    if not methods or any(one.name.value == "_apply" for one in methods):
        return None
    method = statement(_write_method(names)).with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    first = next((one for one in methods if one.name.value == "__init__"), methods[0])
    listed = " and ".join(names)
    return FileEdit(f"{listed} keeps its own dtype when the model is cast", after={first: [method]})


def _write_method(names: list[str]) -> str:
    kept = "".join(f"    {name} = self.{name}\n" for name in names)
    back = "".join(
        f"    if not {name}.is_meta:  # stays as it is: 16 bits would round it\n"
        f"        self.{name} = {name}.to(self.{name}.device)\n"
        for name in names
    )
    head = "def _apply(self, fn, *args, **kwargs):\n"
    return f"{head}{kept}    super()._apply(fn, *args, **kwargs)\n{back}    return self\n"


def _find_buffers(scene: FileScene, home: cst.ClassDef) -> list[str]:
    """Buffers of the class that the statement uses, or that its names were made from."""
    lines, left = [scene.line], [scene.line]
    while left:
        new = [one for one in find_sources(scene.around, left.pop()) if one not in lines]
        lines += new
        left += new
    used = {name for line in lines for name in _attributes(line)}
    return [name for name in _registered(home) if name in used and not _is_written(home, name)]


def _attributes(line: cst.CSTNode) -> set[str]:
    found = m.findall(line, m.Attribute(m.Name("self")))
    return {cst.ensure_type(one, cst.Attribute).attr.value for one in found}


def _registered(home: cst.ClassDef) -> list[str]:
    """Names of `self.register_buffer("name", tensor)`."""
    found: list[str] = []
    for call in calls_of(home, "register_buffer"):
        plain = [arg for arg in call.args if arg.keyword is None and not arg.star]
        if len(plain) < 2 or m.matches(plain[1].value, m.Name("None")):
            continue
        text = plain[0].value.evaluated_value if isinstance(plain[0].value, cst.SimpleString) else ""
        if isinstance(text, str) and text.isidentifier() and text not in ("self", "fn", "args", "kwargs"):
            found.append(text)
    return found


def _is_written(home: cst.ClassDef, name: str) -> bool:
    """Whether the class assigns the buffer again somewhere: then another dtype may be meant."""
    target = m.AssignTarget(m.Attribute(m.Name("self"), m.Name(name)))
    return bool(m.findall(home, target))
