"""Two computations that must agree: how far each is from FP32, where they part, and whose fault it is."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.agreement.comparing import parity
    from floatline.agreement.compiled.arms import CompiledParity, compare_compiled
    from floatline.agreement.logprobs.comparing import LogprobParity, compare_logprobs
    from floatline.agreement.result import Parity

__all__ = ["CompiledParity", "LogprobParity", "Parity", "compare_compiled", "compare_logprobs", "parity"]

__getattr__ = offer(
    __name__,
    {
        "CompiledParity": "compiled.arms",
        "LogprobParity": "logprobs.comparing",
        "Parity": "result",
        "compare_compiled": "compiled.arms",
        "compare_logprobs": "logprobs.comparing",
        "parity": "comparing",
    },
)
