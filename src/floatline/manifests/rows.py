"""What a manifest is made of besides holdings: work, updates, states, sums of gradients and switches. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class WorkRow:
    """Products and convolutions of one phase that ran in one format.

    Args:
        phase: Where.
        region: Format of the autocast region that they ran in; 'disabled' where it was switched off, 'off' outside.
        format: What they computed in.
        flops: How much.
        example: The module that has the most of it; '' where no module ran.
    """

    phase: Phase
    region: str
    format: str
    flops: int
    example: str = ""


@dataclass(frozen=True)
class RanRow:
    """Operations of one kind that ran in one format.

    Args:
        kind: Such as 'softmax'.
        name: The operation, such as 'aten._log_softmax'.
        format: What it computed in.
        num: How often.
    """

    kind: Literal["softmax", "norm", "loss", "attention"]
    name: str
    format: str
    num: int


@dataclass(frozen=True)
class UpdateRow:
    """What became of the updates of one group of weights in this step.

    Args:
        group: Layer group.
        format: Of the tensors that the optimizer updates.
        num_updates: Elements that were looked at and had a gradient other than zero, and a learning rate above zero.
        num_lost: Those that came out of the step as they went into it.
        num_decays: Elements that weight decay was to shrink.
        num_decays_lost: Those that it left as they were.
        rate: The largest learning rate.
        decay: The largest weight decay.
        example: The weight that lost the most.
    """

    group: str
    format: str
    num_updates: int
    num_lost: int
    num_decays: int = 0
    num_decays_lost: int = 0
    rate: float = 0.0
    decay: float = 0.0
    example: str = ""


@dataclass(frozen=True)
class StateRow:
    """States that are multiplied by a decay in every step.

    Args:
        name: Such as 'exp_avg_sq'.
        format: What they are held in.
        decay: What they are multiplied by.
        num: Elements that were looked at and are not zero.
        num_stuck: Those that the product rounds back to what they are.
    """

    name: str
    format: str
    decay: float
    num: int
    num_stuck: int


@dataclass(frozen=True)
class SumRow:
    """Gradients of several backward passes, added up.

    Args:
        format: What they are added in.
        num_passes: How many.
        total: Sum of the magnitudes of the FP32 sums.
        lost: Sum of the distances from those.
    """

    format: str
    num_passes: int
    total: float
    lost: float

    @property
    def share(self) -> float:
        """What was lost of the accumulated gradient."""
        return self.lost / self.total if self.total else 0.0


@dataclass(frozen=True)
class PeakRow:
    """The largest magnitude that products and sums of the forward pass gave in one format.

    Args:
        format: The format.
        largest: That magnitude.
        end: The format's largest number.
        example: The module that gave it.
    """

    format: str
    largest: float
    end: float
    example: str = ""


@dataclass(frozen=True)
class TiedRow:
    """Two weights that hold the same numbers in different formats: they were tied, and train apart.

    Args:
        names: Of the weights.
        formats: In the same order.
    """

    names: tuple[str, str]
    formats: tuple[str, str]


@dataclass(frozen=True)
class RankRow:
    """Something that another process does not have as the first one does.

    Args:
        rank: The other process.
        what: Such as 'weights of body'.
        first: How it is in the first process.
        other: How it is in the other.
    """

    rank: int
    what: str
    first: str
    other: str


@dataclass(frozen=True)
class ExchangeRow:
    """What processes exchange gradients and weights in.

    Args:
        kind: Who says so, or does it: FSDP2's policy, DDP, a communication hook of it, what DeepSpeed or Megatron are
            set to, or the loop itself.
        module: The module that it is set for; '' is the root. For a hook, its name.
        param: Format of gathered weights; '' where it is not said.
        reduce: Format that gradients are summed up in.
        output: Format of the module's output.
    """

    kind: Literal["fsdp2", "ddp", "ddp-hook", "deepspeed", "megatron", "loop"]
    module: str
    param: str = ""
    reduce: str = ""
    output: str = ""

    @property
    def who(self) -> str:
        """Who exchanges: 'ddp-hook fp16_compress_hook'."""
        return f"{self.kind} {self.module}".strip()

    @property
    def formats(self) -> str:
        """What in: 'param bf16, reduce fp32'."""
        said = {"param": self.param, "reduce": self.reduce, "output": self.output}
        return ", ".join(f"{name} {short}" for name, short in said.items() if short) or "as it is"


@dataclass(frozen=True)
class Switches:
    """Switches of torch that let FP32 or sums of 16-bit products be less than they seem; None: torch does not say.

    Args:
        matmul: What FP32 products on a GPU may be: 'highest' is FP32, 'high' and 'medium' are less.
        tf32_convolutions: Whether FP32 convolutions on a GPU may be TF32.
        fp16_reductions: Whether cuBLAS may add up FP16 products in FP16.
        bf16_reductions: Whether cuBLAS may add up BF16 products in BF16.
    """

    matmul: str | None = None
    tf32_convolutions: bool | None = None
    fp16_reductions: bool | None = None
    bf16_reductions: bool | None = None
