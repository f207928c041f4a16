"""Two computations that must agree: how far each is from FP32, where they part, and whose fault it is."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.agreement.comparing import parity
    from floatline.agreement.compiled.arms import CompiledParity, compare_compiled
    from floatline.agreement.compiled.step_result import CompiledStep
    from floatline.agreement.compiled.steps import compare_compiled_step
    from floatline.agreement.logprobs.comparing import LogprobParity, compare_logprobs
    from floatline.agreement.result import Parity

__all__ = [
    "CompiledParity",
    "CompiledStep",
    "LogprobParity",
    "Parity",
    "compare_compiled",
    "compare_compiled_step",
    "compare_logprobs",
    "parity",
]

__getattr__ = offer(
    __name__,
    {
        "CompiledParity": "compiled.arms",
        "CompiledStep": "compiled.step_result",
        "LogprobParity": "logprobs.comparing",
        "Parity": "result",
        "compare_compiled": "compiled.arms",
        "compare_compiled_step": "compiled.steps",
        "compare_logprobs": "logprobs.comparing",
        "parity": "comparing",
    },
)
