"""Why a training step went wrong: from evidence to findings, with what was tried."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.diagnosis.diagnoser import Diagnoser
    from floatline.diagnosis.headroom.would_fit import would_fit
    from floatline.diagnosis.islands.cost import measure_cost
    from floatline.diagnosis.islands.search import find_island
    from floatline.diagnosis.target_diagnosis import diagnose

__all__ = ["Diagnoser", "diagnose", "find_island", "measure_cost", "would_fit"]

__getattr__ = offer(
    __name__,
    {
        "Diagnoser": "diagnoser",
        "diagnose": "target_diagnosis",
        "find_island": "islands.search",
        "measure_cost": "islands.cost",
        "would_fit": "headroom.would_fit",
    },
)
