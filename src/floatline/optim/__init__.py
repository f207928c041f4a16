"""Optimizers for 16-bit weights that train as if they were float32."""

from floatline.optim.algorithms import SGD, Adam, AdamW, Lion, convert
from floatline.optim.muon import Muon
from floatline.optim.optimizer import Optimizer
from floatline.optim.roster import Footprint
from floatline.optim.survey import Decision, Survey, decide

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Decision",
    "Footprint",
    "Lion",
    "Muon",
    "Optimizer",
    "Survey",
    "convert",
    "decide",
]
