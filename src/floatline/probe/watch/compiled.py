"""Compiled parts of a loop: left as they are while torch.compile works on them, and run eagerly in recorded steps."""

# torch shows the state of its compiler to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import nn

from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Patches

_Call = Callable[..., Any]


class CompilerWatch:
    """Knows whether a loop compiles something, and lifts the patches of the watch while it does.

    Dynamo reads the code that it compiles: with the patches in place it would read the watch's code, too, and compile
    another program than the user's.

    Args:
        seen: The watch.
        lifted: The patches.
    """

    def __init__(self, seen: Watch, lifted: Sequence[Patches]) -> None:
        self._seen = seen
        self._lifted = lifted
        self._depth = 0
        self._handler: Any = None
        self._own = Patches()
        self._own.wrap(torch, "compile", self._watch_compile)
        if "torch._dynamo" in sys.modules:
            self._listen()

    def _watch_compile(self, compile_: _Call) -> _Call:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._seen.compiled = True
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

            trace_rules.add(__name__.partition(".watch.")[0])  # frames of the watch between the user's are not compiled
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


def is_inside_compiled() -> bool:
    """Whether this code was called from inside a compiled function: what runs next may be compiled code."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._C._dynamo import eval_frame

    return eval_frame.get_eval_frame_callback() not in (None, False)


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
