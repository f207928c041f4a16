"""Which number formats a device computes natively, with sources. Data; no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

SOURCES: dict[str, str] = {
    "cuda-guide": "CUDA C++ Programming Guide, 'Arithmetic Instructions', table 'Throughput of Native "
    "Arithmetic Instructions' (results a clock and SM, FP16 and FP32: 6.0 128 and 64, 6.1 2 and 128, "
    "7.x 128 and 64)",
    "ptx": "PTX ISA, 'mma', target notes: bf16 and tf32 from sm_80, fp8 from sm_89",
    "torch-bf16": "PyTorch torch/cuda/__init__.py, is_bf16_supported(including_emulation=True); "
    "https://github.com/pytorch/pytorch/pull/148322",
    "p100": "NVIDIA Tesla P100 whitepaper; NVIDIA blog, 'Inside Pascal: NVIDIA's Newest Computing Platform'",
    "pascal-blog": "NVIDIA Technical Blog, 'Mixed-Precision Programming with CUDA 8'",
    "v100": "NVIDIA Tesla V100 GPU Architecture whitepaper",
    "turing": "NVIDIA Turing GPU Architecture whitepaper",
    "gtx16": "TechPowerUp, GeForce GTX 1660 Ti review, 'Architecture': no tensor cores, FP16 units instead; "
    "https://github.com/pytorch/pytorch/issues/77955",
    "a100": "NVIDIA A100 Tensor Core GPU Architecture whitepaper",
    "ga102": "NVIDIA Ampere GA102 GPU Architecture whitepaper",
    "ada": "NVIDIA Ada GPU Architecture whitepaper",
    "h100": "NVIDIA H100 Tensor Core GPU Architecture whitepaper",
    "blackwell": "NVIDIA Blackwell Architecture Technical Brief",
    "rtx-blackwell": "NVIDIA RTX Blackwell GPU Architecture whitepaper",
    "rocm": "ROCm documentation, 'Data types and precision support'; "
    "https://rocm.docs.amd.com/en/latest/reference/precision-support.html",
    "mi200": "MIOpen documentation, 'MI200 matrix fused multiply-add (MFMA) behavior specifics'; "
    "https://rocm.docs.amd.com/projects/MIOpen/en/latest/MI200AlternateImplementation.html",
    "rocwmma": "rocWMMA documentation, 'API reference guide', 'Supported data types'",
    "mps-bf16": "PyTorch, '[MPS] Enable bfloat16 support on MacOS 14'; https://github.com/pytorch/pytorch/pull/119641",
    "mps-bf16-speed": "transformers, 'Add bfloat16 support detection for MPS' (M1 and M2 emulate it); "
    "https://github.com/huggingface/transformers/pull/40458",
    "mps-scaler": "PyTorch, 'Enable GradScaler for MPS devices'; https://github.com/pytorch/pytorch/issues/142397",
    "torch-onednn": "PyTorch aten/src/ATen/native/mkldnn/Utils.h, mkldnn_bf16_device_check and "
    "mkldnn_fp16_device_check",
    "onednn-isa": "oneDNN developer guide, 'enum dnnl::cpu_isa'",
    "n1": "Measured with torch 2.13 on one thread of a Neoverse N1, 512x512 matrix product: "
    "FP32 7 ms, FP16 226 ms, BF16 2127 ms",
}


# How a device multiplies matrices in a format under torch:
#   native    hardware computes in it, at FP32's speed or faster
#   emulated  software widens to FP32 and rounds back: it saves memory, not time
#   slow      it runs, far slower than FP32
#   none      it does not run
Level = Literal["native", "emulated", "slow", "none"]
Kind = Literal["cuda", "rocm", "mps", "cpu"]


@dataclass(frozen=True)
class Support:
    """What a device does with one format.

    Args:
        level: native, emulated, slow or none.
        note: What to know about it, in a few words.
        matrix_units: Whether matrix units (tensor cores and the like) take it.
    """

    level: Level
    note: str = ""
    matrix_units: bool = False

    def __str__(self) -> str:
        """For people: the level, and the note in brackets."""
        return f"{self.level} ({self.note})" if self.note else self.level


@dataclass(frozen=True)
class Hardware:
    """One kind of device.

    Args:
        id: Short name: 'sm_75', 'gfx942', 'mps', 'x86-amx-bf16'.
        title: Architecture, for people.
        kind: torch's backend.
        names: Products people type; a trailing 'xx' stands for two digits.
        fp16: Half precision.
        bf16: bfloat16.
        tf32: FP32 matrix products with a 10-bit mantissa.
        fp8: 8-bit formats.
        sources: Keys of SOURCES.
        note: What else to know.
    """

    id: str
    title: str
    kind: Kind
    names: tuple[str, ...]
    fp16: Support
    bf16: Support
    tf32: Support
    fp8: Support
    sources: tuple[str, ...]
    note: str = ""

    def supports(self, name: str) -> Support:
        """Support of 'fp16', 'bf16', 'tf32' or 'fp8'; FP32 is native everywhere."""
        by_name = {"fp16": self.fp16, "bf16": self.bf16, "tf32": self.tf32, "fp8": self.fp8}
        return by_name.get(name, Support("native"))

    def as_json(self) -> dict[str, Any]:
        """Plain data for reports."""
        names = ("fp16", "bf16", "tf32", "fp8")
        formats = {name: asdict(self.supports(name)) for name in names}
        return {
            "id": self.id,
            "title": self.title,
            "kind": self.kind,
            "formats": formats,
            "note": self.note,
            "sources": [SOURCES[key] for key in self.sources],
        }


_NONE = Support("none")
_TENSOR = Support("native", "tensor cores", matrix_units=True)
_TENSOR_FP8 = Support("native", "tensor cores, e4m3fn and e5m2", matrix_units=True)
_BF16_TRAP = Support("emulated", "in FP32; torch.cuda.is_bf16_supported() still says True")
_CPU_SLOW = Support("slow", "no GEMM kernel for it in torch")
_AMD_MATRIX = Support("native", "matrix cores", matrix_units=True)


def _nvidia(
    id: str,  # noqa: A002
    title: str,
    names: str,
    *,
    source: str,
    fp16: Support = _TENSOR,
    bf16: Support = _TENSOR,
    tf32: Support = _TENSOR,
    fp8: Support = _NONE,
    note: str = "",
) -> Hardware:
    sources = (source, "cuda-guide", "ptx") if bf16.level == "native" else (source, "cuda-guide", "torch-bf16")
    return Hardware(id, title, "cuda", tuple(names.split(", ")), fp16, bf16, tf32, fp8, sources, note)


def _cpu(
    id: str,  # noqa: A002
    title: str,
    names: str,
    *,
    fp16: Support = _CPU_SLOW,
    bf16: Support = _CPU_SLOW,
    sources: tuple[str, ...] = ("torch-onednn",),
) -> Hardware:
    return Hardware(id, title, "cpu", tuple(names.split(", ")), fp16, bf16, _NONE, _NONE, sources)


HARDWARE: dict[str, Hardware] = {
    h.id: h
    for h in (
        _nvidia(
            "sm_60",
            "NVIDIA Pascal GP100",
            "P100, Quadro GP100",
            source="p100",
            fp16=Support("native", "2x FP32 arithmetic, no tensor cores"),
            bf16=_BF16_TRAP,
            tf32=_NONE,
            note="torch's matrix products accumulate in FP32, so FP16 saves memory and bandwidth more than time.",
        ),
        _nvidia(
            "sm_61",
            "NVIDIA Pascal GP10x",
            "GTX 10xx, TITAN Xp, P40, P4, Quadro P6000",
            source="pascal-blog",
            fp16=Support("slow", "arithmetic at 1/64 of FP32"),
            bf16=_BF16_TRAP,
            tf32=_NONE,
            note="16 bits save memory only.",
        ),
        _nvidia("sm_70", "NVIDIA Volta", "V100, TITAN V, Quadro GV100", source="v100", bf16=_BF16_TRAP, tf32=_NONE),
        _nvidia(
            "sm_75",
            "NVIDIA Turing",
            "T4, TITAN RTX, RTX 20xx, Quadro RTX, RTX 8000, RTX 6000",
            source="turing",
            bf16=_BF16_TRAP,
            tf32=_NONE,
        ),
        _nvidia(
            "gtx-16",
            "NVIDIA Turing without tensor cores (sm_75)",
            "GTX 16xx",
            source="gtx16",
            fp16=Support("native", "FP16 units, no tensor cores"),
            bf16=_BF16_TRAP,
            tf32=_NONE,
            note="Reports compute capability 7.5 like a T4. Half-precision convolutions are known to give "
            "NaN on it (pytorch issue 77955).",
        ),
        _nvidia("sm_80", "NVIDIA Ampere GA100", "A100, A30, A800", source="a100"),
        _nvidia(
            "sm_86",
            "NVIDIA Ampere GA10x",
            "RTX 30xx, A10, A10G, A40, A6000, RTX A6000, A16, A2",
            source="ga102",
            note="GeForce cards run 16-bit products with FP32 accumulation at half of the tensor-core rate.",
        ),
        _nvidia("sm_89", "NVIDIA Ada", "RTX 40xx, L4, L40, L40S, RTX 6000 Ada", source="ada", fp8=_TENSOR_FP8),
        _nvidia("sm_90", "NVIDIA Hopper", "H100, H200, GH200, H800, H20", source="h100", fp8=_TENSOR_FP8),
        _nvidia("sm_100", "NVIDIA Blackwell", "B200, GB200, B100", source="blackwell", fp8=_TENSOR_FP8),
        _nvidia(
            "sm_120",
            "NVIDIA Blackwell, GeForce and RTX PRO",
            "RTX 50xx, RTX PRO 6000",
            source="rtx-blackwell",
            fp8=_TENSOR_FP8,
        ),
        Hardware(
            "gfx90a",
            "AMD CDNA2",
            "rocm",
            ("MI200", "MI210", "MI250", "MI250X"),
            Support("native", "matrix cores, subnormals flushed to zero", matrix_units=True),
            Support("native", "matrix cores, subnormals flushed to zero", matrix_units=True),
            _NONE,
            _NONE,
            ("rocm", "mi200"),
            "Its FP16 matrix cores flush magnitudes below 6.1e-05 to zero, so FP16 gradients need a larger "
            "loss scale than on other devices.",
        ),
        Hardware(
            "gfx942",
            "AMD CDNA3",
            "rocm",
            ("MI300", "MI300A", "MI300X", "MI325X"),
            _AMD_MATRIX,
            _AMD_MATRIX,
            Support("native", "matrix cores, called xf32", matrix_units=True),
            Support("native", "matrix cores, e4m3fnuz and e5m2fnuz", matrix_units=True),
            ("rocm", "rocwmma"),
            "The fnuz kinds of FP8 have another bias and no infinity: they are not NVIDIA's bytes.",
        ),
        Hardware(
            "mps",
            "Apple GPU through Metal",
            "mps",
            ("Apple", "Apple GPU", "M1", "M2", "M3", "M4"),
            Support("native"),
            Support("emulated", "needs macOS 14; in software on M1 and M2"),
            _NONE,
            _NONE,
            ("mps-bf16", "mps-bf16-speed", "mps-scaler"),
            "No FP64. Older torch releases raise a TypeError in GradScaler.unscale_ on MPS (pytorch issue 142397).",
        ),
        _cpu("x86-avx2", "x86 CPU with AVX2", "avx2, x86"),
        _cpu(
            "x86-avx512",
            "x86 CPU with AVX-512, without 16-bit instructions",
            "avx512",
            bf16=Support("emulated", "oneDNN widens to FP32"),
        ),
        _cpu(
            "x86-avx-ne-convert",
            "x86 CPU with AVX-NE-CONVERT, without AVX-512",
            "avx-ne-convert",
            fp16=Support("emulated", "oneDNN widens to FP32"),
            bf16=Support("emulated", "oneDNN widens to FP32"),
        ),
        _cpu(
            "x86-avx512-bf16",
            "x86 CPU with AVX512-BF16",
            "avx512-bf16, Cooper Lake, Zen 4",
            bf16=Support("native", "vector dot products"),
            sources=("torch-onednn", "onednn-isa"),
        ),
        _cpu(
            "x86-amx-bf16",
            "x86 CPU with AMX-BF16 and AVX512-FP16",
            "amx, amx-bf16, avx512-fp16, Sapphire Rapids, Emerald Rapids",
            fp16=Support("native", "vectors"),
            bf16=Support("native", "AMX tiles", matrix_units=True),
            sources=("torch-onednn", "onednn-isa"),
        ),
        _cpu(
            "x86-amx-fp16",
            "x86 CPU with AMX-FP16",
            "amx-fp16, Granite Rapids",
            fp16=Support("native", "AMX tiles", matrix_units=True),
            bf16=Support("native", "AMX tiles", matrix_units=True),
            sources=("torch-onednn", "onednn-isa"),
        ),
        _cpu("arm-neon", "ARM CPU without 16-bit arithmetic", "neon, armv8"),
        _cpu(
            "arm-fp16",
            "ARM CPU with FP16 vectors (ARMv8.2 FEAT_FP16)",
            "armv8.2, Neoverse N1, Graviton2",
            fp16=Support("slow", "the vector units have it, torch's GEMM does not use them well"),
            sources=("torch-onednn", "n1"),
        ),
        _cpu(
            "arm-bf16",
            "ARM CPU with BF16 (FEAT_BF16)",
            "armv8.6, Neoverse V1, Neoverse V2, Neoverse N2, Graviton3, Graviton4, Grace",
            bf16=Support("native", "BFMMLA", matrix_units=True),
        ),
    )
}
