"""What a client's traced loss may call. The names are torch's, as torch.fx writes them; the groups say how large a
result can be, which is judged before a call is made.

Left out on purpose: what leaves torch (``item``), changes a value in place, draws random numbers (a replay must give
the same bits), leaves memory uninitialised, or takes long whatever its result is (decompositions).

Names may be added, never taken away: journals hold losses that use them, and replays must still find them.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# -- under the same name as a function of torch and as a method of a tensor -------------------------------------------

POINTWISE = _names(
    """
    abs absolute acos acosh add addcdiv addcmul all amax amin aminmax any argmax argmin asin atan atan2 atanh
    bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone copysign cos cosh
    count_nonzero cummax cummin cumprod cumsum detach diff dist div divide eq erf erfc exp exp2 expm1 fix
    floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot isclose isfinite
    isinf isnan isneginf isposinf le lerp less less_equal log log10 log1p log2 logaddexp logaddexp2 log_softmax
    logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill masked_select max
    maximum mean min minimum mul multiply nan_to_num nanmean nansum ne neg negative norm not_equal positive pow prod
    reciprocal relu remainder round rsqrt sgn sigmoid sign sin sinc sinh softmax sqrt square std sub subtract sum tan
    tanh tril triu true_divide trunc var xlogy
    """
)
"""At most as large as their tensors broadcast together."""

SLOW = _names(
    """
    argsort asinh digamma erfinv float_power kthvalue lgamma logcumsumexp median nanmedian sort topk
    """
)
"""As large as ``POINTWISE``, but each cell takes long."""

JOINING = _names(
    """
    diagonal flatten flip moveaxis movedim narrow permute ravel reshape roll select squeeze swapaxes swapdims t
    transpose unflatten unsqueeze
    """
)
"""At most as large as all their tensors together."""

SIZED = _names(
    """
    diag diag_embed gather index_add index_fill index_select kron outer repeat_interleave scatter scatter_add take
    take_along_dim tile
    """
)
"""As large as torch says beforehand, given the shapes alone."""

PRODUCTS = _names("bmm dot inner matmul mm mv vdot")
"""Like ``SIZED``; each cell takes as long as the first argument's last dimension."""

PIECES = _names("chunk split unbind")
"""Several results, all together as large as the argument."""

SHARED = POINTWISE | SLOW | JOINING | SIZED | PRODUCTS | PIECES

# -- functions alone --------------------------------------------------------------------------------------------------

POINTWISE_FUNCTIONS = _names(
    """
    torch.full_like torch.ones_like torch.std_mean torch.var_mean torch.where torch.zeros_like
    torch.functional.norm torch.cosine_similarity
    torch._C._nn.elu torch._C._nn.gelu torch._C._nn.hardtanh torch._C._nn.leaky_relu torch._C._nn.log_sigmoid
    torch._C._nn.silu torch._C._nn.softplus torch._C._special.special_entr
    torch._C._special.special_expit torch._C._special.special_expm1
    torch._C._special.special_log1p torch._C._special.special_log_softmax torch._C._special.special_logit
    torch._C._special.special_logsumexp torch._C._special.special_softmax torch._C._special.special_xlogy
    torch.nn.functional.binary_cross_entropy torch.nn.functional.binary_cross_entropy_with_logits
    torch.nn.functional.elu torch.nn.functional.hardtanh torch.nn.functional.hinge_embedding_loss
    torch.nn.functional.huber_loss torch.nn.functional.kl_div torch.nn.functional.l1_loss
    torch.nn.functional.leaky_relu torch.nn.functional.log_softmax torch.nn.functional.margin_ranking_loss
    torch.nn.functional.mse_loss torch.nn.functional.normalize torch.nn.functional.relu
    torch.nn.functional.relu6 torch.nn.functional.silu torch.nn.functional.smooth_l1_loss
    torch.nn.functional.softmax torch.nn.functional.softmin torch.nn.functional.softsign
    torch.nn.functional.tanhshrink
    operator.abs operator.add operator.and_ operator.eq operator.floordiv operator.ge
    operator.gt operator.invert operator.le operator.lt
    operator.mod operator.mul operator.ne operator.neg operator.or_ operator.pos operator.pow operator.sub
    operator.truediv operator.xor
    """
)

JOINING_FUNCTIONS = _names(
    """
    torch.cat torch.column_stack torch.concat torch.concatenate torch.dstack torch.hstack torch.stack torch.vstack
    """
)

SIZED_FUNCTIONS = _names(
    """
    torch.arange torch.broadcast_to torch.eye torch.full torch.linspace torch.ones torch.zeros
    torch._C._nn.one_hot torch._C._nn.pad torch.nn.functional.pad operator.getitem
    """
)

PRODUCT_FUNCTIONS = frozenset({"torch._C._nn.linear", "operator.matmul"})

PIECES_FUNCTIONS = frozenset({"torch.functional.split"})

SPECIAL_FUNCTIONS = frozenset(
    {"getattr", "torch.functional.einsum", "torch.einsum", "operator.lshift", "operator.rshift"}
)

NUMBER_FUNCTIONS = _names(
    """
    math.atan2 math.ceil math.copysign math.cos math.erf math.erfc math.exp math.expm1 math.fabs math.floor
    math.hypot math.isfinite math.isinf math.isnan math.lgamma math.log math.log10 math.log1p math.log2 math.pow
    math.sin math.sqrt math.tan math.tanh math.trunc
    """
)
"""Of numbers, never of tensors."""

# -- methods alone ----------------------------------------------------------------------------------------------------

POINTWISE_METHODS = _names(
    """
    bfloat16 bool contiguous cpu double float half int long new_tensor short to type_as where
    """
)

JOINING_METHODS = _names("reshape_as view view_as")

SIZED_METHODS = _names("expand expand_as new_full new_ones new_zeros repeat unfold")

NUMBER_METHODS = _names("dim is_floating_point ndimension nelement numel size")
"""What is known of a tensor without its values."""

FUNCTIONS = (
    frozenset(f"torch.{name}" for name in SHARED)
    | POINTWISE_FUNCTIONS
    | JOINING_FUNCTIONS
    | SIZED_FUNCTIONS
    | PRODUCT_FUNCTIONS
    | PIECES_FUNCTIONS
    | SPECIAL_FUNCTIONS
    | NUMBER_FUNCTIONS
)
METHODS = SHARED | POINTWISE_METHODS | JOINING_METHODS | SIZED_METHODS | NUMBER_METHODS

ATTRIBUTES = _names("T data device dtype indices mT ndim shape values")
"""What ``getattr`` may ask for."""

KEYWORDS = _names(
    """
    alpha beta bins correction count decimals delta descending dim dim0 dim1 dims diagonal dtype end eps equal_nan
    fill_value full index indices input k keepdim largest length log_target lower_bound margin max
    max_val mask memory_format min min_val mode n nan neginf negative_slope num_classes offset other output_size p
    pos_weight posinf reduce reduction repeats rounding_mode rtol atol self shape shifts size sizes sorted src
    stable start step steps target tensor1 tensor2 tensors threshold to_size unbiased value values weight x1 x2 y
    split_size_or_sections chunks dim2 end_dim start_dim source destination axis axis0 axis1 equation operands
    approximate condition exponent vec2 mat2 input1 input2 split_size
    device layout _stacklevel copy non_blocking inplace out pin_memory requires_grad size_average
    """
)
DEFAULT_KEYWORDS = _names("inplace out pin_memory reduce requires_grad size_average")
"""May be there, since torch.fx writes down defaults too, but only as ``None`` or ``False``."""

DTYPES = _names("bfloat16 bool double float float16 float32 float64 half int int16 int32 int64 int8 long short uint8")
