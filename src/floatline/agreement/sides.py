"""Side: one of two computations, and one run of it: outputs, gradients, layers and what went into them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from floatline.errors import ParityError
from floatline.plans.plan import name_modules
from floatline.probe.watch.patches import unwrap

Around = Callable[[], contextlib.AbstractContextManager[Any]]
_SEED = 0
_COTANGENT_SEED = 11
_EMPTY_CELL = CellType()


@dataclass(frozen=True)
class Given:
    """What a computation is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, batch: Any) -> Given:
        """A dict is named arguments, a tuple or list positional ones, anything else the only argument."""
        if isinstance(batch, Given):
            return batch
        if isinstance(batch, Mapping):
            return cls((), dict(cast("Mapping[str, Any]", batch)))
        return cls(tuple(cast("list[Any]", batch))) if isinstance(batch, list | tuple) else cls((batch,))

    def tensors(self) -> dict[str, Tensor]:
        """Floating-point tensors by name: 'input[0]', "input['mask']"."""
        every = _named((self.args, dict(self.kwargs)), "input")
        return {_short(name): value for name, value in every.items() if value.is_floating_point()}

    def fresh(self, dtype: torch.dtype | None, *, tracked: bool) -> Given:
        """The same numbers in tensors of their own.

        Args:
            dtype: Of floating-point tensors; None leaves it.
            tracked: Whether they require gradients; else those do that did.
        """

        def renew(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            new = value.detach().clone()
            if not new.is_floating_point():
                return new
            new = new if dtype is None else new.to(dtype)
            return new.requires_grad_(tracked or value.requires_grad)

        args, kwargs = tree_map(renew, (self.args, dict(self.kwargs)))
        return Given(args, kwargs)


@dataclass
class Ran:
    """What one run gave.

    Args:
        outputs: Floating-point outputs by name.
        gradients: Of weights and of inputs that require one, by name.
        choices: Integer and truth outputs by name.
        layers: Outputs of modules in the order in which they ended, by name; a second call is 'name (2)'.
        layer_gradients: Gradients of these.
        calls: What modules were called with, by the same names.
        cotangents: What the gradients of the outputs were taken to be.
        after: What floating-point arguments and buffers hold afterwards, by name.
        written: Those that were written to.
        random: Whether random numbers were drawn; only a wide run tells.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    choices: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    layers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    layer_gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    calls: dict[str, Given] = field(default_factory=dict[str, Given])
    cotangents: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    after: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    written: set[str] = field(default_factory=set[str])
    random: bool = False


@dataclass(frozen=True)
class Side:
    """One of two computations.

    Args:
        function: What is called: a function, a module, or what torch.compile made of one.
        plain: The same as eager code, which can be looked into.
        opaque: Whether the function itself cannot be: it runs compiled kernels.
        around: Gives the context that it runs in, such as autocast.
    """

    function: Callable[..., Any]
    plain: Callable[..., Any]
    opaque: bool
    around: Around = contextlib.nullcontext

    @classmethod
    def of(cls, function: Callable[..., Any], around: Around = contextlib.nullcontext) -> Side:
        """A side from what the user gave."""
        if not callable(function):
            raise ParityError(f"'{function!r:.60}' cannot be called. Give a function or a module.")
        if isinstance(function, nn.Module):
            plain = unwrap(function)
            return cls(function, plain, plain is not function, around)
        plain = getattr(function, "_torchdynamo_orig_callable", function)
        return cls(function, plain, plain is not function, around)

    @property
    def module(self) -> nn.Module | None:
        """The eager module; None for a function."""
        return self.plain if isinstance(self.plain, nn.Module) else None

    def in_format(self, dtype: torch.dtype, weights: Mapping[str, Tensor] | None = None) -> Callable[..., Any]:
        """The eager computation with weights of another format; a function as it is.

        Args:
            dtype: The format.
            weights: Values to take instead of its own, by name.
        """
        if self.module is None:
            return _with_modules(self.plain, dtype)
        changed = copy.deepcopy(self.module).to(dtype)
        with torch.no_grad():
            for name, parameter in changed.named_parameters():
                if weights and name in weights:
                    parameter.copy_(weights[name])
        return changed

    def formats(self) -> set[torch.dtype]:
        """Formats of its weights."""
        weights = self.module.parameters() if self.module is not None else ()
        return {weight.dtype for weight in weights if weight.is_floating_point()}

    def own_inputs(self, given: Given) -> Given:
        """The arguments in the format of its weights, where that is one of 16 bits: it would take no other."""
        formats = self.formats()
        narrow = len(formats) == 1 and formats <= {torch.float16, torch.bfloat16}
        return given.fresh(formats.pop(), tracked=False) if narrow else given

    def num_elements(self) -> int:
        """How many weights it has."""
        return 0 if self.module is None else sum(p.numel() for p in self.module.parameters())


def _with_modules(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A function that runs with the modules that it refers to in another format; they are put back after each call."""
    modules = _find_modules(function)
    if not modules:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
        before = [tensor.data for tensor in tensors]
        try:
            for tensor, old in zip(tensors, before, strict=True):
                tensor.data = old.to(dtype)
            return function(*args, **kwargs)
        finally:
            for tensor, old in zip(tensors, before, strict=True):
                tensor.data = old

    return run


def _find_modules(function: Any, depth: int = 3) -> list[nn.Module]:
    """Modules in the closure, the defaults, the bound arguments and the global names of a function."""
    code = getattr(function, "__code__", None)
    names = cast("tuple[str, ...]", getattr(code, "co_names", ()))
    held: list[Any] = [
        *(cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != _EMPTY_CELL),
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__globals__", {}).get(name) for name in names),
        *(getattr(function, "args", ()) if hasattr(function, "func") else ()),  # of functools.partial
        getattr(function, "__self__", None),
        getattr(function, "func", None),
    ]
    modules = [value for value in held if isinstance(value, nn.Module)]
    if depth:
        functions = [value for value in held if callable(value) and not isinstance(value, nn.Module | type)]
        modules += [module for value in functions for module in _find_modules(value, depth - 1)]
    return list(dict.fromkeys(modules))


def find_unrounded(a: Side, b: Side) -> dict[str, Tensor]:
    """Weights that one side has in full where the other has them rounded, by name: they are what both mean."""
    if a.module is None or b.module is None:
        return {}
    ours, theirs = dict(a.module.named_parameters()), dict(b.module.named_parameters())
    found: dict[str, Tensor] = {}
    for name in ours.keys() & theirs.keys():
        x, y = ours[name].detach(), theirs[name].detach()
        fine, coarse = (x, y) if x.element_size() > y.element_size() else (y, x)
        if fine.element_size() > coarse.element_size() and torch.equal(fine.to(coarse.dtype), coarse):
            found[name] = fine
    return found


def run_side(
    function: Callable[..., Any],
    given: Given,
    *,
    dtype: torch.dtype | None = None,
    cotangents: Mapping[str, Tensor] | None = None,
    backward: bool = True,
    look: bool = False,
    modes: Sequence[Any] = (),
    around: Around = contextlib.nullcontext,
) -> Ran:
    """Run a computation once, forward and backward; its weights, their gradients and its buffers stay as they are.

    The loss of the backward pass is the sum of the outputs, each multiplied by fixed random numbers that every format
    holds: all runs of a comparison have the same. Random numbers of the computation itself start from the same seed.

    Args:
        function: What is called.
        given: Its arguments.
        dtype: Of floating-point inputs; None leaves it.
        cotangents: Numbers to multiply outputs by; None draws them.
        backward: Whether gradients are computed.
        look: Whether layers, and what they are called with, are kept.
        modes: Dispatch modes to run in, the outermost first.
        around: Gives the context for the forward pass.
    """
    ran = Ran()
    module = function if isinstance(function, nn.Module) else None
    weights = dict(unwrap(module).named_parameters()) if module is not None else {}
    fresh = given.fresh(dtype, tracked=module is None and backward)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cast("contextlib.AbstractContextManager[Any]", torch.random.fork_rng()))
        torch.manual_seed(_SEED)  # pyright: ignore[reportUnknownMemberType]
        stack.enter_context(_kept_buffers(module))
        stack.enter_context(torch.set_grad_enabled(backward))
        if look and module is not None:
            stack.enter_context(_watched(module, ran))
        held = {**fresh.tensors(), **_float_buffers(module)}
        versions = {name: _count_writes(t) for name, t in held.items()}
        for mode in modes:
            stack.enter_context(mode)
        with around():
            made = function(*fresh.args, **fresh.kwargs)
        ran.written = {name for name, t in held.items() if _count_writes(t) != versions[name]}
        tensors = _named(made, "output")
        floats = {name: t for name, t in tensors.items() if t.is_floating_point()}
        if backward:
            wanted = {name: p for name, p in weights.items() if p.requires_grad and p.is_floating_point()}
            wanted |= {name: t for name, t in fresh.tensors().items() if t.requires_grad}
            _differentiate(floats, wanted, cotangents, ran)
        ran.after = {name: t.detach().clone() for name, t in held.items()}
    ran.outputs = {name: t.detach() for name, t in floats.items()}
    ran.choices = {name: t.detach() for name, t in tensors.items() if not t.is_floating_point()}
    ran.random = any(getattr(mode, "random", False) for mode in modes)
    return ran


def _differentiate(
    outputs: dict[str, Tensor], wanted: dict[str, Tensor], cotangents: Mapping[str, Tensor] | None, ran: Ran
) -> None:
    tracked = {name: t for name, t in outputs.items() if t.requires_grad}
    if not tracked or not wanted:
        return
    generators: dict[torch.device, torch.Generator] = {}
    for name, output in tracked.items():
        drawn = cotangents.get(name) if cotangents is not None else None
        if drawn is None:
            # Eighths up to 2: every format holds them. One number is a loss, and has a gradient of 1.
            device = output.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(_COTANGENT_SEED)
            drawn = torch.randint(-16, 16, output.shape, generator=generators[device], device=device).float()
            drawn = (drawn + (drawn >= 0)) / 8 if output.dim() else torch.ones((), device=device)
        ran.cotangents[name] = drawn.to(device=output.device, dtype=output.dtype)
    outs, inputs, weights = list(tracked.values()), list(wanted.values()), list(ran.cotangents.values())
    found = cast("tuple[Tensor | None, ...]", torch.autograd.grad(outs, inputs, weights, allow_unused=True))
    ran.gradients = {name: g.detach() for name, g in zip(wanted, found, strict=True) if g is not None}


def _float_buffers(module: nn.Module | None) -> dict[str, Tensor]:
    buffers = dict[str, Tensor]() if module is None else dict(unwrap(module).named_buffers())
    return {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}


def _count_writes(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 for one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def _kept_buffers(module: nn.Module | None) -> Generator[None]:
    """Running statistics are those from before, at the end."""
    buffers = [] if module is None else list(module.buffers())
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)


@contextlib.contextmanager
def _watched(root: nn.Module, ran: Ran) -> Generator[None]:
    """Keep what modules below the root are called with, what they give and the gradients of that."""
    hooks: list[Any] = []
    counts: dict[str, int] = {}
    pending: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            counts[name] = counts.get(name, 0) + 1
            label = name if counts[name] == 1 else f"{name} ({counts[name]})"
            pending.append(label)
            ran.calls[label] = Given(args, kwargs).fresh(None, tracked=False)

        return note

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        label = pending.pop()
        for place, tensor in _named(output, "").items():
            if tensor.is_floating_point():
                key = f"{label}{place}"
                ran.layers[key] = tensor.detach().clone()
                if tensor.requires_grad:
                    hooks.append(tensor.register_hook(_keeper(ran.layer_gradients, key)))  # pyright: ignore
                return  # the first one stands for the layer

    for name, child in name_modules(root).items():
        hooks.append(child.register_forward_pre_hook(enter(name), with_kwargs=True))
        hooks.append(child.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _keeper(into: dict[str, Tensor], key: str) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        into[key] = gradient.detach().clone()

    return keep


def _named(tree: Any, root: str) -> dict[str, Tensor]:
    leaves, _ = tree_flatten_with_path(tree)
    return {f"{root}{keystr(path)}": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _short(name: str) -> str:
    """'input[0][1]' is positional argument 1, "input[1]['x']" the one named x."""
    return f"input{name[len('input[0]') :]}"
