"""Reports for people and programs: they render what was found and compute nothing."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.report.chart import draw_ranges
    from floatline.report.fit import print_fit
    from floatline.report.rescue import write_rescue
    from floatline.report.run.folders import open_runs
    from floatline.report.validation.report import write_report
    from floatline.report.validation.terminal import print_validation

__all__ = [
    "draw_ranges",
    "open_runs",
    "print_fit",
    "print_validation",
    "write_report",
    "write_rescue",
]

__getattr__ = offer(
    __name__,
    {
        "draw_ranges": "chart",
        "open_runs": "run.folders",
        "print_fit": "fit",
        "print_validation": "validation.terminal",
        "write_report": "validation.report",
        "write_rescue": "rescue",
    },
)
