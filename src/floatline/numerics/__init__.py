"""Tensors against number formats: ranges, rounding, the exact split of FP32, half precision on a CPU."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.numerics.cuda_autocast import cuda_autocast_lists
    from floatline.numerics.half_on_cpu import HalfOnCPU
    from floatline.numerics.ranges import Ranges, measure_ranges
    from floatline.numerics.rounding import round_nearest, round_stochastic
    from floatline.numerics.split import join_master, split_master

__all__ = [
    "HalfOnCPU",
    "Ranges",
    "cuda_autocast_lists",
    "join_master",
    "measure_ranges",
    "round_nearest",
    "round_stochastic",
    "split_master",
]

__getattr__ = offer(
    __name__,
    {
        "HalfOnCPU": "half_on_cpu",
        "Ranges": "ranges",
        "cuda_autocast_lists": "cuda_autocast",
        "join_master": "split",
        "measure_ranges": "ranges",
        "round_nearest": "rounding",
        "round_stochastic": "rounding",
        "split_master": "split",
    },
)
