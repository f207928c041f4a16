"""Hardware: facts with sources, names people type, and detection with and without torch and GPUs."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools.hardware_page import PAGE, page
from typer.testing import CliRunner

from floatline.cli.main import app
from floatline.errors import HardwareError
from floatline.hardware import HARDWARE, detect_devices, find_hardware
from floatline.hardware.detection import _has_kernels, _read_cpuinfo, match_cpu, nearest_cuda
from floatline.hardware.facts import SOURCES

FORMATS = ("fp16", "bf16", "tf32", "fp8")


# --- the facts ---


def test_every_device_has_sources_and_every_source_a_device():
    used = {key for hardware in HARDWARE.values() for key in hardware.sources}
    assert used == set(SOURCES)
    assert all(hardware.sources for hardware in HARDWARE.values())


@pytest.mark.parametrize(
    ("device", "levels"),
    [
        ("sm_60", "native emulated none none"),
        ("sm_61", "slow emulated none none"),
        ("sm_70", "native emulated none none"),
        ("sm_75", "native emulated none none"),
        ("sm_80", "native native native none"),
        ("sm_86", "native native native none"),
        ("sm_89", "native native native native"),
        ("sm_90", "native native native native"),
        ("sm_100", "native native native native"),
        ("sm_120", "native native native native"),
        ("gfx90a", "native native none none"),
        ("gfx942", "native native native native"),
        ("mps", "native emulated none none"),
        ("x86-avx2", "slow slow none none"),
        ("x86-avx512-bf16", "slow native none none"),
        ("x86-amx-bf16", "native native none none"),
        ("arm-fp16", "slow slow none none"),
        ("arm-bf16", "slow native none none"),
    ],
)
def test_levels_of_fp16_bf16_tf32_and_fp8(device: str, levels: str):
    assert [HARDWARE[device].supports(name).level for name in FORMATS] == levels.split()


def test_tensor_cores_begin_with_volta():
    assert not HARDWARE["sm_60"].fp16.matrix_units
    assert not HARDWARE["gtx-16"].fp16.matrix_units
    assert HARDWARE["sm_70"].fp16.matrix_units


def test_bf16_is_native_exactly_where_torch_says_so_without_emulation():
    # torch.cuda.is_bf16_supported(including_emulation=False) is "major >= 8".
    for key, hardware in HARDWARE.items():
        if key.startswith("sm_"):
            assert (hardware.bf16.level == "native") == (int(key[3:]) >= 80)
            assert ("is_bf16_supported" in hardware.bf16.note) == (int(key[3:]) < 80)


def test_mi300_and_nvidia_speak_different_fp8():
    assert "fnuz" in HARDWARE["gfx942"].fp8.note
    assert "fnuz" not in HARDWARE["sm_90"].fp8.note


def test_the_page_of_the_table_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/hardware_page.py"


def test_the_output_on_the_page_is_what_the_command_prints():
    printed = CliRunner().invoke(app, ["doctor", "--on", "T4"]).stdout
    shown = PAGE.read_text(encoding="utf-8").split("$ floatline doctor --on T4\n")[1].split("```")[0]
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_the_check_above_can_fail():
    assert PAGE.read_text(encoding="utf-8") != page(list(HARDWARE.values())[1:])


# --- names ---


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *(("sm_75", "sm_75"), ("7.5", "sm_75"), ("sm75", "sm_75"), ("T4", "sm_75"), ("titan rtx", "sm_75")),
        *(("v100", "sm_70"), ("Tesla V100-SXM2-16GB", "sm_70"), ("p100", "sm_60"), ("a100", "sm_80")),
        *(("A100 80GB", "sm_80"), ("h100", "sm_90"), ("NVIDIA H200", "sm_90"), ("b200", "sm_100")),
        *(("RTX 2080 Ti", "sm_75"), ("NVIDIA GeForce RTX 4090", "sm_89"), ("rtx5090", "sm_120")),
        *(("GTX 1080", "sm_61"), ("gtx 1660 ti", "gtx-16"), ("cc 8.6", "sm_86"), ("12.0", "sm_120")),
        *(("mi250", "gfx90a"), ("AMD Instinct MI300X", "gfx942"), ("gfx942", "gfx942"), ("mps", "mps")),
        *(("M1", "mps"), ("Sapphire Rapids", "x86-amx-bf16"), ("neoverse n1", "arm-fp16")),
    ],
)
def test_names_people_type(name: str, device: str):
    assert find_hardware(name).id == device


def test_cpu_is_this_machines():
    assert find_hardware("cpu") == detect_devices().devices[-1].hardware


def test_every_product_in_the_table_leads_back_to_its_entry():
    for hardware in HARDWARE.values():
        for name in hardware.names:
            assert find_hardware(name.replace("xx", "80")).id == hardware.id, name


def test_an_unknown_device_gets_the_nearest_names():
    with pytest.raises(HardwareError, match=r"'sm_87' is not known. Did you mean 'sm_89' or 'sm_86'"):
        find_hardware("sm_87")
    with pytest.raises(HardwareError, match=r"'voodoo' is not known. Known: sm_60, .*cpu\."):
        find_hardware("voodoo")
    with pytest.raises(HardwareError, match="'' is not known"):
        find_hardware("")


# --- detection ---

X86 = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu {}\n"


@pytest.mark.parametrize(
    ("flags", "device"),
    [
        ("avx2", "x86-avx2"),
        ("avx2 avx_ne_convert", "x86-avx-ne-convert"),
        ("avx2 avx512f avx512bw avx512vl avx512dq", "x86-avx512"),
        ("avx2 avx512bw avx512vl avx512dq avx512_bf16", "x86-avx512-bf16"),
        ("avx512_bf16 amx_bf16 amx_tile avx512_fp16", "x86-amx-bf16"),
        ("avx512_bf16 amx_bf16 amx_fp16", "x86-amx-fp16"),
    ],
)
def test_x86_flags_say_which_formats_are_native(flags: str, device: str):
    found, name = _read_cpuinfo(X86.format(flags))
    assert name == "Xeon"
    assert match_cpu(found, arm=False).id == device


@pytest.mark.parametrize(
    ("features", "device"),
    [("fp asimd", "arm-neon"), ("fp asimd fphp asimdhp", "arm-fp16"), ("asimdhp sve bf16 i8mm", "arm-bf16")],
)
def test_arm_features_say_which_formats_are_native(features: str, device: str):
    assert match_cpu(_read_cpuinfo(f"Features\t: {features}\n")[0], arm=True).id == device


def test_a_cpu_without_a_description_is_taken_for_the_plainest():
    assert match_cpu(_read_cpuinfo("")[0], arm=False).id == "x86-avx2"


def test_an_architecture_that_is_not_in_the_table_is_its_older_sibling():
    assert nearest_cuda(12, 1).id == "sm_120"
    assert nearest_cuda(8, 7).id == "sm_86"
    assert nearest_cuda(5, 2).id == "sm_60"
    assert nearest_cuda(9, 0).id == "sm_90"


def test_a_gtx_1660_is_not_a_t4_though_both_are_7_5():
    assert nearest_cuda(7, 5, name="NVIDIA GeForce GTX 1660 Ti").id == "gtx-16"
    assert nearest_cuda(7, 5, name="Tesla T4").id == "sm_75"


def test_a_build_without_kernels_for_the_device_is_seen():
    assert _has_kernels(["sm_75", "sm_80"], 8, 6)
    assert _has_kernels(["sm_90", "compute_70"], 12, 0)
    assert not _has_kernels(["sm_75", "sm_80", "sm_90"], 6, 0)
    assert not _has_kernels(["sm_90a"], 8, 9)


def cuda_machine(monkeypatch: pytest.MonkeyPatch, **properties: Any):
    facts = {"name": "Tesla T4", "major": 7, "minor": 5, "total_memory": 16 * 2**30, **properties}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**facts))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    return detect_devices()


def test_a_gpu_is_listed_before_the_cpu(monkeypatch: pytest.MonkeyPatch):
    machine = cuda_machine(monkeypatch)
    assert [device.where for device in machine.devices] == ["cuda:0", "cpu"]
    assert machine.best.hardware.id == "sm_75"
    assert machine.best.memory == 16 * 2**30
    assert machine.best.note == ""


def test_what_is_odd_about_a_gpu_is_noted(monkeypatch: pytest.MonkeyPatch):
    old = cuda_machine(monkeypatch, name="Tesla P100", major=6, minor=0).best
    assert old.note == "this torch build has no kernels for sm_60: install one that has"
    new = cuda_machine(monkeypatch, name="GB10", major=9, minor=9).best
    assert new.note == "sm_99 is not in the table, treated as sm_90"


def test_an_amd_gpu_is_known_by_its_architecture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "6.3")
    machine = cuda_machine(monkeypatch, name="MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    assert (machine.best.hardware.id, machine.backend) == ("gfx942", "ROCm 6.3")
    other = cuda_machine(monkeypatch, name="W7900", gcnArchName="gfx1100").best
    assert other.note == "gfx1100 is not in the table, treated as gfx90a"


def test_this_machine_is_described():
    machine = detect_devices()
    assert machine.torch == torch.__version__
    assert machine.devices[-1].where == "cpu"
    assert machine.as_json()["devices"][-1]["hardware"]["kind"] == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_this_machines_gpu_is_found_and_nothing_is_put_on_it():
    held = torch.cuda.memory_allocated()
    device = detect_devices().best
    major, minor = torch.cuda.get_device_capability(0)
    assert device.hardware.id == nearest_cuda(major, minor, name=device.name).id
    assert device.memory and device.memory > 2**30
    assert torch.cuda.memory_allocated() == held


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_detection_works_where_torch_is_not_installed():
    code = "import sys; sys.modules['torch'] = None; from floatline.hardware import detect_devices as d; "
    assert run(code + "m = d(); print(m.torch, m.best.where)") == "None cpu"


def test_facts_and_plans_load_without_torch():
    code = "import sys, floatline.hardware, floatline.plans.presets, floatline.checkup.choose; "
    assert run(code + "print('torch' in sys.modules)") == "False"


def test_the_check_above_can_fail_too():
    code = "import sys, types; sys.modules['torch'] = types.ModuleType('torch'); import floatline.hardware; "
    assert run(code + "print('torch' in sys.modules)") == "True"
