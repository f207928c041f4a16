"""What `floatline doctor` finds out about a machine, a plan and a model before anything is trained."""

from floatline.checkup.choose import choose_plan
from floatline.checkup.examination import Checkup, examine
from floatline.checkup.note import Note

__all__ = ["Checkup", "Note", "choose_plan", "examine"]
