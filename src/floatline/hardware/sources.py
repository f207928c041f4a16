"""Where the hardware facts come from: title and section, and an address where one was seen."""

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
