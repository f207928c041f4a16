"""WorkWatch: what the products, norms, softmaxes and losses of a step ran in, seen below autocast and autograd."""
# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.formats import FORMATS
from floatline.manifests.reductions import Reductions
from floatline.manifests.rows import PeakRow, Phase, RanRow, WorkRow
from floatline.manifests.samples import OwnSums
from floatline.precision.dtypes import NARROW
from floatline.precision.live_holdings import format_name
from floatline.precision.wrappers import unwrap
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Aside

_aten: Any = torch.ops.aten
_formulas: Any = flop_counter
_Kind = Literal["softmax", "norm", "loss", "attention"]
_KINDS: dict[str, _Kind] = {
    "_softmax": "softmax",
    "_log_softmax": "softmax",
    "native_layer_norm": "norm",
    "native_batch_norm": "norm",
    "native_group_norm": "norm",
    "_fused_rms_norm": "norm",
}
# Sums of activations, whose results are the largest numbers of many models.
_ADDS = ("add", "add_")
# Collectives, as they are called and as DTensor calls them.
_EXCHANGES = ("c10d", "_c10d_functional")
# What changes its first argument by a part of itself.
_INTO = ("add_", "sub_", "mul_", "lerp_", "addcmul_", "index_add_", "scatter_add_")


def _count_cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _formulas.sdpa_flop_count(query.shape, key.shape, value.shape)


def _count_cpu_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _formulas.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _find_counters() -> dict[Any, Callable[..., int]]:
    """How the FLOPs of an operation are counted; torch's table leaves out the attention kernel of a CPU."""
    known = cast("dict[Any, Callable[..., int]]", dict(flop_counter.flop_registry))
    own = {
        "_scaled_dot_product_flash_attention_for_cpu": _count_cpu_attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _count_cpu_attention_backward,
    }
    return known | {getattr(_aten, name): count for name, count in own.items() if hasattr(_aten, name)}


class WorkWatch(TorchDispatchMode):
    """Counts FLOPs by phase, autocast region and format; notes kinds of operations, and the largest activations.

    It may be entered more than once; what it counts is added up.

    Attributes:
        reductions: What processes sum up gradients in.
        own_sums: Gradients that the loop adds up by itself.
        averages: Ids of 16-bit buffers that something is added to.

    Args:
        seen: Knows which autocast regions are open.
    """

    def __init__(self, seen: Watch) -> None:
        super().__init__()
        self._regions = seen.regions
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._hooks: list[Any] = []
        self._counters = _find_counters()
        self._flops: Counter[tuple[Phase, str, str, str]] = Counter()
        self._ran: Counter[tuple[_Kind, str, str]] = Counter()
        self._peaks: dict[tuple[str, str], Tensor] = {}
        self._loss: tuple[str, str] | None = None
        self.reductions = Reductions()
        self.own_sums = OwnSums()
        self.averages: set[int] = set()
        self._narrow_buffers: set[int] = set()
        self._went_back = False  # since the last product of a forward pass
        self._num_backward = 0

    def name_modules(self, models: Sequence[nn.Module]) -> None:
        """Know modules by their names from here on."""
        self.reductions.know(models)
        self.own_sums.know(models)
        # By their names: Megatron has a list for `buffers`.
        buffers = (buffer for model in models for _, buffer in model.named_buffers())
        self._narrow_buffers = {id(buffer) for buffer in buffers if buffer.dtype in NARROW}
        for model in map(unwrap, models):
            prefix = f"{type(model).__name__}." if len(models) > 1 else ""
            named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
            self._names |= {id(module): f"{prefix}{name}".rstrip(".") for name, module in named}

    def __enter__(self) -> WorkWatch:
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._stack = [], []

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))

    def _leave_module(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def __torch_dispatch__(  # pyright: ignore[reportImplicitOverride, reportIncompatibleMethodOverride]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and note it; torch calls this."""
        del types
        kwargs = kwargs or {}
        if func.namespace in _EXCHANGES:
            self.reductions.see(func.overloadpacket.__name__, args)
        packet = func.overloadpacket
        if packet.__name__ in _INTO and args and id(args[0]) in self._narrow_buffers:
            self.averages.add(id(args[0]))
        aside = self._went_back and not self._stack
        adds = aside and packet.__name__ in OwnSums.NAMES
        out = self.own_sums.adding(func, args, kwargs) if adds else func(*args, **kwargs)
        if aside and packet.__name__ == "add":
            self.own_sums.added(out, args, kwargs, self._num_backward)
        count = self._counters.get(packet)
        phase: Phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        if self._loss is not None and phase == "backward":
            self._ran[("loss", *self._loss)] += 1
            self._loss = None
        if count is not None:
            self._count(packet, count, args, kwargs, out, phase)
        elif phase == "forward":
            self._note(packet.__name__, args, out)
        return out

    def _count(self, packet: Any, count: Callable[..., int], args: Any, kwargs: Any, out: Any, phase: Phase) -> None:
        first = next((arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), None)
        if first is None:
            return
        self._num_backward += phase == "backward" and not self._went_back
        self._went_back = phase == "backward"
        key = phase, self._region(first.device.type, phase), format_name(first.dtype), self._where(phase)
        self._flops[key] += count(*args, **kwargs, out_val=out)
        if phase == "backward":
            return
        if "attention" in packet.__name__:
            self._ran["attention", packet.__name__, format_name(first.dtype)] += 1
        self._see_peak(out)

    def _region(self, device: str, phase: Phase) -> str:
        state = "off" if phase == "backward" else self._regions.state
        return format_name(torch.get_autocast_dtype(device)) if state == "on" else state

    def _where(self, phase: Phase) -> str:
        return self._stack[-1] if self._stack and phase == "forward" else ""

    def _note(self, name: str, args: Any, out: Any) -> None:
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        result = _first_of(out)
        if result is None or first is None:
            return
        if name in _KINDS:
            self._ran[_KINDS[name], name, format_name(first.dtype)] += 1
        elif name in _ADDS and result.dtype == torch.float16:
            self._see_peak(result)
        # The loss is the last number that many are reduced to, before anything goes backward.
        if result.numel() == 1 and first.numel() > 1:
            self._loss = name, format_name(result.dtype)

    def _see_peak(self, out: Any) -> None:
        result = _first_of(out)
        if result is None or not result.numel():
            return
        with Aside():
            low, high = result.detach().aminmax()
            top = torch.maximum(-low, high)
            key = format_name(result.dtype), self._where("forward")
            old = self._peaks.get(key)
            self._peaks[key] = top if old is None else torch.maximum(old, top)

    @property
    def work(self) -> tuple[WorkRow, ...]:
        """FLOPs by phase, region and format."""
        found: dict[tuple[Phase, str, str], Counter[str]] = {}
        for (phase, region, name, module), flops in self._flops.items():
            found.setdefault((phase, region, name), Counter())[module] += flops
        return tuple(WorkRow(*key, own.total(), own.most_common(1)[0][0]) for key, own in found.items())

    @property
    def ran(self) -> tuple[RanRow, ...]:
        """Kinds of operations by format."""
        return tuple(RanRow(*key, num) for key, num in self._ran.items())

    @property
    def peaks(self) -> tuple[PeakRow, ...]:
        """The largest activation of each format; waits for the device."""
        found: dict[str, PeakRow] = {}
        for (name, module), top in self._peaks.items():
            largest = float(top)
            if name in FORMATS and (name not in found or not largest <= found[name].largest):
                found[name] = PeakRow(name, largest, FORMATS[name].max, module)
        return tuple(found.values())


def _first_of(out: Any) -> Tensor | None:
    """What an operation gives, or the first of several; None where that is no floating-point tensor."""
    parts = cast("tuple[Any, ...]", out) if isinstance(out, tuple) else (out,)
    result = next(iter(parts), None)
    return result if isinstance(result, Tensor) and result.is_floating_point() else None
