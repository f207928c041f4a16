"""A table of calls and what each returns under autocast: run on CUDA by the recorder, on CPU by the tests."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

# Every column is one run of the whole table: (autocast's dtype, dtype of the inputs).
COLUMNS = (
    ("float16", "float16"),
    ("float16", "float32"),
    ("float16", "float64"),
    ("float16", "bfloat16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
)

# The calls are text, so that the text names the row. Names they use are made by `inputs`.
# x, y 4x8 matrices · m 8x8 · v, u 8 vectors · b 2x4x8 · i1, i2, i3 images of 1, 2, 3 dimensions
# labels, classes, signs, mask: targets · low, full, double: 4x8 in autocast's dtype, float32, float64
LOWER_PRECISION = """
x @ m
torch.mm(x, m)
torch.matmul(b, m)
torch.bmm(b, b.mT)
torch.addmm(x, x, m)
torch.addmv(torch.mv(x, v), x, v)
torch.addr(x, x[:, 0], v)
torch.addbmm(x[:, :4], b, b.mT)
torch.baddbmm(torch.bmm(b, b.mT), b, b.mT)
torch.mv(x, v)
torch.einsum('ij,kj->ik', x, y)
torch.einsum('ij,ij->i', x, y)
torch.chain_matmul(x, m, m)
torch.linalg.multi_dot([x, m, m])
torch.linalg.vecdot(x, y)
torch.inner(x, y)
torch.outer(v, u)
torch.ger(v, u)
F.linear(x, m, v)
F.linear(x, m)
F.conv1d(i1, weight(4, 4, 3))
F.conv2d(i2, weight(4, 4, 3, 3))
F.conv2d(i2, weight(4, 4, 3, 3), padding='same')
F.conv2d(i2, weight(4, 4, 3, 3), weight(4), padding=1)
F.conv3d(i3, weight(4, 4, 3, 3, 3))
F.conv_transpose1d(i1, weight(4, 4, 3))
F.conv_transpose2d(i2, weight(4, 4, 3, 3))
F.conv_transpose3d(i3, weight(4, 4, 3, 3, 3))
torch.conv_tbc(b, weight(2, 8, 4), weight(4))
torch.convolution(i2, weight(4, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
F.prelu(x, v)
F.scaled_dot_product_attention(b, b, b)
F.scaled_dot_product_attention(b, b, b, is_causal=True)
nn.Linear(8, 8).to(x)(x)
nn.Linear(8, 8).to(full)(x)
nn.Bilinear(8, 8, 3).to(x)(x, y)
nn.LSTMCell(8, 8).to(x)(x)
nn.GRUCell(8, 8).to(x)(x)
nn.RNNCell(8, 8).to(x)(x)
nn.RNNCell(8, 8, nonlinearity='relu').to(x)(x)
nn.LSTMCell(8, 8).to(full)(x)
nn.GRUCell(8, 8).to(full)(x)
nn.LSTM(8, 8).to(x)(b)
nn.GRU(8, 8).to(x)(b)
nn.RNN(8, 8).to(x)(b)
nn.RNN(8, 8, nonlinearity='relu').to(x)(b)
nn.LSTM(8, 8, num_layers=2, bidirectional=True).to(full)(b)
nn.GRU(8, 8, num_layers=2, bidirectional=True).to(full)(b)
nn.MultiheadAttention(8, 2).to(x)(b, b, b)[0]
nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(x)(b)
nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(full)(b)
nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(full).eval()(b)
"""

FLOAT32 = """
torch.acos(x)
torch.asin(x)
torch.cosh(x)
torch.erfinv(x)
torch.exp(x)
x.exp()
torch.expm1(x)
torch.log(x)
torch.log10(x)
torch.log2(x)
torch.log1p(x)
torch.reciprocal(x)
torch.rsqrt(x)
torch.sinh(x)
torch.tan(x)
x ** 2
x ** 0.5
x ** y
2 ** x
1 / x
torch.pow(x, 2)
torch.pow(x, y)
torch.pow(2.0, x)
F.softplus(x)
F.layer_norm(x, [8])
F.layer_norm(x, [8], v, u)
nn.LayerNorm(8).to(x)(x)
nn.LayerNorm(8).to(full)(x)
F.rms_norm(x, [8], v)
F.group_norm(i2, 2)
nn.GroupNorm(2, 4).to(full)(i2)
F.softmax(x, dim=-1)
x.softmax(-1)
F.softmax(x, dim=-1, dtype=torch.float64)
F.softmax(x, dim=-1, dtype=torch.float16)
F.log_softmax(x, dim=-1)
F.log_softmax(x, dim=-1, dtype=torch.float64)
F.softmin(x, dim=-1)
F.gumbel_softmax(x)
x.sum()
x.sum(dim=1)
x.sum(dim=(0, 1), keepdim=True)
x.sum(dtype=torch.float16)
torch.sum(x)
x.prod()
x.prod(dim=1)
x.prod(dtype=torch.float16)
x.cumsum(dim=0)
x.cumprod(dim=0)
torch.cumsum(x, 0, dtype=torch.float16)
x.norm()
x.norm(p=1)
x.norm(dim=1)
x.norm(p='fro')
x.norm(p='nuc')
x.norm(p=2, dim=1, dtype=torch.float64)
torch.norm(x)
torch.norm(x, dim=0)
torch.linalg.norm(x)
torch.linalg.norm(x, dtype=torch.float64)
torch.linalg.vector_norm(x)
torch.linalg.vector_norm(x, dtype=torch.float64)
torch.linalg.matrix_norm(x)
torch.linalg.matrix_norm(x, ord=1)
torch.ops.aten.norm.Scalar(x, 2)
torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0])
torch.frobenius_norm(x, dim=[0, 1])
torch.nuclear_norm(x)
F.normalize(x)
torch.renorm(x, 2, 0, 1.0)
torch.dist(x, y)
torch.cdist(x, y)
torch.pdist(x)
F.pairwise_distance(x, y)
F.cosine_similarity(x, y)
torch.logsumexp(x, 1)
F.cosine_embedding_loss(x, y, signs)
F.poisson_nll_loss(x, y)
F.nll_loss(x, labels)
F.nll_loss(i2, classes)
F.cross_entropy(x, labels)
F.cross_entropy(x, y)
F.cross_entropy(i2, classes)
F.hinge_embedding_loss(x, signs[:, None])
F.kl_div(x, y, reduction='batchmean')
F.l1_loss(x, y)
F.smooth_l1_loss(x, y)
F.huber_loss(x, y)
F.mse_loss(x, y)
F.gaussian_nll_loss(x, y, y)
F.margin_ranking_loss(x[:, 0], y[:, 0], signs)
F.multilabel_margin_loss(x, mask.long())
F.multilabel_soft_margin_loss(x, y)
F.soft_margin_loss(x, signs[:, None].expand(4, 8))
F.triplet_margin_loss(x, y, x)
F.multi_margin_loss(x, labels)
F.binary_cross_entropy_with_logits(x, y)
F.binary_cross_entropy(x, y)
nn.BCELoss()(x, y)
F.ctc_loss(b.log_softmax(-1), ones(4, 2), (2, 2, 2, 2), (2, 2, 2, 2))
F.interpolate(i1, scale_factor=2, mode='nearest')
F.interpolate(i2, scale_factor=2, mode='nearest')
F.interpolate(i3, scale_factor=2, mode='nearest')
F.interpolate(i2, scale_factor=2, mode='nearest-exact')
F.interpolate(i1, scale_factor=2, mode='linear')
F.interpolate(i2, scale_factor=2, mode='bilinear')
F.interpolate(i2, scale_factor=0.5, mode='bilinear', antialias=True)
F.interpolate(i2, scale_factor=2, mode='bicubic')
F.interpolate(i2, scale_factor=0.5, mode='bicubic', antialias=True)
F.interpolate(i3, scale_factor=2, mode='trilinear')
F.interpolate(i2, scale_factor=0.5, mode='area')
"""

WIDEST = """
torch.addcdiv(x, x, y)
torch.addcmul(x, x, y)
torch.atan2(x, y)
F.bilinear(x, y, weight(3, 8, 8))
torch.cross(x[:, :3], y[:, :3], dim=1)
torch.linalg.cross(x[:, :3], y[:, :3])
torch.dot(v, u)
torch.vdot(v, u)
F.grid_sample(i2, weight(2, 5, 5, 2), align_corners=False)
F.grid_sample(i3, weight(2, 5, 5, 5, 3), align_corners=False)
torch.index_put(x, (labels,), y)
torch.tensordot(x, y, dims=2)
torch.scatter_add(x, 1, labels[:, None], y)
torch.addcdiv(low, full, low)
torch.addcmul(low, low, full)
torch.addcmul(low, low, low)
torch.atan2(low, full)
torch.cross(low[:, :3], full[:, :3], dim=1)
torch.dot(low[0], full[0])
torch.dot(low[0], low[0])
torch.dot(low[0], double[0])
torch.vdot(full[0], low[0])
F.bilinear(low, full, weight(3, 8, 8).to(low))
F.grid_sample(i2.to(low), weight(2, 5, 5, 2).to(full), align_corners=False)
torch.index_put(low, (labels,), full)
torch.index_put(full, (labels,), low)
torch.tensordot(low, full, dims=2)
torch.scatter_add(low, 1, labels[:, None], full)
torch.scatter_add(full, 1, labels[:, None], low)
torch.cat([low, full])
torch.cat([full, low])
torch.stack([low, full])
torch.stack([low, low])
torch.hstack([low, full])
low + full
low * full
low / full
full - low
torch.where(low > 0.5, low, full)
torch.lerp(low, full, 0.5)
torch.maximum(low, full)
F.mse_loss(low, full)
F.mse_loss(low, double)
F.linear(full, low)
F.linear(double, low)
low @ full.mT
torch.mv(low, full[0])
torch.einsum('ij,kj->ik', low, full)
torch.pow(low, full)
torch.pow(low, double)
F.cosine_similarity(low, full)
F.layer_norm(low, [8], full[0], full[1])
F.layer_norm(full, [8], low[0], low[1])
F.prelu(low, full[0])
torch.index_add(low, 0, labels, low)
torch.index_copy(low, 0, torch.arange(4, device=low.device), full)
torch.masked_scatter(low, mask, low)
F.scaled_dot_product_attention(low[None], full[None], full[None])
"""

NEUTRAL = """
F.relu(x)
F.gelu(x)
F.silu(x)
F.elu(x)
F.leaky_relu(x)
F.mish(x)
F.hardswish(x)
F.logsigmoid(x)
F.glu(x)
torch.sigmoid(x)
torch.tanh(x)
torch.sqrt(x)
torch.sin(x)
torch.cos(x)
torch.sinh(-x)
torch.atan(x)
torch.erf(x)
torch.erfc(x)
torch.exp2(x)
torch.square(x)
torch.abs(x)
torch.clamp(x, 0.2, 0.8)
torch.round(x)
torch.sign(x)
torch.logit(x)
torch.xlogy(x, y)
torch.logaddexp(x, y)
torch.hypot(x, y)
torch.special.entr(x)
x + y
x - y
x * y
x / y
x / 2
x + 1.5
x // y
x % y
x > y
torch.maximum(x, y)
torch.where(x > y, x, y)
torch.lerp(x, y, 0.5)
x.mean()
x.mean(dim=1)
x.mean(dim=1, dtype=torch.float32)
x.max()
x.max(dim=1)
x.min()
x.amax(dim=1)
x.argmax()
x.var()
x.std()
x.std(dim=1)
torch.var_mean(x)
x.median()
x.sort(dim=1)[0]
x.topk(2)[0]
x.nansum()
x.nanmean()
x.cummax(dim=1)[0]
torch.logcumsumexp(x, 1)
torch.trapz(x)
torch.quantile(x, 0.5)
torch.trace(m)
torch.diff(x)
F.dropout(x, 0.5)
F.embedding(labels, x)
F.embedding_bag(labels[None], x)
F.batch_norm(i2, v[:4], u[:4], training=False)
F.batch_norm(i2, None, None, training=True)
nn.BatchNorm2d(4).to(full)(i2)
nn.InstanceNorm2d(4, affine=True).to(full)(i2)
F.instance_norm(i2)
F.local_response_norm(i2, 2)
F.max_pool2d(i2, 2)
F.avg_pool2d(i2, 2)
F.avg_pool3d(i3, 2)
F.max_pool3d(i3, 2)
F.adaptive_avg_pool2d(i2, 2)
F.adaptive_avg_pool3d(i3, 2)
F.adaptive_max_pool3d(i3, 2)
F.lp_pool2d(i2, 2.0, 2)
F.pad(i2, (1, 1, 1, 1))
F.pad(i1, (1, 1), mode='reflect')
F.pad(i2, (1, 1, 1, 1), mode='reflect')
F.pad(i2, (1, 1, 1, 1), mode='replicate')
F.pixel_shuffle(i2, 2)
F.unfold(i2, 2)
F.one_hot(labels)
torch.cat([x, y])
torch.stack([x, y])
torch.index_select(x, 0, labels)
torch.index_add(x, 0, labels, y)
torch.index_copy(x, 0, torch.arange(4, device=x.device), y)
torch.gather(x, 1, labels[:, None])
torch.scatter(x, 1, labels[:, None], y)
torch.scatter_reduce(x, 1, labels[:, None], y, 'sum')
torch.masked_fill(x, mask, 0.0)
torch.take_along_dim(x, labels[:, None], 1)
torch.tril(m)
torch.kron(m, m)
torch.cov(x)
torch.corrcoef(x)
torch.linalg.det(m)
torch.linalg.inv(m)
torch.linalg.svdvals(m)
torch.linalg.eigvalsh(m)
torch.linalg.cholesky(m)
torch.linalg.solve(m, v)
torch.linalg.qr(m)[0]
torch.linalg.matrix_rank(m)
torch.pinverse(m)
torch.fft.rfft(x)
torch.fft.fft(x)
torch.stft(v, 4, return_complex=True, window=torch.ones(4, device=v.device))
torch.view_as_complex(weight(3, 2))
torch.polar(v, u)
x.clone().exp_()
x.clone().pow_(2)
x.clone().addmm_(x, m)
torch.exp(x, out=torch.empty_like(x))
torch.mm(x, m, out=torch.empty_like(x))
torch.sum(x, 1, out=torch.empty_like(x[:, 0]))
torch.exp(labels)
labels.sum()
labels.to(x) ** 2
x.half().exp()
x.float().exp()
x.double().exp()
"""

GROUPS = {
    "lower precision": LOWER_PRECISION,
    "float32": FLOAT32,
    "widest": WIDEST,
    "neutral": NEUTRAL,
}
CALLS = tuple(call for group in GROUPS.values() for call in group.strip().splitlines())


def inputs(device: str, dtype: torch.dtype, low: torch.dtype) -> dict[str, Any]:
    """The names that a call may use; floats lie in (0.1, 0.9), where every call is defined."""

    def weight(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        spread = torch.linspace(0.1, 0.9, count)[torch.arange(count) * 7 % count]
        return spread.reshape(shape).to(device, dtype)

    x, labels = weight(4, 8), torch.tensor([0, 3, 2, 1], device=device)
    return {
        "torch": torch,
        "F": F,
        "nn": torch.nn,
        "weight": weight,
        "ones": lambda *shape: torch.ones(shape, dtype=torch.long, device=device),
        "x": x,
        "y": weight(4, 8).flip(0),
        "m": weight(8, 8) + torch.eye(8, device=device, dtype=dtype) * 8,
        "v": weight(8),
        "u": weight(8).flip(0),
        "b": weight(2, 4, 8),
        "i1": weight(2, 4, 6),
        "i2": weight(2, 4, 6, 6),
        "i3": weight(2, 4, 6, 6, 6),
        "labels": labels,
        "classes": labels.remainder(4).repeat(18).reshape(2, 6, 6),
        "signs": torch.tensor([1, -1, 1, -1], device=device),
        "mask": torch.arange(32, device=device).reshape(4, 8) % 3 == 0,
        "low": x.to(low),
        "full": x.float(),
        "double": x.double(),
    }


def result(call: str, device: str, dtype: torch.dtype, low: torch.dtype) -> str:
    """What a call gives under autocast: the dtypes it returns, or "Error: " and the first line."""
    names = inputs(device, dtype, low)
    with warnings.catch_warnings(), torch.autocast(device, dtype=low):
        warnings.simplefilter("ignore")
        try:
            value = eval(call, names)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return " ".join(_dtypes(value))


def _dtypes(value: Any) -> list[str]:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype).removeprefix("torch.")]
    return [name for item in value for name in _dtypes(item)]


def run_table(device: str) -> dict[str, dict[str, str]]:
    """Every call in every column: {"float16 autocast, float32 inputs": {call: result}}."""
    return {
        column_name(low, dtype): {
            call: result(call, device, getattr(torch, dtype), getattr(torch, low)) for call in CALLS
        }
        for low, dtype in COLUMNS
    }


def column_name(low: str, dtype: str) -> str:
    """How the record names a column."""
    return f"{low} autocast, {dtype} inputs"
