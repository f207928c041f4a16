"""The precision that a file's build() names: 16-bit weights become FP32 weights under autocast."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper

from floatline.fixes.scope import find_positions
from floatline.fixes.spanning.edits import FileEdit, FileScene, names_in

_TRUE = ("fp16-true", "bf16-true")


def mixed_precision(scene: FileScene) -> FileEdit | None:
    """`"bf16-true"` as `"bf16-mixed"`, where build() returns it."""
    found = find_precisions(scene.module, scene.line) or find_precisions(scene.module)
    if len(found) != 1:
        return None
    text = found[0].value.replace("-true", "-mixed")
    return FileEdit("weights stay in FP32, and autocast computes in 16 bits", {found[0]: cst.SimpleString(text)})


def find_precisions(
    module: cst.Module, line: cst.CSTNode | None = None, *, entry: str = "build"
) -> list[cst.SimpleString]:
    """Where a precision with 16-bit weights is named: in a statement, or in what a function runs.

    Args:
        module: The file.
        line: A statement; None looks into the function and into those of the file that it calls.
        entry: The function.
    """
    places = [line] if line is not None else _reached(module, entry)
    found = [node for place in places for node in m.findall(place, m.SimpleString())]
    # precision == "fp16-true" asks, and names none.
    asked = [node for place in places for one in m.findall(place, m.Comparison()) for node in one.children]
    asked = [node for one in asked for node in m.findall(one, m.SimpleString())]
    texts = [cst.ensure_type(node, cst.SimpleString) for node in found if node not in asked]
    return [node for node in texts if node.evaluated_value in _TRUE]


def find_precision_line(text: str, *, entry: str) -> int:
    """The line where a function names a precision with 16-bit weights; 0 where there is none, or more than one.

    Args:
        text: The file.
        entry: The function.
    """
    try:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    except cst.ParserSyntaxError:
        return 0
    found = find_precisions(wrapper.module, entry=entry)
    return find_positions(wrapper)[found[0]].start.line if len(found) == 1 else 0


def _reached(module: cst.Module, entry: str) -> list[cst.FunctionDef]:
    """A function of the file, and those that it names."""
    functions = {one.name.value: one for one in module.body if isinstance(one, cst.FunctionDef)}
    reached: dict[str, cst.FunctionDef] = {}
    left = [entry]
    while left:
        name = left.pop()
        if name in functions and name not in reached:
            reached[name] = functions[name]
            left += sorted(names_in(functions[name]))
    return list(reached.values())
