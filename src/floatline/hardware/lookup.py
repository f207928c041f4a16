"""Finding a device by the names people type."""

from __future__ import annotations

import re

from floatline.errors import HardwareError, suggest
from floatline.hardware.detection import detect_cpu
from floatline.hardware.facts import HARDWARE, Hardware

_MAKERS = re.compile(r"nvidia|geforce|tesla|amd |instinct|radeon|compute_|^cc ?")
_FORM = r"(sxm\d?|pcie|nvl)?(\d+gb)?"


def find_hardware(name: str) -> Hardware:
    """The device of that name: 'sm_75', '7.5', 'T4', 'titan rtx', 'mi300x', 'mps', 'cpu' (this one's)."""
    squashed = _squash(name)
    if squashed == "cpu":
        return detect_cpu().hardware
    for hardware in HARDWARE.values():
        if squashed in (_squash(hardware.id), hardware.id.removeprefix("sm_")):
            return hardware
    for hardware in HARDWARE.values():
        if any(_pattern(known).fullmatch(squashed) for known in hardware.names):
            return hardware
    typed = name.strip().lower()
    products = [product.lower() for hardware in HARDWARE.values() for product in hardware.names]
    hint = suggest(typed, [*HARDWARE, *products, "cpu"])
    # Every product would be a long list; the identifiers say enough.
    hint = suggest(typed, [*HARDWARE, "cpu"]) if hint.startswith("Known") else hint
    raise HardwareError(f"Device '{name}' is not known. {hint}")


def _squash(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.strip().lower()))


def _pattern(name: str) -> re.Pattern[str]:
    # 'RTX 20xx' also takes 'RTX 2080 Ti' and 'RTX 2060 SUPER'; 'V100' also 'V100-SXM2-16GB'.
    return re.compile(_squash(name).replace("xx", r"\d\d(ti|super|d)*") + _FORM)
