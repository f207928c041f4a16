"""What devices can do with each number format: facts with sources, and which of them this machine has."""

from floatline.hardware.detection import Device, Machine, detect_devices, find_hardware
from floatline.hardware.facts import HARDWARE, Hardware, Level, Support

__all__ = [
    "HARDWARE",
    "Device",
    "Hardware",
    "Level",
    "Machine",
    "Support",
    "detect_devices",
    "find_hardware",
]
