"""How fast a GPU can be at best, from its data sheet: for times that no run can fall below. Data; no torch."""

from __future__ import annotations

from dataclasses import dataclass

PER_NODE = 8  # GPUs that NVLink joins in the vendors' own machines


@dataclass(frozen=True)
class Rates:
    """What the data sheet promises; a run reaches a part of it.

    Args:
        title: The product.
        half: Dense FP16 or BF16 operations a second, on tensor cores.
        full: FP32 operations a second, without TF32.
        memory: Bytes a second between GPU and its memory.
        link: Bytes a second to the other GPUs of a machine, in one direction.
        network: Bytes a second from one machine to the others, in one direction: its GPUs' adapters together. What
            arrives at one of its GPUs goes on to the others over their links.
        source: Where the numbers stand.
    """

    title: str
    half: float
    full: float
    memory: float
    link: float
    network: float
    source: str


RATES: dict[str, Rates] = {
    "a100": Rates(
        "A100 SXM 80 GB", 312e12, 19.5e12, 2.039e12, 300e9, 200e9, "NVIDIA A100 data sheet; DGX A100 (8 x HDR 200 Gb/s)"
    ),
    "h100": Rates(
        "H100 SXM", 989e12, 67e12, 3.35e12, 450e9, 400e9, "NVIDIA H100 data sheet; DGX H100 (8 x NDR 400 Gb/s)"
    ),
    "h200": Rates(
        "H200 SXM", 989e12, 67e12, 4.8e12, 450e9, 400e9, "NVIDIA H200 data sheet; DGX H200 (8 x NDR 400 Gb/s)"
    ),
}


def find_rates(device: str) -> Rates | None:
    """The rates of a product by the name people type; None where none are known here."""
    return RATES.get(device.lower().replace(" ", "").replace("-", "").removeprefix("nvidia"))
