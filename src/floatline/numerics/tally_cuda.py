"""The same tally on an NVIDIA GPU: one fused kernel, compiled for the dtype and formats by torch's own NVRTC.

Every value becomes the bits of its float32 magnitude. A thread adds to its lane's own column of a
shared-memory histogram, so no two lanes of a warp ever meet, and the counting hides behind the loads: torch's
bincount and triton's histogram are several times slower.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from floatline.formats import FP32, Format, find_format

_THREADS, _BLOCKS = 512, 3  # threads in a block, blocks on a multiprocessor

_SOURCE = r"""
extern "C" __global__ void tally(const uint4* data, double total, unsigned long long* counts) {
    double* errors = (double*)(counts + 258 + 3 * NUM_FORMATS);
    double* magnitudes = errors + NUM_FORMATS;
    unsigned* scratch = (unsigned*)(magnitudes + 2);  // largest, ~(smallest - 1), blocks that are done

    __shared__ unsigned bins[256 * 32];
    for (int i = threadIdx.x; i < 256 * 32; i += blockDim.x) bins[i] = 0;
    __syncthreads();

    unsigned* column = bins + (threadIdx.x & 31);
    unsigned zeros = 0, infs = 0, nans = 0, largest = 0, smallest = 0xffffffffu;
    unsigned kinds[3 * NUM_FORMATS] = {0};
    float error[NUM_FORMATS] = {0};

    auto tick = [&](unsigned bits) { atomicAdd(column + ((bits >> 18) & 0x1fe0u), 1u); };
    auto fit = [&](unsigned a) {
        if (a - 1 < 0x7f7fffffu) {  // zero wraps around: one comparison leaves out zero, infinity and NaN
            FORMAT_CODE
        }
    };
    auto look = [&](unsigned a) {
        if (a - 1 < 0x7f7fffffu) {
            largest = max(largest, a);
            smallest = min(smallest, a - 1);
        } else if (a == 0) zeros++; else if (a == 0x7f800000u) infs++; else nans++;
    };
    LOOK_CODE

    const unsigned long long n = (unsigned long long)total, vectors = n / WIDTH;
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    const unsigned long long self = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned long long i = self; i < vectors; i += stride) {
        uint4 v = __ldcs(data + i);
        TAKE(v.x) TAKE(v.y) TAKE(v.z) TAKE(v.w)
    }
    if (self < n - vectors * WIDTH) {
        unsigned a = ONE(((const WORD*)data)[vectors * WIDTH + self]) & 0x7fffffffu;
        tick(a); look(a); fit(a);
    }
    SETTLE_CODE

    __syncthreads();
    for (int bin = threadIdx.x; bin < 255; bin += blockDim.x) {
        unsigned long long sum = 0;
        for (int lane = 0; lane < 32; lane++) sum += bins[bin * 32 + ((lane + bin) & 31)];
        if (sum) atomicAdd(counts + 3 + bin, sum);
    }
    const bool leader = (threadIdx.x & 31) == 0;
    auto add = [&](int slot, unsigned value) {
        value = __reduce_add_sync(0xffffffffu, value);
        if (leader && value) atomicAdd(counts + slot, (unsigned long long)value);
    };
    add(0, zeros); add(1, infs); add(2, nans);
    #pragma unroll
    for (int k = 0; k < 3 * NUM_FORMATS; k++) add(258 + k, kinds[k]);
    #pragma unroll
    for (int k = 0; k < NUM_FORMATS; k++) {
        double sum = error[k];
        for (int offset = 16; offset; offset >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, offset);
        if (leader && sum) atomicAdd(errors + k, sum);
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    smallest = __reduce_min_sync(0xffffffffu, smallest);
    if (leader) {
        atomicMax(scratch, largest);
        atomicMax(scratch + 1, ~smallest);
    }

    // The last block to finish writes what can only be known now.
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(scratch + 2, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last || threadIdx.x) return;
    __threadfence();
    volatile unsigned long long* sums = counts;
    volatile unsigned* extremes = scratch;
    sums[3] -= sums[0];  // the first bin held the zeros as well
    magnitudes[0] = __uint_as_float(extremes[0]);
    magnitudes[1] = __uint_as_float(extremes[1] ? ~extremes[1] + 1 : 0x7f800000u);
    EXACT_CODE
}
"""

# The extremes of sixteen-bit magnitudes are found in pairs: their patterns order as the numbers do, and one test
# on both halves finds the rare words that hold a zero, an infinity or a NaN.
_LOOK_PAIRS = r"""
    unsigned most = 0, least = 0xffffffffu;
    auto look_pair = [&](unsigned m) {
        if (__builtin_expect(((m + 0x80008000u - INFINITIES) | ((m - 0x00010001u) & ~m)) & 0x80008000u, 0)) {
            for (int half = 0; half < 32; half += 16) {
                unsigned h = (m >> half) & 0xffffu, infinity = INFINITIES & 0xffffu;
                if (h == 0) zeros++;
                if (h < infinity) continue;
                if (h == infinity) infs++; else nans++;
                m &= ~(0xffffu << half);
            }
        }
        most = __vmaxu2(most, m);
        least = __vminu2(least, __vsub2(m, 0x00010001u));
    };
"""
_SETTLE_PAIRS = r"""
    most = max(most & 0xffffu, most >> 16);
    least = min(least & 0xffffu, least >> 16);
    if (most) largest = max(largest, ONE(most));
    if (least < (INFINITIES & 0xffffu)) smallest = min(smallest, ONE(least + 1) - 1);
"""

# What a value does in a format. The relative error is the shorter way from the mantissa to a multiple of the
# spacing. Most values stay normal: there the addition of `magic` rounds, and nothing is counted.
_FORMAT = """
            if (a - {least}u < {over}u - {least}u) {{
                float m = __uint_as_float((a & 0x7fffffu) | 0x3f800000u);
                float r = __fadd_rn(__fadd_rn(m, {magic}f), -{magic}f);
                error[{k}] += __fdividef(fabsf(m - r), m);
            }} else if (a >= {over}u) {{
                kinds[3 * {k}]++;
            }} else {{
                if (a <= {zero}u) kinds[3 * {k} + 1]++; else if (a < {normal}u) kinds[3 * {k} + 2]++;
                int field = max((int)(a >> 23), 1);
                unsigned mantissa = (a & 0x7fffffu) | (a >= 0x800000u ? 0x800000u : 0u);
                int shift = min({drop} + max({first} - field, 0), 25);
                unsigned rest = mantissa & ((1u << shift) - 1u);
                error[{k}] += __fdividef((float)min(rest, (1u << shift) - rest), (float)mantissa);
            }}"""

# A format that holds every number of the tensor's dtype: nothing to do for a value, its subnormal numbers
# are those in the lowest bins.
_EXACT = """
    for (int bin = 0; bin < {below}; bin++) sums[258 + 3 * {k} + 2] += sums[3 + bin];"""

# For each dtype: its word, and the bits of the float32 that a value, or both values of a 32-bit word, is.
_PAIRS = {
    "WORD": "unsigned short",
    "WIDTH": "8",
    "TAKE(w)": "{ unsigned a, b; BOTH(w, a, b); tick(a); tick(b); look_pair((w) & 0x7fff7fffu); "
    "if (NUM_LOSSY) { fit(a & 0x7fffffffu); fit(b & 0x7fffffffu); } }",
}
_DTYPES: dict[torch.dtype, dict[str, str]] = {
    torch.float16: {
        **_PAIRS,
        "INFINITIES": "0x7c007c00u",
        "BOTH(w, a, b)": 'asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" '
        ': "=r"(a), "=r"(b) : "r"(w))',
        "ONE(w)": "([](unsigned v) { unsigned a, b; BOTH(v, a, b); return a; })(w)",
    },
    torch.bfloat16: {
        **_PAIRS,
        "INFINITIES": "0x7f807f80u",
        "BOTH(w, a, b)": "a = (w) << 16; b = (w) & 0xffff0000u",
        "ONE(w)": "((unsigned)(w) << 16)",
    },
    torch.float32: {
        "WORD": "unsigned",
        "WIDTH": "4",
        "ONE(w)": "(w)",
        "TAKE(w)": "{ unsigned a = (w) & 0x7fffffffu; tick(a); look(a); fit(a); }",
    },
}


def takes(x: Tensor) -> bool:
    """Whether this kernel can count the tensor here: torch 2.8 brought the compiler, ROCm is not tried."""
    return hasattr(torch.cuda, "_compile_kernel") and not torch.version.hip and x.dtype != torch.float64


def count(x: Tensor, formats: tuple[Format, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, magnitudes and errors as `tally.Tally` defines them; queued on the current stream, not waited for."""
    if x.element_size() == 1:
        x = x.to(torch.float16)  # exact for every float8
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    num_counts, num_formats = 258 + 3 * len(formats), len(formats)
    with torch.cuda.device(x.device):
        sums = torch.zeros(num_counts + num_formats + 4, dtype=torch.int64, device=x.device)
        multiprocessors = cast("int", torch.cuda.get_device_properties(x.device).multi_processor_count)
        arguments: list[Any] = [x, float(x.numel()), sums]
        _kernel(x.dtype, formats, x.device.index)((_BLOCKS * multiprocessors, 1, 1), (_THREADS, 1, 1), arguments)
    floats = sums[num_counts:].view(torch.float64)
    return sums[:num_counts], floats[num_formats : num_formats + 2], floats[:num_formats]


@functools.lru_cache(maxsize=64)
def _kernel(dtype: torch.dtype, formats: tuple[Format, ...], device: int) -> Any:  # noqa: ARG001 loaded per device
    """Compile once for each dtype, set of formats and device (about half a second)."""
    source = find_format(dtype)
    exact = {k: fmt for k, fmt in enumerate(formats) if _holds(fmt, source)}
    lossy = {k: fmt for k, fmt in enumerate(formats) if k not in exact}
    pairs = "INFINITIES" in _DTYPES[dtype]
    defines = {**_DTYPES[dtype], "NUM_FORMATS": str(len(formats)), "NUM_LOSSY": str(len(lossy))}
    parts = {
        "LOOK_CODE": _LOOK_PAIRS if pairs else "",
        "SETTLE_CODE": _SETTLE_PAIRS if pairs else "",
        "FORMAT_CODE": "".join(_format_code(k, fmt) for k, fmt in lossy.items()),
        "EXACT_CODE": "".join(_EXACT.format(k=k, below=fmt.min_exponent + 127) for k, fmt in exact.items()),
    }
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + _SOURCE
    for name, code in parts.items():
        text = text.replace(name, code)
    compile_kernel = cast("Any", torch.cuda)._compile_kernel
    return compile_kernel(text, "tally")


def _holds(fmt: Format, source: Format) -> bool:
    """Whether every number of `source` is one of `fmt`."""
    return (
        fmt.mantissa_bits >= source.mantissa_bits and fmt.min_exponent <= source.min_exponent and fmt.max >= source.max
    )


def _format_code(k: int, fmt: Format) -> str:
    zero, normal, over = fmt.cast_edges
    return _FORMAT.format(
        k=k,
        least=_bits(fmt.min_normal, up=True),
        zero=_bits(zero, up=False),
        normal=_bits(normal, up=True),
        over=_bits(over, up=True),
        drop=FP32.mantissa_bits - fmt.mantissa_bits,
        magic=1.5 * 2.0 ** (FP32.mantissa_bits - fmt.mantissa_bits),
        first=fmt.min_exponent + FP32.bias,
    )


def _bits(x: float, *, up: bool) -> int:
    """Bits of the float32 next to x: the first not below it, or the last not above it."""
    near = torch.tensor(x, dtype=torch.float64).to(torch.float32)
    bits = int(near.view(torch.int32).item())
    if up and near.item() < x:
        return bits + 1
    if not up and near.item() > x:
        return bits - 1
    return bits
