"""Every private name of torch and of the frameworks that floatline touches: for what, and what happens without it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from floatline import __version__

TESTED = "2.6 to 2.13"
"""The torch versions in which the names were looked up."""


@dataclass(frozen=True)
class Private:
    """Names that are used together.

    Args:
        names: Dotted, as they are reached; `()` stands for an instance.
        use: What floatline does with them.
        fallback: What it does where they are missing; None: what needs them is refused, in one line on the command
            line, and by Python's own error in a script.
        only: Which versions have them, where not all tested ones do.
    """

    names: tuple[str, ...]
    use: str
    fallback: str | None = None
    only: str = ""


_FOREACH = "add add_ addcdiv_ addcmul_ copy_ div_ lerp_ mul mul_ neg norm sign_ sqrt"

PRIVATES: tuple[Private, ...] = (
    Private(
        tuple(f"torch._foreach_{name}" for name in _FOREACH.split()),
        "one launch for many tensors: optimizer rules, clipping, norms",
        fallback="one tensor after the other, with the same results (numerics/foreach.py)",
    ),
    Private(
        ("torch._amp_foreach_non_finite_check_and_unscale_",),
        "divides gradients by the scale and looks for inf and NaN",
        fallback="the same in separate operations (numerics/foreach.py)",
    ),
    Private(
        ("torch._disable_dynamo",),
        "keeps torch.compile out of the optimizer's step and of what a plan puts around functions and modules",
        fallback="torch.compiler.disable",
    ),
    Private(
        (
            "torch.optim.Optimizer()._optimizer_step_pre_hooks",
            "torch.optim.Optimizer()._optimizer_step_post_hooks",
            "torch.optim.optimizer._global_optimizer_pre_hooks",
            "torch.optim.optimizer._global_optimizer_post_hooks",
            "torch.autograd._profiler_enabled",
        ),
        "tell whether anyone listens to a step, to leave torch's wrapper out where nobody does",
        fallback="the wrapper is always called",
    ),
    Private(
        ("torch.distributed.tensor._utils.compute_local_shape_and_global_offset",),
        "where the part of a DTensor begins",
        fallback="computed from mesh and placements (optim/mesh.py)",
    ),
    Private(
        (
            "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
            "torch.distributed.fsdp.FSDPState()._fsdp_param_group",
            "torch.distributed.fsdp.FSDPState()._fsdp_param_groups",
            "torch.distributed.fsdp.FSDPParam()._unsharded_param",
        ),
        "drop gradients that FSDP2 holds back after a step that raised in the midst of its micro-batches",
        fallback="they are left to zero_grad",
        only="the group in older, the groups in newer versions",
    ),
    Private(
        (
            "torch.distributed.fsdp.FSDPState()._mp_policy",
            "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data",
        ),
        "a manifest tells what processes exchange gradients in",
        fallback="it is not told",
    ),
    Private(
        ("torch.cuda._compile_kernel",),
        "compiles the kernel that counts ranges on a GPU",
        fallback="torch's own operations count",
        only="2.8 or newer",
    ),
    Private(
        ("torch.optim.AdamW()._step_supports_amp_scaling",),
        "says that a fused optimizer takes the scale itself",
        fallback="it is treated as one that is not fused",
    ),
    Private(
        ("torch.compile()._orig_mod",),
        "the model inside a compiled one",
        fallback="names keep the word that torch.compile puts in front",
    ),
    Private(
        ("torch._dynamo.utils.counters",),
        "a comparison of compiled code knows whether anything was compiled",
    ),
    Private(
        ("torch.amp.autocast_mode._exit_autocast", "torch._C._set_grad_enabled"),
        "parts of a graph keep the regions of autocast and gradients that they lie in",
    ),
    Private(
        ("torch._inductor.list_mode_options",),
        "what a script's `mode` of torch.compile means in options of Inductor",
    ),
    Private(
        (
            "torch.compile()._torchdynamo_orig_callable",
            "torch.compile.dynamo_ctx.callback()._torchdynamo_orig_backend",
        ),
        "parity finds the function inside a compiled one, and the backend that it was compiled with",
        fallback="a compiled function is only compared as a whole, and Inductor is taken for the backend",
        only="the backend in newer versions",
    ),
    Private(
        (
            "torch.amp.GradScaler()._scale",
            "torch.amp.GradScaler()._enabled",
            "torch.amp.GradScaler()._init_scale",
            "torch.amp.GradScaler()._per_optimizer_states",
            "torch.amp.GradScaler._lazy_init_scale_growth_tracker",
        ),
        "LossScaler is a GradScaler; a diagnosis watches the scaler of a script",
    ),
    Private(
        ("torch._C._nn._parse_to", "torch.autograd._unsafe_preserve_version_counter"),
        "floatline run reads what a script casts its modules to, and puts buffers back between two passes",
    ),
    Private(
        (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
            "torch._C._len_torch_dispatch_stack",
            "torch._C._disabled_torch_dispatch_impl",
            "torch._C._DisableTorchDispatch",
            "torch._C._DisableAutocast",
            "torch._C._set_grad_enabled",
            "torch._C._is_any_autocast_enabled",
            "torch._C._get_dispatch_stack_at",
            "torch.utils._python_dispatch._pop_mode",
            "torch.utils._python_dispatch._push_mode",
        ),
        "the recorder, HalfOnCPU and doctor see every operation, and work beside them",
    ),
    Private(
        (
            "torch._C._get_dispatch_mode",
            "torch._C._TorchDispatchModeKey",
            "torch._C._functorch",
            "torch._C._is_tracing",
            "torch._is_functional_tensor",
            "torch._guards.TracingContext",
            "torch._subclasses.fake_tensor.FakeTensor",
            "torch._subclasses.functional_tensor.FunctionalTensor",
            "torch.fx._symbolic_trace",
        ),
        "a diagnosis tells when torch traces a program, and leaves its tensors alone",
    ),
    Private(
        (
            "torch._functorch.eager_transforms",
            "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
            "torch._functorch.pyfunctorch.temporarily_restore_interpreter_stack",
        ),
        "loops that take their gradients by torch.func are watched",
    ),
    Private(
        ("torch.fx.GraphModule()._lineno_map",),
        "the user's line that an operation of an exported program was recorded from",
        fallback="what an exported program computes has no line",
    ),
    Private(
        ("torch.fx._symbolic_trace._is_fx_tracing_flag",),
        "tells when torch.fx traces a module",
        fallback="a module that FX traces counts as a forward pass",
    ),
    Private(
        (
            "torch._C._dynamo.eval_frame",
            "torch._dynamo.callback.callback_handler",
            "torch._dynamo.trace_rules",
            "torch._dynamo.trace_rules._recompile_re",
        ),
        "a diagnosis lifts its patches while torch.compile works",
        fallback="they stay, and torch.compile reads them, too",
    ),
    Private(
        ("torch.autograd.graph.Node()._saved_other",),
        "the number by which a loss was multiplied by hand",
        fallback="a scale by hand is not known",
    ),
    Private(
        (
            "torch._ops.OpOverload",
            "torch.ops.aten.add.Tensor._schema",
            "torch.ops.aten.add.Tensor._op_dk",
            "torch.ops.aten._neg_view",
            "torch.ops.aten._to_copy",
            "torch._C._dispatch_has_kernel_for_dispatch_key",
            "torch._C._dispatch_get_all_op_names",
            "torch.library.Library._destroy",
        ),
        "what an operation takes and writes, and its kernel; CUDA's autocast lists on a CPU",
    ),
    Private(
        (
            "torch._subclasses.FakeTensor",
            "torch._subclasses.fake_tensor.FakeTensorMode",
            "torch._subclasses.fake_tensor.FakeCopyMode",
        ),
        "doctor counts the memory of a step without having it",
    ),
    Private(
        (
            "torch._C._current_autograd_node",
            "torch._C._current_graph_task_id",
            "torch._C._autograd._get_sequence_nr",
            "torch.autograd.Node()._sequence_nr",
            "torch.autograd.grad_mode._unsafe_preserve_version_counter",
            "torch.Tensor()._version",
            "torch.Tensor()._backward_hooks",
        ),
        "a backward operation is told by the line of its forward; a rewrite knows who else holds a tensor; an "
        "optimizer sees that others wrote to its weights",
    ),
    Private(
        (
            "torch.nn.Module._call_impl",
            "torch.nn.Module._wrapped_call_impl",
            "torch.nn.Module._compiled_call_impl",
            "torch.nn.Module()._parameters",
            "torch.nn.Module()._buffers",
            "torch.nn.Module()._modules",
            "torch.nn.LSTM()._flat_weights",
            "torch.nn.LSTM()._flat_weights_names",
        ),
        "modules of a script are watched; a module computes in FP32 with copies of its weights",
    ),
    Private(
        ("torch.nn.modules.batchnorm._NormBase", "torch.nn.modules.conv._ConvNd", "torch.nn.modules.loss._Loss"),
        "kinds of modules, for where a plan computes",
    ),
    Private(
        (
            "torch.utils._pytree.tree_leaves",
            "torch.utils._pytree.tree_map",
            "torch.utils._pytree.tree_flatten",
            "torch.utils._pytree.tree_unflatten",
            "torch.utils._pytree.tree_flatten_with_path",
            "torch.utils._pytree.TreeSpec",
            "torch.utils._pytree.keystr",
        ),
        "tensors in nested arguments and results",
    ),
    Private(
        ("torch.Tensor._values", "torch.UntypedStorage()._cdata", "torch.autocast()._enabled"),
        "entries of sparse gradients, what shares memory, regions of autocast",
    ),
    Private(
        (
            "torch._C._get_cublas_allow_tf32",
            "torch._C._set_cublas_allow_tf32",
            "torch._C._get_cudnn_allow_tf32",
            "torch._C._set_cudnn_allow_tf32",
        ),
        "FP32 twins are computed without TF32; the public switches warn, or refuse a mix",
    ),
    Private(
        ("torch.utils._device.DeviceContext",),
        '`with torch.device("cuda")` of a script that runs on the CPU by `diagnose --as cuda`',
    ),
    Private(
        ("torch.optim.lr_scheduler.SequentialLR()._schedulers",),
        "schedules inside a schedule",
        fallback="only the outer one is looked at",
    ),
    Private(
        (
            "lightning.pytorch.plugins.Precision._after_closure",
            "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop()._batches_that_stepped",
            "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._should_accumulate",
        ),
        "a step is one step, whatever the closure; the step that loggers count",
    ),
    Private(
        (
            "transformers.Trainer._maybe_log_save_evaluate",
            "transformers.Trainer()._globalstep_last_logged",
            "transformers.Trainer._prepare_inputs",
        ),
        "losses are logged as they were; a failed step is replayed on its own batch",
    ),
    Private(
        (
            "accelerate.state.AcceleratorState()._mixed_precision",
            "accelerate.Accelerator()._models",
            "accelerate.Accelerator()._optimizers",
        ),
        "what was prepared, and in which precision",
    ),
    Private(
        ("mlflow.tracking.fluent._get_experiment_id",),
        "the experiment that the environment names",
        fallback="MLflow's default experiment",
    ),
)


def explain_missing(error: Exception) -> str | None:
    """One line about an ImportError or AttributeError that a private name has caused; None for any other.

    Args:
        error: What was raised.
    """
    if not isinstance(error, AttributeError | ImportError):
        return None
    words = set(re.findall(r"[\w.]+", str(error)))
    for private in PRIVATES:
        for name in private.names if private.fallback is None else ():
            owner, _, last = name.rpartition(".")
            if words & {last, owner} and _is_missing(name, error):
                package = name.partition(".")[0]
                version = getattr(sys.modules.get(package), "__version__", "of another version")
                return (
                    f"{package} {version} has no '{name}', which floatline {__version__} needs: {private.use}. "
                    f"It was tested with torch {TESTED}: use one of these, or a newer floatline."
                )
    return None


def _is_missing(name: str, error: Exception) -> bool:
    """Whether the error is about this name, and not about another one that ends alike."""
    owner = name.rpartition(".")[0]
    if owner.endswith("()"):
        kinds = type(getattr(error, "obj", None)).__mro__
        return any(kind.__name__ == owner[:-2].rpartition(".")[2] for kind in kinds)
    package, *rest = name.split(".")
    found: Any = sys.modules.get(package)
    for word in rest:
        found = getattr(found, word, None)
    return found is None
