"""Patches: functions and methods replaced for a while, and put back; lifted while torch compiles or traces."""

# torch shows these switches, what it traces and the state of its compiler to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import _symbolic_trace


class Aside:
    """A context for the recorder's own tensors. A class, since it is entered twice an operation."""

    def __enter__(self) -> None:
        self._guards = (torch._C._DisableTorchDispatch(), torch._C._DisableAutocast())
        for guard in self._guards:
            guard.__enter__()
        self._tracked = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._tracked)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


_ABSENT = object()


class Patches:
    """Replaces attributes of modules and classes; `undo` puts every one back, the last first.

    An attribute that a class only inherits is deleted again, so that nothing is left behind.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it was, what it is

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute by a value."""
        self._made.append((owner, name, _read(owner, name), value))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a function by what `make` makes of it; nothing happens where this torch has none of that name."""
        original = getattr(owner, name, None)
        if original is None:
            return
        replacement = make(original)
        functools.update_wrapper(replacement, original)
        self.set(owner, name, replacement)

    def lift(self) -> None:
        """Put everything back for a while; what somebody else has replaced since stays as it is."""
        for owner, name, old, value in reversed(self._made):
            if _read(owner, name) is value:
                _write(owner, name, old)

    def put_on(self) -> None:
        """Replace again what was lifted."""
        for owner, name, old, value in self._made:
            if _read(owner, name) is old:
                setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back for good."""
        while self._made:
            owner, name, old, _ = self._made.pop()
            _write(owner, name, old)


def _read(owner: Any, name: str) -> Any:
    return cast("dict[str, Any]", vars(owner)).get(name, _ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 (its stubs do not know it)
# Frames of these between the user's are not compiled: the watch, and what it asks of tensors.
_OWN = (__name__.partition(".watch.")[0], "floatline.optim.mesh")
_is_functional: Any = getattr(torch, "_is_functional_tensor")  # noqa: B009
_MODES = tuple(
    getattr(torch._C._TorchDispatchModeKey, name)
    for name in ("FAKE", "PROXY", "FUNCTIONAL")
    if hasattr(torch._C._TorchDispatchModeKey, name)
)


def is_tracing() -> bool:
    """Whether Dynamo, AOT autograd, torch.export, a functorch transform, FX or torch.jit is at work on this thread."""
    return _functorch.peek_interpreter_stack() is not None or is_compiling()


def is_compiling() -> bool:
    """The same of all but functorch transforms: whether a program is made, and no step is run."""
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES):
        return True
    return (
        TracingContext.try_get() is not None
        or torch.compiler.is_compiling()
        or getattr(_symbolic_trace, "_is_fx_tracing_flag", False)
        or bool(torch._C._is_tracing())
    )


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has numbers that can be looked at: not fake, functional, wrapped by functorch, or meta."""
    return not (
        tensor.is_meta
        or isinstance(tensor, (FakeTensor, FunctionalTensor))
        or _is_functional(tensor)
        or _functorch.is_functorch_wrapped_tensor(tensor)
    )


class CompilerWatch:
    """Knows whether a loop compiles something, and lifts the patches of the watch while it does.

    Dynamo reads the code that it compiles: with the patches in place it would read the watch's code, too, and compile
    another program than the user's.

    Args:
        lifted: The patches.
        on_compile: Called when the loop compiles something.
    """

    def __init__(self, lifted: Sequence[Patches], on_compile: Callable[[], None]) -> None:
        self._lifted = lifted
        self._on_compile = on_compile
        self._depth = 0
        self._handler: Any = None
        self._left_alone: list[str] = []  # folders that Dynamo does not look into meanwhile
        self._own = Patches()
        self._own.wrap(torch, "compile", self._watch_compile)
        if "torch._dynamo" in sys.modules:
            self._listen()

    def _watch_compile(self, compile_: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._on_compile()
            if self._handler is None:
                with self.lift():  # Dynamo keeps some of torch's functions as it finds them when it is loaded
                    self._listen()
            return compile_(*args, **kwargs)

        return watched

    def _listen(self) -> None:
        """Be told when a compilation begins and ends; this torch may have no such service."""
        with contextlib.suppress(ImportError, AttributeError):
            from torch._dynamo import trace_rules
            from torch._dynamo.callback import callback_handler

            known = len(trace_rules.SKIP_DIRS)
            for name in _OWN:
                trace_rules.add(name)
            self._left_alone = trace_rules.SKIP_DIRS[known:]
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)
            self._handler = callback_handler

    @contextlib.contextmanager
    def lift(self) -> Generator[None]:
        """Without patches for a while."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            for patches in reversed(self._lifted):
                patches.lift()

    def _end(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for patches in self._lifted:
                patches.put_on()

    def undo(self) -> None:
        """Listen no longer."""
        self._own.undo()
        if self._handler is not None:
            for remove, callback in (
                (self._handler.remove_start_callback, self._begin),
                (self._handler.remove_end_callback, self._end),
            ):
                with contextlib.suppress(ValueError):  # torch.compiler.reset() has removed it
                    remove(callback)
            self._handler = None
        if self._left_alone:
            self._look_again()

    def _look_again(self) -> None:
        """Let Dynamo look into floatline again: a replay that is compiled after the watch begins there."""
        from torch._dynamo import trace_rules

        for folder in self._left_alone:
            with contextlib.suppress(ValueError):
                trace_rules.SKIP_DIRS.remove(folder)
        self._left_alone = []
        trace_rules._recompile_re()  # pyright: ignore[reportPrivateUsage]


def is_inside_compiled() -> bool:
    """Whether this code was called from inside a compiled function, also one that runs eagerly just now.

    What runs next may be compiled code. And where the function returns, torch puts back which modes of dispatch were
    on when it was called: a mode that was left meanwhile would be asked for, and is not there.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._C._dynamo import eval_frame

    if eval_frame.get_eval_frame_callback() not in (None, False):
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


class Eagerly:
    """A context in which compiled functions and modules run eagerly; not to be entered inside of one."""

    def __init__(self) -> None:
        self._stance: Any = None

    def __enter__(self) -> None:
        if "torch._dynamo" in sys.modules:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._stance is not None:
            self._stance.__exit__(None, None, None)


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module behind what torch.compile made of it."""
    inner = module._modules.get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else module
