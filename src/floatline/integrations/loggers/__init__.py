"""Loggers: what the guard knows, in the tools people already look at. Nothing is imported unless it is used."""

from floatline.integrations.loggers.files import CSVLogger, JSONLLogger
from floatline.integrations.loggers.logger import Logger
from floatline.integrations.loggers.mlflow import MLflowLogger
from floatline.integrations.loggers.tensorboard import TensorBoardLogger
from floatline.integrations.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "JSONLLogger", "Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
