"""AppliedPlan: what a plan keeps in FP32 or rewrites, done to a model and to the code around it."""

from __future__ import annotations

import contextlib
import linecache
import weakref
from collections.abc import Callable, Collection, Generator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from floatline.errors import PlanError
from floatline.numerics.uncompiled import uncompiled
from floatline.plans import KeptFunction, Plan
from floatline.plans.plan import RewriteKind, match_modules, name_modules
from floatline.precision.fp32_call import allow_tf32, run_in_fp32
from floatline.precision.functions import Around, code_of, find_function, wrap_function
from floatline.precision.islands import Islands, LineIslands, StandIn
from floatline.precision.rewrites import Rewriting

LOSS = "loss"


class AppliedPlan:
    """A plan's FP32 modules, FP32 functions and lines, and rewrites, in force for a model.

    Nothing of the user's code is edited. Functions run so wherever they are called from in this process, modules
    while they are this model's. A plan that cannot be applied raises, and changes nothing.

    Numerics:
        A function or a module in FP32 gives the bits that it gives when it is called with FP32 inputs and without
        autocast. Checked by tests/precision/test_applied_plan.py.

    Args:
        model: The model, not wrapped.
        plan: What is applied.
        loss_fn: The loss function, for a plan that names `loss`.
    """

    def __init__(self, model: nn.Module, plan: Plan, *, loss_fn: Callable[..., Any] | None = None) -> None:
        kept = plan.check_modules(model)
        functions = _find_arounds(plan, model, loss_fn)
        modules = _find_rewritten(plan, model)
        loss_arounds = functions.pop(None, [])
        if loss_arounds and loss_fn is None:
            raise PlanError(
                f"Plan '{plan.name}' names the loss, and no loss function is given. "
                "Give loss_fn and call what comes back, or name the function."
            )
        self._state = _State()
        self._undo: list[Callable[[], None]] = []
        for name, kinds in modules.items():
            forward = _RewrittenForward(model.get_submodule(name), kinds, self._state)
            self._undo.append(forward.undo)
        self.islands = Islands(model, kept)
        for function, arounds in functions.items():
            self._undo += [wrap_function(function, partial(_unless_paused, self._state, around)) for around in arounds]
        if plan.tf32:
            self._undo.append(allow_tf32())
        self._tf32 = plan.tf32
        self.loss_fn = loss_fn
        if loss_fn is not None and loss_arounds:
            self.loss_fn = _Loss(loss_fn, [partial(_unless_paused, self._state, around) for around in loss_arounds])
        # Functions outlive the model that they were changed for, and a run may end without calling remove().
        self._end = weakref.finalize(self, _undo_all, self._undo)
        self._end.atexit = False

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Everything runs as it was written, islands included, until the end."""
        islands = self.islands.outputs
        self.islands.remove()
        self._state.paused += 1
        precision = torch.get_float32_matmul_precision()
        if self._tf32:
            torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            self._state.paused -= 1
            for name, outputs in islands.items():
                self.islands.add(name, outputs=outputs)

    def remove(self) -> None:
        """Put everything back as it was."""
        self._state.paused += 1  # other code may still hold the wrapped loss function
        self.islands.remove()
        _undo_all(self._undo)


class _State:
    """Whether the plan is in force now; shared with what was put into the user's code."""

    paused = 0


class _Loss:
    """A loss function with something around it; asked for anything else, it is the loss function."""

    def __init__(self, loss_fn: Callable[..., Any], arounds: list[Around]) -> None:
        self._loss_fn, self._arounds = loss_fn, arounds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run_around(self._loss_fn, self._arounds, args, kwargs)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loss_fn, name)


class _RewrittenForward(StandIn):
    """Computes it with operations in another form."""

    def __init__(self, module: nn.Module, kinds: Collection[RewriteKind], state: _State) -> None:
        self.module, self.kinds, self.state = module, tuple(kinds), state
        self.replaced = vars(module).get("forward")
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.replaced or MethodType(type(self.module).forward, self.module)
        around = partial(_unless_paused, self.state, partial(_rewrite, self.kinds))
        return _run_around(original, [around] if self.kinds else [], args, kwargs)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]

    def undo(self) -> None:
        self.kinds = ()
        if vars(self.module).get("forward") is not self:
            return  # an island, or another library, stands around it now
        if self.replaced is not None:
            self.module.forward = self.replaced
        else:
            vars(self.module).pop("forward", None)


@uncompiled
def _run_around(function: Callable[..., Any], arounds: list[Around], args: tuple[Any, ...], kwargs: Any) -> Any:
    if not arounds:
        return function(*args, **kwargs)
    inner = partial(_nested, function, arounds[:-1])
    return arounds[-1](inner, args, kwargs)


def _nested(function: Callable[..., Any], arounds: list[Around], *args: Any, **kwargs: Any) -> Any:
    return _run_around(function, arounds, args, kwargs)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]


def _unless_paused(
    state: _State, around: Around, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return function(*args, **kwargs) if state.paused else around(function, args, kwargs)


def _rewrite(kinds: Collection[RewriteKind], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return Rewriting(kinds).run(function, args, kwargs)


def _on_lines(file: str, lines: Collection[int], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with LineIslands([(file, line) for line in lines]):
        return function(*args, **kwargs)


def _find_arounds(plan: Plan, model: nn.Module, loss_fn: Callable[..., Any] | None) -> dict[Any, list[Around]]:
    """What is put around each function, innermost first: rewrites, then FP32; None is the loss function."""
    also = [*dict.fromkeys(type(module) for module in model.modules()), loss_fn]
    found: dict[Any, list[Around]] = {}
    rewrites: dict[Any, list[RewriteKind]] = {}
    for entry in plan.rewrites:
        if entry.function:
            place = _find(entry.function, f"Plan '{plan.name}' rewrites '{entry.function}'", also)
            rewrites.setdefault(place, []).append(entry.kind)
    for place, kinds in rewrites.items():
        if place is not None and place.line:
            raise PlanError(f"Plan '{plan.name}' rewrites a line. Name the function around it.")
        found.setdefault(place and place.function, []).append(partial(_rewrite, tuple(kinds)))
    lines: dict[Any, list[int]] = {}
    for kept in plan.fp32_functions:
        place = _find(kept.function, f"Plan '{plan.name}' keeps '{kept.function}' in FP32", also)
        if place is not None and place.line:
            check_code(kept, code_of(place.function).co_filename, place.line, plan.name)
            lines.setdefault(place.function, []).append(place.line)
        else:
            around = run_in_fp32 if place is not None else partial(run_in_fp32, keep=True, owner=loss_fn)
            found.setdefault(place and place.function, []).append(around)
    for function, numbers in lines.items():
        found.setdefault(function, []).insert(0, partial(_on_lines, code_of(function).co_filename, numbers))
    return found


def check_code(kept: KeptFunction, file: str, line: int, plan: str) -> None:
    """Refuse a line whose code is not the plan's: lines move when a file is edited."""
    lines = [text.strip() for text in linecache.getlines(file)]
    if not kept.code or not 0 < line <= len(lines) or lines[line - 1] == kept.code:
        return
    now = [number for number, text in enumerate(lines, 1) if text == kept.code]
    do = f"It is on line {now[0]} now: change the plan" if len(now) == 1 else "Make the plan again"
    raise PlanError(f"Plan '{plan}' keeps '{kept.function}' in FP32, but '{kept.code}' is not on that line. {do}.")


def _find(name: str, said: str, also: list[Any]) -> Any:
    return None if name == LOSS else find_function(name, said=said, also=also)


def _find_rewritten(plan: Plan, model: nn.Module) -> dict[str, list[RewriteKind]]:
    names = name_modules(model)
    found: dict[str, list[RewriteKind]] = {}
    for entry in plan.rewrites:
        if not entry.module:
            continue
        for name in match_modules(names, entry.module, said=f"Plan '{plan.name}' rewrites in '{entry.module}'"):
            found.setdefault(name, []).append(entry.kind)
    return found


def _undo_all(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo.pop()()
