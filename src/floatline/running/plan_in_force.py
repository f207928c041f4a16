"""PlanInForce: a plan put into force in a script from outside, from its first line to its last."""

# torch lets a tensor keep its version under a private name only.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Container, Generator, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from floatline.errors import PlanError
from floatline.guard.kernels import fused_for
from floatline.guard.step.buffers import Buffers
from floatline.plans import Plan
from floatline.plans.plan import match_modules, name_modules
from floatline.precision.applied_plan import LOSS, AppliedPlan, check_code
from floatline.precision.dtypes import DTYPES, NARROW
from floatline.precision.islands import LineIslands, cast_weights
from floatline.precision.wrappers import unwrap
from floatline.probe.steps.other_precision import AutocastState, as_fp32
from floatline.probe.watch.patches import Patches
from floatline.running.exact_updates import ExactUpdates
from floatline.running.outer_calls import OuterCalls
from floatline.running.outside_scale import OutsideScale

StepListener = Callable[[Optimizer, bool], None]


@contextlib.contextmanager
def plan_in_force(plan: Plan, on_step: StepListener | None = None) -> Generator[PlanInForce]:
    """Any training script that runs inside trains under a plan; nothing of it is edited.

    - FP32: see `as_fp32`. Otherwise modules compute in the plan's format, see `OuterCalls`.
    - FP16 is scaled around each backward pass, see `OutsideScale`; the script's own scalers do nothing. Buffers, such
      as running statistics, go back where a step is left out. Only steps of torch's optimizers are left out: a script
      that writes its updates itself sees the gradients of an overflow.
    - 16-bit weights take exact updates, see `ExactUpdates`.
    - FP32 modules, functions and rewrites come into force when a model is first called in training, since only then
      all of it is there.

    `accumulate` is the script's own business: a plan that asks for it is refused.

    Args:
        plan: What to train in.
        on_step: Told of each optimizer's step, before it is made, and whether it will be.

    Raises:
        PlanError: The plan cannot be put into force in a script.
    """
    if plan.accumulate > 1:
        raise PlanError(
            f"Plan '{plan.name}' sums up {plan.accumulate} batches a step, which is for a script's own loop to do. "
            "Take 'accumulate' out of the plan, and let the script accumulate."
        )
    force = PlanInForce(plan, on_step or _hear_nothing)
    patches = Patches()
    with contextlib.ExitStack() as stack:
        stack.callback(AutocastState.now().restore)  # what leaves a region inside sets the plan's format
        if plan.compute == "fp32":
            stack.enter_context(as_fp32())
        stack.callback(patches.undo)  # before as_fp32 puts back what it has replaced itself
        stack.callback(force.patch(patches))
        if force.lines:
            enter_lines(stack, patches, force.lines)
        try:
            yield force
        finally:
            force.remove()


class PlanInForce:
    """What is in force; see `plan_in_force`.

    Args:
        plan: What to train in.
        on_step: Told of each optimizer's step.

    Attributes:
        scale: The loss scale.
        lines: Lines that compute in FP32; false where the plan names none.
    """

    def __init__(self, plan: Plan, on_step: StepListener) -> None:
        self._plan, self._on_step = plan, on_step
        self._fp32 = plan.compute == "fp32"
        self.scale = OutsideScale(plan.scaling, plan.clip, self._begin_step)
        # torch's own optimizers round small updates of 16-bit weights away.
        exact = ExactUpdates(plan, self.scale.hide)
        self._updates = None if plan.weights == "fp32" else exact
        self._trained: dict[int, weakref.ref[Tensor]] = {}
        self._is_settled = True
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._applied: list[AppliedPlan] = []
        self._buffers: list[Buffers] = []
        self.lines = NamedLines(plan)

    def patch(self, patches: Patches) -> Callable[[], None]:
        """Put it into force; gives what ends it, beside undoing the patches."""
        if not self._fp32:
            wide_loss = any(kept.function == LOSS for kept in self._plan.fp32_functions)
            OuterCalls(self._plan, self._begin_call, wide_loss=wide_loss).patch(patches)
            patches.wrap(Optimizer, "add_param_group", self._adding)
        if self._updates is not None:
            self._updates.patch(patches)
        return self.scale.patch(patches)

    def remove(self) -> None:
        """Put models and functions back as they were."""
        for applied in self._applied:
            applied.remove()

    def _adding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            original(optimizer, param_group)
            self._know(optimizer.param_groups[-1]["params"])

        return add_param_group

    def _know(self, params: Iterable[Tensor]) -> None:
        """Take in what an optimizer trains."""
        new = [p for p in params if (known := self._trained.get(id(p))) is None or known() is not p]
        if self._plan.weights == "fp32":
            _widen_weights(new)
        self._trained.update({id(p): weakref.ref(p) for p in new})
        # Other tensors, such as inputs that are attacked, lie in no model.
        self._is_settled = self._is_settled and not any(isinstance(p, nn.Parameter) for p in new)

    def _begin_call(self, module: nn.Module) -> None:
        """A module is called from outside of all modules."""
        if not (module.training and torch.is_grad_enabled()):
            return
        if not self._is_settled:
            self._settle()
            self._is_settled = True  # what raises does so again, also where the script goes on
        for buffers in self._buffers:
            buffers.keep()

    def _settle(self) -> None:
        """All models are there: what the plan says of their parts comes into force."""
        self._trained = {key: ref for key, ref in self._trained.items() if ref() is not None}
        params = [p for ref in self._trained.values() if (p := ref()) is not None]
        roots = [unwrap(root) for root in find_roots(params)]
        new = [root for root in roots if root not in self._roots]
        for root in new:
            if self._plan.weights != "fp32":
                self._cast(root)
        plans = _share_out(self._plan, roots)
        for root in new:
            own = plans[id(root)]
            if own.fp32_modules or own.fp32_functions or own.rewrites or own.tf32:
                self._applied.append(AppliedPlan(root, own))
            if self._plan.scaling is not None and next(root.buffers(), None) is not None:
                kept = Buffers(root, fused_for=fused_for)
                kept.remove()  # the outermost call tells when a step begins
                self._buffers.append(kept)
            self._roots.add(root)

    def _cast(self, root: nn.Module) -> None:
        dtype = DTYPES[self._plan.weights]
        trained = [p for p in root.parameters() if id(p) in self._trained]
        if all(p.dtype != torch.float32 for p in trained) or any(p.dtype == dtype for p in trained):
            return  # the script's own cast says which weights stay in FP32
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise PlanError(
                f"Plan '{self._plan.name}' has {self._plan.weights} weights, and DDP has laid out FP32 ones already. "
                "Cast the model in the script before it is wrapped, or use a plan with FP32 weights."
            )
        cast_weights(root, self._plan)

    def _begin_step(self, optimizer: Optimizer, applied: bool) -> None:
        if not self._fp32:
            self._know(p for group in optimizer.param_groups for p in group["params"])  # one that was copied or loaded
        self._on_step(optimizer, applied)
        for buffers in self._buffers:
            # A pass that is still to come, as of a generator behind its discriminator's step, has saved them.
            with torch.autograd._unsafe_preserve_version_counter(buffers.tensors):
                buffers.settle(torch.tensor(applied, device="cpu"))
        if applied and self._updates is not None:
            self._updates.step(optimizer)


class NamedLines:
    """The lines that a plan keeps in FP32, wherever they stand; files are known by the ends of their paths.

    Args:
        plan: Its FP32 functions, of which some are lines.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan.name
        self._named = [
            (Path(file).parts, int(line), kept)
            for kept in plan.fp32_functions
            for file, _, line in [kept.function.rpartition(":")]
            if line.isdigit()
        ]
        self._known: dict[tuple[str, int], bool] = {}

    def __bool__(self) -> bool:
        return bool(self._named)

    def __contains__(self, line: object) -> bool:
        place = cast("tuple[str, int]", line)
        if place not in self._known:
            self._known[place] = self._is_named(*place)
        return self._known[place]

    def _is_named(self, file: str, line: int) -> bool:
        parts = Path(file).parts
        for ending, number, kept in self._named:
            if number == line and parts[-len(ending) :] == ending:
                check_code(kept, file, line, self._plan)
                return True
        return False


def find_roots(params: Iterable[Tensor]) -> list[nn.Module]:
    """The modules that hold some of these parameters and lie in no other module, wrapped ones as their wrappers."""
    wanted = {id(param) for param in params}
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    inner = {id(child) for one in modules for child in one.children()}
    outer = [one for one in modules if id(one) not in inner]
    return [one for one in outer if any(id(param) in wanted for param in one.parameters())]


def _share_out(plan: Plan, roots: list[nn.Module]) -> dict[int, Plan]:
    """The plan for each of several models: patterns are for those that they match, lines for the whole script."""
    functions = tuple(
        k for k in plan.fp32_functions if k.function != LOSS and not k.function.rpartition(":")[2].isdigit()
    )
    names = {id(root): name_modules(root) for root in roots}
    largest = max(roots, key=lambda root: len(names[id(root)]), default=None)

    def fits(pattern: str, root: nn.Module, said: str) -> bool:
        with contextlib.suppress(PlanError):
            return bool(match_modules(names[id(root)], pattern, said=said))
        if root is largest and not any(fits(pattern, other, said) for other in roots if other is not root):
            match_modules(names[id(root)], pattern, said=said)  # raises, with the nearest names
        return False

    return {
        id(root): plan.model_copy(
            update={
                "fp32_modules": tuple(
                    kept
                    for kept in plan.fp32_modules
                    if fits(kept.pattern, root, f"Plan '{plan.name}' keeps '{kept.pattern}' in FP32")
                ),
                "rewrites": tuple(
                    rewrite
                    for rewrite in plan.rewrites
                    if (rewrite.function and root is largest)
                    or (
                        rewrite.module
                        and fits(rewrite.module, root, f"Plan '{plan.name}' rewrites in '{rewrite.module}'")
                    )
                ),
                "fp32_functions": functions if root is largest else (),
            }
        )
        for root in roots
    }


def enter_lines(
    stack: contextlib.ExitStack, patches: Patches, lines: Container[tuple[str, int]], *, widens: bool = False
) -> None:
    """Lines compute in FP32 from here on, in what a backward pass computes again as well; see `LineIslands`."""
    islands = stack.enter_context(LineIslands(lines, widens=widens))
    patches.wrap(torch.autograd, "_engine_run_backward", lambda run: _run_inside(run, islands))


def _run_inside(run: Callable[..., Any], islands: LineIslands) -> Callable[..., Any]:
    """Tensor.backward is one function to a mode: without this, a checkpoint would run again without the mode."""

    def run_inside(*args: Any, **kwargs: Any) -> Any:
        with islands:
            return run(*args, **kwargs)

    return run_inside


@torch.no_grad()
def _widen_weights(params: Iterable[Tensor]) -> None:
    for param in params:
        if param.dtype in NARROW:
            param.data = param.data.float()


def _hear_nothing(_optimizer: Optimizer, _applied: bool) -> None:
    pass
