"""What is trained: a Workload, and how a target names one."""

from floatline.workload.config import WorkloadConfig
from floatline.workload.target import Target, load_target
from floatline.workload.workload import OnDemand, Workload

__all__ = ["OnDemand", "Target", "Workload", "WorkloadConfig", "load_target"]
