"""What `floatline doctor` finds out about a machine, a plan and a model before anything is trained."""

from floatline.checkup.choose import Note, choose_plan
from floatline.checkup.examination import Checkup, examine, examine_scale

__all__ = ["Checkup", "Note", "choose_plan", "examine", "examine_scale"]
