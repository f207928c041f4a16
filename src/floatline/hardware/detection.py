"""What this machine has: Python, torch, driver, devices; and a device by the names people type. Works without torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from floatline import __version__
from floatline.errors import HardwareError, suggest
from floatline.hardware.facts import HARDWARE, Hardware

_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Device:
    """One device that torch can compute on.

    Args:
        name: As the driver or the system calls it.
        where: torch's name: 'cuda:0', 'mps', 'cpu'.
        hardware: What it can do.
        memory: Bytes in all; None where unknown.
        note: What is odd about it.
    """

    name: str
    where: str
    hardware: Hardware
    memory: int | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data for reports."""
        return {
            "name": self.name,
            "where": self.where,
            "memory": self.memory,
            "note": self.note,
            "hardware": self.hardware.as_json(),
        }


@dataclass(frozen=True)
class Machine:
    """This machine, as far as training is concerned.

    Args:
        floatline: Version.
        python: Version.
        system: Operating system and architecture.
        torch: Version; None where it is not installed.
        backend: What torch was built for: 'CUDA 12.8', 'ROCm 6.3', 'CPU'.
        driver: Driver version; '' where there is none.
        devices: Best first; the CPU is always the last.
    """

    floatline: str
    python: str
    system: str
    torch: str | None
    backend: str
    driver: str
    devices: tuple[Device, ...]

    @property
    def best(self) -> Device:
        """The device to train on."""
        return self.devices[0]

    def as_json(self) -> dict[str, Any]:
        """Plain data for reports."""
        return {
            "floatline": self.floatline,
            "python": self.python,
            "system": self.system,
            "torch": self.torch,
            "backend": self.backend,
            "driver": self.driver,
            "devices": [device.as_json() for device in self.devices],
        }


def detect_devices() -> Machine:
    """Look at this machine. Imports torch if it is installed; allocates nothing on any device."""
    version, backend, driver, devices = None, "", "", list[Device]()
    if importlib.util.find_spec("torch") is not None:
        import torch

        version = torch.__version__
        backend, driver, devices = _look_with_torch()
    return Machine(
        floatline=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=version,
        backend=backend,
        driver=driver,
        devices=(*devices, detect_cpu()),
    )


def _look_with_torch() -> tuple[str, str, list[Device]]:
    import torch

    hip: str | None = torch.version.hip
    cuda: str | None = torch.version.cuda
    if torch.cuda.is_available():
        devices = [_cuda_device(index, rocm=bool(hip)) for index in range(torch.cuda.device_count())]
        return (f"ROCm {hip}" if hip else f"CUDA {cuda}"), _driver_version(), devices
    if torch.backends.mps.is_available():
        return "Metal", "", [Device("Apple GPU", "mps", HARDWARE["mps"], _total_memory())]
    built_for = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else ""
    return (f"{built_for}, but no GPU is visible" if built_for else "CPU"), _driver_version(), []


def _cuda_device(index: int, *, rocm: bool) -> Device:
    import torch

    properties = cast("Any", torch.cuda.get_device_properties(index))  # pyright: ignore[reportUnknownMemberType]
    name, where, memory = str(properties.name), f"cuda:{index}", int(properties.total_memory)
    if rocm:
        arch = str(properties.gcnArchName).split(":")[0]
        hardware = HARDWARE.get(arch, HARDWARE["gfx90a"])
        note = "" if arch == hardware.id else f"{arch} is not in the table, treated as {hardware.id}"
        return Device(name, where, hardware, memory, note)
    arch = f"sm_{properties.major}{properties.minor}"
    hardware = nearest_cuda(int(properties.major), int(properties.minor), name=name)
    notes: list[str] = []
    if hardware.id != arch and hardware.id != "gtx-16":
        notes.append(f"{arch} is not in the table, treated as {hardware.id}")
    if not _has_kernels(torch.cuda.get_arch_list(), int(properties.major), int(properties.minor)):
        notes.append(f"this torch build has no kernels for {arch}: install one that has")
    return Device(name, where, hardware, memory, "; ".join(notes))


def nearest_cuda(major: int, minor: int, *, name: str = "") -> Hardware:
    """The NVIDIA entry for a compute capability: itself, or the newest that is not newer."""
    if (major, minor) == (7, 5) and re.search(r"GTX 16\d\d", name):
        return HARDWARE["gtx-16"]
    numbered = {int(key[3:]): hardware for key, hardware in HARDWARE.items() if key.startswith("sm_")}
    below = [number for number in numbered if number <= major * 10 + minor]
    return numbered[max(below) if below else min(numbered)]


def _has_kernels(built_for: list[str], major: int, minor: int) -> bool:
    """Whether such a build runs on a device: code of the same major and not newer, or PTX of an older one."""
    for arch in built_for:
        kind, _, digits = arch.partition("_")
        number = int(re.sub(r"\D", "", digits) or 0)
        if kind == "sm" and number // 10 == major and number % 10 <= minor:
            return True
        if kind == "compute" and number <= major * 10 + minor:
            return True
    return not built_for


def _driver_version() -> str:
    if not _NVIDIA_DRIVER.is_file():
        return ""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", _NVIDIA_DRIVER.read_text())
    return found.group(1) if found else ""


def detect_cpu() -> Device:
    """This machine's CPU, and which 16-bit instructions it has."""
    text = _CPUINFO.read_text(errors="replace") if _CPUINFO.is_file() else ""
    flags, name = _read_cpuinfo(text)
    if platform.system() == "Darwin":
        flags, name = _read_sysctl()
    machine = platform.machine()
    hardware = match_cpu(flags, arm=machine.lower() in ("aarch64", "arm64"))
    cores = os.cpu_count() or 1
    return Device(f"{name or machine} ({cores} cores)", "cpu", hardware, _total_memory())


def _read_cpuinfo(text: str) -> tuple[set[str], str]:
    """Feature flags and model name from the text of /proc/cpuinfo (x86 says 'flags', ARM 'Features')."""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return set(flags.group(1).split()) if flags else set(), name.group(1).strip() if name else ""


def _read_sysctl() -> tuple[set[str], str]:
    def ask(key: str) -> str:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    flags = {"asimdhp"} if ask("hw.optional.arm.FEAT_FP16") == "1" else set[str]()
    if ask("hw.optional.arm.FEAT_BF16") == "1":
        flags.add("bf16")
    flags.update(ask("machdep.cpu.leaf7_features").lower().split())
    return flags, ask("machdep.cpu.brand_string")


def match_cpu(flags: set[str], *, arm: bool) -> Hardware:
    """The entry for a CPU with these feature flags, named as in /proc/cpuinfo."""
    if arm:
        return HARDWARE["arm-bf16" if "bf16" in flags else "arm-fp16" if "asimdhp" in flags else "arm-neon"]
    if "amx_fp16" in flags:
        return HARDWARE["x86-amx-fp16"]
    if "amx_bf16" in flags:
        return HARDWARE["x86-amx-bf16"]
    if "avx512_bf16" in flags:
        return HARDWARE["x86-avx512-bf16"]
    if {"avx512bw", "avx512vl", "avx512dq"} <= flags:
        return HARDWARE["x86-avx512"]
    return HARDWARE["x86-avx-ne-convert" if "avx_ne_convert" in flags else "x86-avx2"]


def _total_memory() -> int | None:
    names = os.sysconf_names if hasattr(os, "sysconf") else {}
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
