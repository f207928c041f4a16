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

    __shared__ unsigned bins[NUM_ROWS * 32];
    for (int i = threadIdx.x; i < NUM_ROWS * 32; i += blockDim.x) bins[i] = 0;
    __syncthreads();

    unsigned* column = bins + (threadIdx.x & 31);
    unsigned zeros = 0, infs = 0, nans = 0, largest = 0, smallest = 0xffffffffu;
    unsigned kinds[3 * NUM_FORMATS] = {0};
    float error[NUM_FORMATS] = {0};

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
    uint4 next = self < vectors ? __ldcs(data + self) : uint4();
    for (unsigned long long i = self; i < vectors; i += stride) {
        uint4 v = next;  // the next load is on its way while this one is counted
        if (i + stride < vectors) next = __ldcs(data + i + stride);
        TAKE(v.x) TAKE(v.y) TAKE(v.z) TAKE(v.w)
    }
    if (self < n - vectors * WIDTH) {
        unsigned a = ONE(((const WORD*)data)[vectors * WIDTH + self]) & 0x7fffffffu;
        look(a); fit(a);
        if (a - 1 < 0x7f7fffffu) atomicAdd(counts + 3 + (a >> 23), 1ull);
    }
    SETTLE_CODE

    __syncthreads();
    for (int row = threadIdx.x; row < NUM_ROWS; row += blockDim.x) {
        unsigned long long sum = 0;
        for (int lane = 0; lane < 32; lane++) sum += bins[row * 32 + ((lane + row) & 31)];
        if (sum && row == ZERO_ROW) atomicAdd(counts, sum);
        if (sum && row == TINY_ROW) atomicAdd(counts, 0ull - sum);  // they were taken for zeros
        if (sum && SLOT(row) >= 0) atomicAdd(counts + 3 + SLOT(row), sum);
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
    if (!last || threadIdx.x >= 32) return;
    __threadfence();
    EXACT_CODE
    if (threadIdx.x) return;
    unsigned top = __ldcg(scratch), bottom = __ldcg(scratch + 1);
    magnitudes[0] = __uint_as_float(top);
    magnitudes[1] = __uint_as_float(bottom ? ~bottom + 1 : 0x7f800000u);
}
"""

# Sixteen-bit values are looked at in pairs: patterns without their sign order as the numbers do, and one test on
# both halves finds the rare words that need a closer look.
_LOOK_PAIRS = r"""
    unsigned most = 0, least = 0xffffffffu;
    auto look_pair = [&](unsigned m) {
        unsigned less = __vsub2(m, 0x00010001u);  // zero wraps around and never wins
        COUNT_PAIR
        if (__builtin_expect(((m + 0x80008000u - INFINITIES) | (RARE(less) & ~less)) & 0x80008000u, 0)) {
            for (int half = 0; half < 32; half += 16) {
                unsigned h = (m >> half) & 0xffffu, infinity = INFINITIES & 0xffffu;
                if (TINY_ROW && h && h < 0x80u) atomicAdd(column + 32 * TINY_ROW, 1u);
                if (h < infinity) continue;
                if (h == infinity) infs++; else nans++;
                m &= ~(0xffffu << half);
            }
        }
        most = __vmaxu2(most, m);
        least = __vminu2(least, less);
    };
"""
# float16: the row is the exponent of |x|, subnormal numbers included. Below 16 the product with 1024 is exact and
# normal, from 16 on its own exponent will do; of the two one is always a constant, so that their sum tells both.
_COUNT_HALVES = r"""
        unsigned low = __vminu2(m, 0x4c004c00u), scaled;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(low), "r"(0x64006400u));
        unsigned both = scaled + __vmaxu2(m, 0x4c004c00u);
        atomicAdd(column + ((both >> 5) & 0x7e0u), 1u);
        atomicAdd(column + ((both >> 21) & 0x7e0u), 1u);
"""
# bfloat16: the row is the exponent field; its subnormal numbers share a row with zero and are told apart as rare.
_COUNT_BRAINS = r"""
        atomicAdd(column + ((m >> 2) & 0x1fe0u), 1u);
        atomicAdd(column + ((m >> 18) & 0x1fe0u), 1u);
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
    {{
        unsigned long long sum = 0;
        for (int bin = threadIdx.x; bin < {below}; bin += 32) sum += __ldcg(counts + 3 + bin);
        if (sum) atomicAdd(counts + 258 + 3 * {k} + 2, sum);
    }}"""

_PAIRS = {
    "WORD": "unsigned short",
    "WIDTH": "8",
    "TAKE(w)": "{ look_pair((w) & 0x7fff7fffu); if (NUM_LOSSY) { fit(ONE(w)); fit(ONE((w) >> 16)); } }",
}
# For each dtype: its word, the magnitude of a value as float32 bits, and which bin, from the exponent -127 on, a
# row of the histogram belongs to (-1: none).
_DTYPES: dict[torch.dtype, dict[str, str]] = {
    torch.float16: {
        **_PAIRS,
        "COUNT_PAIR": " ".join(_COUNT_HALVES.split()),
        "INFINITIES": "0x7c007c00u",
        "RARE(less)": "0u",
        "ONE(w)": '([](unsigned v) { float f; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" '
        ': "=f"(f) : "r"(v)); return __float_as_uint(f) & 0x7fffffffu; })(w)',
        "NUM_ROWS": "64",
        "ZERO_ROW": "19",
        "TINY_ROW": "0",
        "SLOT(row)": "((row) >= 20 && (row) <= 59 ? (row) + 83 : -1)",
    },
    torch.bfloat16: {
        **_PAIRS,
        "COUNT_PAIR": " ".join(_COUNT_BRAINS.split()),
        "INFINITIES": "0x7f807f80u",
        "RARE(less)": "((less) - 0x007f007fu)",
        "ONE(w)": "(((unsigned)(w) << 16) & 0x7fffffffu)",
        "NUM_ROWS": "257",
        "ZERO_ROW": "0",
        "TINY_ROW": "256",
        "SLOT(row)": "((row) == 256 ? 0 : (row) >= 1 && (row) <= 254 ? (row) : -1)",
    },
    torch.float32: {
        "WORD": "unsigned",
        "WIDTH": "4",
        "ONE(w)": "((w) & 0x7fffffffu)",
        "NUM_ROWS": "256",
        "ZERO_ROW": "-1",
        "TINY_ROW": "-1",
        "SLOT(row)": "((row) <= 254 ? (row) : -1)",
        "TAKE(w)": "{ unsigned a = (w) & 0x7fffffffu; if (a) atomicAdd(column + ((a >> 23) << 5), 1u); "
        "look(a); fit(a); }",
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
    near = torch.tensor(x, dtype=torch.float64, device="cpu").to(torch.float32)
    bits = int(near.view(torch.int32).item())
    if up and near.item() < x:
        return bits + 1
    if not up and near.item() > x:
        return bits - 1
    return bits
