"""Operations by what they can do to a number: multiply up, sum up, explode, or divide by nothing."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MATMULS = _names(
    """mm addmm bmm baddbmm addbmm mv addmv dot vdot linear convolution _convolution conv_transpose2d einsum
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention scaled_dot_product_attention lstm gru _thnn_fused_lstm_cell"""
)
# Sums of what is there: divided by, they are counts.
COUNTS = _names("sum nansum index_add scatter_add scatter_reduce index_reduce index_put count_nonzero bincount cumsum")
SCATTERED = _names("index_add scatter_add")
NORMS = _names("norm linalg_vector_norm dist cdist _cdist_forward _euclidean_dist")
SPREADS = _names("std var std_mean var_mean")
SUMS = (
    COUNTS
    | NORMS
    | SPREADS
    | _names(
        """mean logsumexp avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_avg_pool1d segment_reduce native_layer_norm native_batch_norm native_group_norm mse_loss trace
        embedding_bag _embedding_bag _native_batch_norm_legit renorm"""
    )
)
PRODUCTS = _names("mul pow square prod cumprod addcmul")
EXPONENTIALS = _names("exp exp2 expm1 sinh cosh special_exp2 special_expm1")
ADDITIONS = _names("add sub rsub lerp")
FILLS = _names("masked_fill fill full full_like where clamp clamp_min clamp_max scalar_tensor constant_pad_nd")
# Operations with a point where they, or their slopes, are not finite: at 0, and at -1, 0 or 1.
POLES = _names("div reciprocal log log2 log10 log1p sqrt rsqrt pow xlogy lgamma digamma special_entr")
ENDS = _names("acos asin atanh logit acosh erfinv special_xlog1py")
AT_ZERO = POLES - {"log1p"} | {"logit"}
AT_ONE = ENDS | {"log1p"}
# Operations that make a large error of a small one where what they read is large against their period.
PERIODIC = _names("sin cos tan remainder fmod frac")
CASTS = _names("_to_copy to copy")
# Operations that hand numbers on as they are.
CARRIERS = CASTS | _names(
    """cat stack clone contiguous index index_select gather embedding where masked_fill relu max_pool2d_with_indices
    repeat roll flip neg abs constant_pad_nd detach select_scatter slice_scatter"""
)

# Operations whose slopes do not depend on what they are given.
LINEAR = (
    CASTS
    | ADDITIONS
    | _names("sum nansum mean neg cat stack clone contiguous index_select gather repeat detach ones_like zeros_like")
)


def base_name(name: str) -> str:
    """'aten.add_' is 'add'."""
    name = name.removeprefix("aten.").split(".")[0]
    return name.rstrip("_") or name
