"""What devices can do with each number format: facts with sources, and which of them this machine has."""

from floatline.hardware.detection import Device, Machine, detect_devices
from floatline.hardware.facts import HARDWARE, Hardware, Level, Support
from floatline.hardware.lookup import find_hardware

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
