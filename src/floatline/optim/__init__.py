"""Optimizers for 16-bit weights that train as if they were float32."""

from floatline.optim.adamw import Adam, AdamW
from floatline.optim.converting import convert
from floatline.optim.footprint import Footprint
from floatline.optim.lion import Lion
from floatline.optim.optimizer import Optimizer
from floatline.optim.sgd import SGD
from floatline.optim.survey import Decision, Survey, decide

__all__ = ["SGD", "Adam", "AdamW", "Decision", "Footprint", "Lion", "Optimizer", "Survey", "convert", "decide"]
