"""Values that meet another dtype than theirs: where they go back to 16 bits, and where they become FP32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import libcst as cst
import libcst.matchers as m

from floatline.fixes.expressions import FixContext, NewExpression, widen_tree
from floatline.fixes.names import read_cast
from floatline.fixes.operations import (
    WIDENED,
    SourceOperation,
    call,
    float_of,
    is_simple,
    method,
    read_number,
    read_operation,
    same,
)
from floatline.fixes.statements import NewStatements

_HALVES = ("torch.float16", "torch.half", "torch.bfloat16")
_MAKERS = frozenset("arange linspace tensor as_tensor full zeros ones empty zeros_like ones_like".split())  # noqa: SIM905
# Where what is written stands among the arguments behind the tensor that is written to.
_WRITES = {
    **dict.fromkeys(("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"), 2),
    **dict.fromkeys(("index_put", "masked_scatter"), 1),
}
_PRODUCTS = ("matmul", "mm", "bmm", "linear")
# Methods whose result has the dtype of what they are called on.
_KEEPING = WIDENED | frozenset(
    "t view reshape flatten transpose permute squeeze unsqueeze detach clone contiguous expand".split()  # noqa: SIM905
)


def float_and_back(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """The operation that failed in FP32, and the arithmetic around it cast back to the dtype of what entered it."""
    wide = _widen_inside(node, scene)
    if wide is None:
        return None
    widened = m.findall(wide, m.Call(m.Attribute(attr=m.Name("float")), args=[]))
    owners = [find_owner(cst.ensure_type(cst.ensure_type(one, cst.Call).func, cst.Attribute).value) for one in widened]
    owner = next((one for one in owners if one is not None), None)
    if owner is None:
        return None
    return NewExpression(_cast(wide, owner), f"{scene.op} is computed in FP32, and its result is cast back")


def _widen_inside(node: cst.BaseExpression, scene: FixContext) -> cst.BaseExpression | None:
    """An expression with the operation that failed in FP32, where nothing but arithmetic is around it."""
    found = read_operation(node, scene.names)
    if isinstance(node, cst.UnaryOperation):
        inner = _widen_inside(node.expression, scene)
        return None if inner is None else node.with_changes(expression=inner)
    if found is None or found.name not in WIDENED:
        return None
    if found.name == scene.op and (wide := widen_tree(node, scene.names)) is not None:
        return wide
    if found.name == "matmul":
        return None
    if isinstance(node, cst.BinaryOperation):
        sides = (_widen_inside(node.left, scene), _widen_inside(node.right, scene))
        if sides == (None, None):
            return None
        return node.with_changes(left=sides[0] or node.left, right=sides[1] or node.right)
    inner = _widen_inside(found.operand, scene)
    return None if inner is None else put_operand(found, inner)


def put_operand(found: SourceOperation, new: cst.BaseExpression) -> cst.BaseExpression:
    """A call with another first operand."""
    node = cst.ensure_type(found.node, cst.Call)
    if found.is_method:
        return node.with_changes(func=cst.ensure_type(node.func, cst.Attribute).with_changes(value=new))
    return node.with_changes(args=[node.args[0].with_changes(value=new), *node.args[1:]])


def find_owner(node: cst.BaseExpression) -> cst.BaseExpression | None:
    """A name that has the dtype of an expression: `x` for `x[:, 0].t()`; None where none is known."""
    if is_simple(node):
        return node.with_changes(lpar=(), rpar=())
    if isinstance(node, cst.Subscript):
        return find_owner(node.value)
    if isinstance(node, cst.UnaryOperation):
        return find_owner(node.expression)
    if isinstance(node, cst.BinaryOperation):
        return find_owner(node.right if read_number(node.left) is not None else node.left)
    if isinstance(node, cst.IfExp):
        owners = [find_owner(node.body), find_owner(node.orelse)]
        return owners[0] if None not in owners and same(*owners) else None  # type: ignore[arg-type]  # pyright: ignore
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in _KEEPING:
        return find_owner(node.func.value)
    return None


def fp32_cast(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`x.half()`, `x.to(dtype)` and `arange(n, dtype=dtype)` with FP32 for a 16-bit dtype."""
    if not isinstance(node, cst.Call) or (wide := scene.names.spell("torch.float32")) is None:
        return None
    says = "it is cast to FP32, which holds it"
    name = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
    if name in ("half", "bfloat16") and not node.args:
        function = cst.ensure_type(node.func, cst.Attribute)
        return NewExpression(node.with_changes(func=function.with_changes(attr=cst.Name("float"))), says)
    path = scene.names.resolve(node.func)
    is_maker = path.startswith("torch.") and path.rpartition(".")[2] in _MAKERS
    if not is_maker and name not in ("to", "type", "from_pretrained"):
        return None
    args = [_widen_dtype(arg, wide, scene) for arg in node.args]
    if all(new is old for new, old in zip(args, node.args, strict=True)):
        return None
    if name in ("to", "type") and len(args) == 1:
        return NewExpression(method(cst.ensure_type(node.func, cst.Attribute).value, "float"), says)
    return NewExpression(node.with_changes(args=args), says)


def fp32_state(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`zeros_like(p, dtype=dtype)` and `zeros_like(p)` with FP32 as the dtype of what an optimizer keeps."""
    path = scene.names.resolve(node.func) if isinstance(node, cst.Call) else ""
    wide = scene.names.spell("torch.float32")
    if not isinstance(node, cst.Call) or wide is None or path.rpartition(".")[2] not in _MAKERS or not node.args:
        return None
    says = "what the optimizer keeps is FP32"
    if any(arg.keyword is not None and arg.keyword.value == "dtype" for arg in node.args):
        new = fp32_cast(node, scene)
        return None if new is None else replace(new, says=says)
    if not path.startswith("torch.") or not path.endswith("_like"):
        return None
    dtype = cst.Arg(wide, cst.Name("dtype"), equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")))
    args = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in node.args]
    return NewExpression(node.with_changes(args=[*args, dtype]), says)


def fp32_weights(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`model.half()` as `model.float()`, where autocast computes in 16 bits anyway."""
    word = read_cast(node, scene.names) if isinstance(node, cst.Call) else ""
    is_mixed = scene.names.has_autocast or word in scene.names.formats
    new = fp32_cast(node, scene) if is_mixed else None
    return None if new is None else replace(new, says="weights stay in FP32: autocast computes in 16 bits by itself")


def _widen_dtype(arg: cst.Arg, wide: cst.BaseExpression, scene: FixContext) -> cst.Arg:
    named = arg.keyword is not None and arg.keyword.value in ("dtype", "torch_dtype")
    path = scene.names.resolve(arg.value)
    is_known = (path.startswith("torch.") and path not in _HALVES) or m.matches(arg.value, m.Name("None"))
    is_dtype = named or (arg.keyword is None and not arg.star and _is_dtype(arg.value, scene))
    return arg if is_known or not is_dtype else arg.with_changes(value=wide)


def _is_dtype(node: cst.BaseExpression, scene: FixContext) -> bool:
    """Whether an expression is a dtype, and neither a device nor a tensor."""
    last = node.attr.value if isinstance(node, cst.Attribute) else node.value if isinstance(node, cst.Name) else ""
    if "dtype" in last.lower() or scene.names.resolve(node) in (*_HALVES, "torch.float32", "torch.float"):
        return True
    made = scene.follow(node)
    if made is not node:
        return _is_dtype(made, scene)
    if isinstance(node, cst.IfExp):
        return _is_dtype(node.body, scene) or _is_dtype(node.orelse, scene)
    if isinstance(node, cst.Subscript) and isinstance(node.value, cst.Dict):  # {"bf16": torch.bfloat16}[precision]
        return any(_is_dtype(one.value, scene) for one in node.value.elements)
    return False


def write_dtype(line: cst.SimpleStatementLine, around: cst.CSTNode, scene: FixContext) -> NewStatements | None:
    """`out[i] = x` as `out[i] = x.to(out.dtype)`."""
    del around
    if len(line.body) != 1 or not isinstance(line.body[0], cst.Assign):
        return None
    assign = line.body[0]
    target = assign.targets[0].target
    if len(assign.targets) != 1 or not isinstance(target, cst.Subscript) or not is_simple(target.value):
        return None
    if scene.op not in ("index_put", "") or not _is_tensor(assign.value):
        return None
    new = assign.with_changes(value=_cast(assign.value, target.value))
    return NewStatements((cst.Module([]).code_for_node(new),), "what is written has the dtype of where it is written")


def source_dtype(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`out.index_add_(0, i, x)` as `out.index_add_(0, i, x.to(out.dtype))`."""
    found = read_operation(node, scene.names)
    if found is None or not isinstance(node, cst.Call) or (name := found.name.rstrip("_")) not in _WRITES:
        return None
    owner, index = find_owner(found.operand), _WRITES[name] + (0 if found.is_method else 1)
    if owner is None or index >= len(node.args) or not _is_tensor(value := node.args[index].value):
        return None
    args = [*node.args]
    args[index] = args[index].with_changes(value=_cast(value, owner))
    return NewExpression(node.with_changes(args=args), "what is written has the dtype of where it is written")


def product_dtype(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`a @ b` as `a.to(b.dtype) @ b`."""
    found = read_operation(node, scene.names)
    if found is None or found.name not in _PRODUCTS or not found.rest or found.rest[0].keyword is not None:
        return None
    owner = find_owner(found.rest[0].value)
    if owner is None or (found.is_method and found.name == "linear"):
        return None
    new = _cast(found.operand, owner)
    whole = node.with_changes(left=new) if isinstance(node, cst.BinaryOperation) else put_operand(found, new)
    return NewExpression(whole, "both sides of the product have one dtype")


def float_input(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`self.head(x)` as `self.head(x.float())`."""
    argument = read_module_call(node, scene)
    if argument is None or (wide := float_of(argument, scene.names)) is argument:
        return None
    return NewExpression(_with_argument(node, wide), "what enters the module is FP32, as its weights are")


def input_dtype(node: cst.BaseExpression, scene: FixContext) -> NewExpression | None:
    """`self.head(x)` as `self.head(x.to(next(self.head.parameters()).dtype))`."""
    argument = read_module_call(node, scene)
    if argument is None:
        return None
    owner = call(cst.Name("next"), method(cst.ensure_type(node, cst.Call).func, "parameters"))
    return NewExpression(_with_argument(node, _cast(argument, owner)), "what enters the module has its weights' dtype")


def read_module_call(node: cst.BaseExpression, scene: FixContext) -> cst.BaseExpression | None:
    """x of `self.layer(x)`; None where it is another call, one of a method of this file, or one with more arguments."""
    if not isinstance(node, cst.Call) or len(node.args) != 1 or node.args[0].keyword is not None or node.args[0].star:
        return None
    function = node.func.value if isinstance(node.func, cst.Subscript) else node.func
    if not m.matches(function, m.Attribute()) or not is_simple(function):
        return None
    root = function
    while isinstance(root, cst.Attribute):
        root = root.value
    is_own = isinstance(root, cst.Name) and root.value == "self"
    name = cst.ensure_type(function, cst.Attribute).attr.value
    return node.args[0].value if is_own and name not in scene.names.functions else None


def fp32_island(line: cst.SimpleStatementLine, around: cst.CSTNode, scene: FixContext) -> NewStatements | None:
    """`return self.wo(h)` as the same without autocast, on FP32."""
    del around
    autocast = scene.names.spell("torch.autocast")
    change = WidenInputs(scene)
    new = line.visit(change)
    owner = next(iter(change.owners), None)
    if autocast is None or owner is None or not isinstance(new, cst.SimpleStatementLine):
        return None
    spelled, device = (cst.Module([]).code_for_node(one) for one in (autocast, owner))
    body = "; ".join(cst.Module([]).code_for_node(part) for part in new.body).strip()
    with_ = f"with {spelled}({device}.device.type, enabled=False):\n    {body}\n"
    return NewStatements((with_,), "it is computed in FP32, without autocast")


class WidenInputs(cst.CSTTransformer):
    """Widens what enters modules and matrix products."""

    def __init__(self, scene: FixContext) -> None:
        super().__init__()
        self._scene = scene
        self.owners: list[cst.BaseExpression] = []

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        """`self.wo(h)`."""
        argument = read_module_call(original_node, self._scene)
        if argument is not None:
            if read_module_call(argument, self._scene) is not None:  # self.wo(self.wi(x)): x is enough
                return updated_node
            return updated_node.with_changes(args=self._widen([updated_node.args[0]]))
        found = read_operation(original_node, self._scene.names)
        if found is None or found.is_method or found.name not in (*_PRODUCTS, "binary_cross_entropy"):
            return updated_node
        return updated_node.with_changes(args=self._widen(updated_node.args))

    def leave_BinaryOperation(  # noqa: N802
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        """`a @ b`."""
        if not isinstance(original_node.operator, cst.MatrixMultiply):
            return updated_node
        sides = self._widen([cst.Arg(updated_node.left), cst.Arg(updated_node.right)])
        return updated_node.with_changes(left=sides[0].value, right=sides[1].value)

    def _widen(self, args: Sequence[cst.Arg]) -> list[cst.Arg]:
        tensors = [arg.value for arg in args if _is_tensor(arg.value)]
        owners = [owner for one in tensors if (owner := _find_tensor(one, self._scene)) is not None]
        self.owners += sorted(owners, key=lambda one: isinstance(one, cst.Attribute))  # x rather than self.weight
        names = self._scene.names
        return [arg.with_changes(value=float_of(arg.value, names)) if arg.value in tensors else arg for arg in args]


def _find_tensor(node: cst.BaseExpression, scene: FixContext) -> cst.BaseExpression | None:
    """A name that has the device of an expression: `x` for `x[:, 0].float()`."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and not scene.names.resolve(node.func):
        return _find_tensor(node.func.value, scene)
    if isinstance(node, cst.Subscript):
        return _find_tensor(node.value, scene)
    return find_owner(node)


def _with_argument(node: cst.BaseExpression, new: cst.BaseExpression) -> cst.BaseExpression:
    whole = cst.ensure_type(node, cst.Call)
    return whole.with_changes(args=[whole.args[0].with_changes(value=new)])


def _cast(node: cst.BaseExpression, owner: cst.BaseExpression) -> cst.BaseExpression:
    """`node.to(owner.dtype)`."""
    return method(node, "to", cst.Arg(cst.Attribute(owner, cst.Name("dtype"))))


def _is_tensor(node: cst.BaseExpression) -> bool:
    """Whether an expression may be a tensor: a name, an operation or a call; no number, list or text."""
    if read_number(node) is not None or m.matches(node, m.OneOf(m.Name("True"), m.Name("False"), m.Name("None"))):
        return False
    if isinstance(node, cst.IfExp):
        return _is_tensor(node.body) and _is_tensor(node.orelse)
    return isinstance(node, (cst.Name, cst.Attribute, cst.Subscript, cst.Call, cst.BinaryOperation))
