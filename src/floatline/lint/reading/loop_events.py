"""What happens in a training loop, call by call: backward passes, steps, and what a scaler does between them.

Scalers, optimizers and schedulers are known by what made them (`torch.amp.GradScaler`, `torch.optim.…`), or by a use
that nothing else has (`X.scale(loss).backward()`, `scaler.step(X)`). They are told apart by their dotted names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import keyword, last_name, parameters

Kind = Literal[
    "backward", "unscale", "rescale", "clip", "step", "update", "zero", "schedule", "grad", "agree", "norm", "forward"
]  # fmt: skip
SCALERS = frozenset(
    (
        "torch.amp.GradScaler",
        "torch.GradScaler",
        "torch.amp.grad_scaler.GradScaler",
        "torch.cuda.amp.GradScaler",
        "torch.cuda.amp.grad_scaler.GradScaler",
        "torch.cpu.amp.GradScaler",
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
        "floatline.LossScaler",
        "floatline.guard.LossScaler",
    )
)
_CLIPS = frozenset(("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_grad_norm"))
_NORMS = frozenset(("norm", "vector_norm", "get_total_norm"))
_COLLECTIVES = frozenset(
    """all_reduce all_gather all_gather_object all_gather_into_tensor broadcast broadcast_object_list reduce gather
    gather_for_metrics reduce_tensor barrier""".split()  # noqa: SIM905
)
_TIMES = frozenset(("div_", "mul_", "div", "mul", "float", "_foreach_mul_"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True)
class LoopCall:
    """One thing that a training loop does.

    Args:
        kind: What.
        node: Where.
        owner: The scaler that does it, as it is written; '' where none does.
        target: The optimizer or scheduler that it is done to.
    """

    kind: Kind
    node: ast.expr
    owner: str = ""
    target: str = ""


def dotted(node: ast.AST | None) -> str:
    """`self.scaler` as text; '' for anything but names and their attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


class LoopNames:
    """What the names of one function are.

    Args:
        source: The file.
        function: The function, or the module.
        calls: Every call in it.
        scalers: Scalers that the file makes.
        optimizers: Optimizers that the file makes.
        schedulers: Schedulers that the file makes.
    """

    def __init__(
        self,
        source: Source,
        function: ast.AST,
        calls: set[ast.Call],
        *,
        scalers: Iterable[str],
        optimizers: Iterable[str],
        schedulers: Iterable[str],
    ) -> None:
        self.source = source
        self.scalers, self.schedulers = set(scalers), set(schedulers)
        zeroed: set[str] = set()
        self.scaled: dict[str, str] = {}
        for call in calls:
            if not isinstance(call.func, ast.Attribute):
                continue
            owner, name = call.func.value, call.func.attr
            if name == "backward" and isinstance(owner, ast.Call) and last_name(owner.func) == "scale":
                if scaler := _scaler_in(owner):
                    self.scalers.add(scaler)
            elif name == "zero_grad" and dotted(owner):
                zeroed.add(dotted(owner))
            elif name == "get_last_lr" and dotted(owner):
                self.schedulers.add(dotted(owner))
        for arg in [*getattr(getattr(function, "args", None), "args", [])]:
            if arg.annotation is not None and self.source.path(arg.annotation) in SCALERS:
                self.scalers.add(arg.arg)
        self.optimizers = zeroed | set(optimizers)
        self.schedulers |= {
            owner
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == "step" and not call.keywords
            if (owner := dotted(call.func.value)) and "sched" in owner.rpartition(".")[2].lower()
            if owner not in self.optimizers and self._is_given(owner, function)
        }
        for call in calls:
            if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("step", "unscale_") or not call.args:
                continue
            if dotted(call.func.value) in self.scalers and (name := dotted(call.args[0])):
                self.optimizers.add(name)
        self._read_scaled(function)

    def _is_given(self, owner: str, function: ast.AST) -> bool:
        """Whether a name comes from outside: a parameter, or an attribute that the file gives nothing."""
        if "." not in owner:
            return owner in parameters(function)
        stores = (one for one in ast.walk(self.source.tree) if isinstance(one, ast.Attribute))
        return not any(isinstance(one.ctx, ast.Store) and dotted(one) == owner for one in stores)

    def _read_scaled(self, function: ast.AST) -> None:
        """`loss = scaler.scale(loss)`: the name of what is scaled."""
        for node in nodes_in(body_of(function)):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            owner = _scaler_in(node.value)
            if owner in self.scalers:
                self.scaled.update({dotted(target): owner for target in node.targets if dotted(target)})

    def is_step(self, call: ast.Call) -> bool:
        """Whether an optimizer makes a step here, by itself or through a scaler."""
        return any(event.kind == "step" for event in self.events(call))

    def events(self, call: ast.Call) -> Iterator[LoopCall]:
        """What a call does, if anything."""
        path, name = self.source.path(call.func), last_name(call.func)
        if path.startswith("torch."):
            name_of = path.rpartition(".")[2]
            if path == "torch.autograd.grad":
                scaler = self._scaled_by(call.args[0] if call.args else keyword(call, "outputs"))
                if scaler:
                    yield LoopCall("grad", call, scaler)
            elif name_of in _NORMS:
                if any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(call)):
                    yield LoopCall("norm", call)
            elif name_of in _CLIPS:
                if not any(self._mentions_scale(arg) for arg in call.args):
                    yield LoopCall("clip", call)
            elif path.startswith("torch.distributed") and name in _COLLECTIVES:
                yield LoopCall("agree", call)
            return
        if not isinstance(call.func, ast.Attribute):
            if name in _COLLECTIVES:
                yield LoopCall("agree", call)
            return
        value = call.func.value
        owner = dotted(value)
        if name == "norm" and _is_gradient(value):
            yield LoopCall("norm", call)
        elif name == "backward":
            if not path:
                yield LoopCall("backward", call, self._scaled_by(value))
        elif owner in self.scalers:
            target = dotted(call.args[0]) if call.args else ""
            if name == "unscale_":
                yield LoopCall("unscale", call, owner, target)
            elif name == "step" and call.args:
                yield LoopCall("step", call, owner, target or ast.unparse(call.args[0]))
            elif name == "update":
                yield LoopCall("update", call, owner)
            elif name == "get_scale" and self._is_arithmetic(call):
                yield LoopCall("rescale", call, owner)
        elif name == "step" and owner in self.schedulers:
            yield LoopCall("schedule", call, target=owner)
        elif name == "step" and owner in self.optimizers:
            yield LoopCall("step", call, target=owner)
        elif name == "zero_grad":
            yield LoopCall("zero", call, target=owner)
        elif name in _CLIPS:
            yield LoopCall("unscale", call)  # a method of an engine that may do anything
        elif name in _COLLECTIVES:
            yield LoopCall("agree", call)

    def _scaled_by(self, node: ast.expr | None) -> str:
        """The scaler that scaled a value; '' where none did."""
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
            node = node.elts[0]
        if isinstance(node, ast.Call) and last_name(node.func) == "scale":
            owner = _scaler_in(node)
            return owner if owner in self.scalers else ""
        return self.scaled.get(dotted(node), "") if node is not None else ""

    def _mentions_scale(self, node: ast.AST) -> bool:
        return any(isinstance(one, ast.Attribute) and one.attr in ("get_scale", "_scale") for one in ast.walk(node))

    def _is_arithmetic(self, call: ast.Call) -> bool:
        """`g / scaler.get_scale()`, `g.div_(scaler.get_scale())`; also where the number is kept under a name first."""
        for above in self.source.ancestors(call):
            if isinstance(above, (ast.BinOp, ast.AugAssign)):
                return not isinstance(getattr(above, "op", None), (ast.Add, ast.Sub))
            if isinstance(above, ast.Call) and last_name(above.func) in _TIMES:
                return True
            if isinstance(above, ast.stmt):
                return False
        return False


def body_of(node: ast.AST) -> list[ast.stmt]:
    """The statements of a function, a loop or the module."""
    return getattr(node, "body", [])


def nodes_in(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Every node, without looking into functions and classes, in the order of the file."""
    waiting: list[ast.AST] = list(reversed(statements))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def calls_in(statements: Sequence[ast.AST]) -> Iterator[ast.Call]:
    """Every call, without looking into functions and classes."""
    yield from (node for node in nodes_in(statements) if isinstance(node, ast.Call))


def _scaler_in(call: ast.Call) -> str:
    """X of `X.scale(loss)`."""
    function = call.func
    return dotted(function.value) if isinstance(function, ast.Attribute) and function.attr == "scale" else ""


def _is_gradient(node: ast.expr) -> bool:
    """`p.grad`, `p.grad.data`, `p.grad.detach()`."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return False
