"""Muon: matrices moved along an orthogonal direction, everything else by AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from floatline.errors import OptimizerError, suggest
from floatline.numerics.orthogonal import COEFFICIENTS, Coefficients, NewtonSchulzName
from floatline.optim import rules
from floatline.optim.optimizer import Optimizer
from floatline.optim.rules import StatesName, UpdateName

_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class Muon(Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for 16- and 32-bit weights.

    Matrices are moved along their momentum with its singular values brought near 1; what is no matrix is trained by
    AdamW, in a parameter group of its own. A group with `"algorithm": "adamw"` is trained by AdamW whatever its shapes
    are: give embeddings and the output layer so.

    Numerics:
        The arithmetic is torch.optim.Muon's, in its order: on a CPU the trained float32 numbers of matrices are bit for
        bit torch's on float32 weights, with ns_dtype "bf16"; those of the others are torch.optim.AdamW's. Shards of
        FSDP2 end with the bits of one process. Checked by tests/optim/test_muon.py.

    Args:
        params: Tensors, named tensors or parameter groups.
        lr: Learning rate of matrices.
        weight_decay: Share of lr by which matrices shrink each step.
        momentum: Share of the momentum that is kept.
        nesterov: Look ahead along the momentum.
        ns_coefficients: Of the Newton–Schulz polynomial.
        eps: The least norm of a momentum that is divided by.
        ns_steps: Newton–Schulz steps, 1 to 99.
        adjust_lr_fn: How the step's size follows the shape: "original" (sqrt of rows / columns, at least 1), which is
            also None's, or "match_rms_adamw" (0.2 · sqrt of the longer side), with which AdamW's lr can be used.
        maximize: Go up the gradient.
        foreach: Taken and ignored, so that another class can be replaced by name: there is one implementation.
        fused: Taken and ignored; a step is fused where the device can do it.
        capturable: Taken and ignored; on a GPU every step can be captured in a CUDA graph.
        ns_dtype: What Newton–Schulz computes in: "bf16" (torch's), "fp16" (a tenth of its error) or "fp32".
        adamw: AdamW's lr, betas, eps and weight_decay, where they are not torch's.
        update: How a 16-bit weight takes its update: "exact", "stochastic", "kahan" or "nearest".
        states: How momentum and moments are stored: "fp32", "bf16" or "int8".
        seed: Key of random choices.

    Example:
        >>> model = torch.nn.Linear(8, 8).to(torch.bfloat16)
        >>> optimizer = floatline.optim.Muon(model.parameters(), lr=0.02, adamw={"lr": 3e-4})
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        maximize: bool = False,
        foreach: bool | None = None,  # noqa: ARG002
        fused: bool | None = None,  # noqa: ARG002
        capturable: bool = False,  # noqa: ARG002
        ns_dtype: NewtonSchulzName = "bf16",
        adamw: Mapping[str, Any] | None = None,
        update: UpdateName = "exact",
        states: StatesName = "fp32",
        seed: int = 0,
    ) -> None:
        for name in adamw or {}:
            if name not in _ADAMW:
                raise OptimizerError(f"adamw has no setting {name!r}. {suggest(name, _ADAMW)}")
        self.adamw = {**_ADAMW, **(adamw or {})}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "maximize": maximize,
            "ns_dtype": ns_dtype,
            "betas": self.adamw["betas"],
            "algorithm": "muon",
        }
        super().__init__(params, defaults, rule=rules.MUON, update=update, states=states, seed=seed)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "adamw": self.adamw}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that does not say its algorithm becomes two where it holds matrices and others.

        Args:
            param_group: "params", settings that differ from the defaults, and "algorithm": "muon" or "adamw".
        """
        given = param_group["params"]
        params: list[Any] = [given] if isinstance(given, Tensor) else list(given)
        if "algorithm" in param_group or not params:
            self._add({**param_group, "params": params})
            return
        matrices = [item for item in params if _is_matrix(item)]
        others = [item for item in params if not _is_matrix(item)]
        own = {name: value for name, value in param_group.items() if name not in ("lr", "eps", "weight_decay")}
        if matrices:
            self._add({**param_group, "params": matrices})
        if others:
            self._add({**own, "params": others, "algorithm": "adamw"})

    def _add(self, group: dict[str, Any]) -> None:
        algorithm = group.get("algorithm", "muon")
        if algorithm not in ("muon", "adamw"):
            raise OptimizerError(f"Algorithm {algorithm!r} is not known. {suggest(str(algorithm), ('muon', 'adamw'))}")
        if algorithm == "adamw":
            group = {**self.adamw, **group}
        for item in group["params"]:
            if algorithm == "muon" and isinstance(_tensor(item), Tensor) and not _is_matrix(item):
                raise OptimizerError(
                    f"A parameter of shape {tuple(_tensor(item).shape)} is no matrix. "
                    'Give its group "algorithm": "adamw", or no algorithm.'
                )
        super().add_param_group(group)


def _tensor(item: Any) -> Any:
    return cast("tuple[str, Any]", item)[1] if isinstance(item, tuple) else item


def _is_matrix(item: Any) -> bool:
    return getattr(_tensor(item), "ndim", 2) == 2
