"""What is FP32 under CUDA's autocast, though nothing in the file casts it: the operations that autocast widens."""

from __future__ import annotations

import ast
import re

from floatline.lint.reading.autocast_regions import find_region, is_in_disabled_region, is_on
from floatline.lint.reading.reaching import given_to, owned_values
from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import parameters, read_once
from floatline.lint.reading.values import assignments, reaching_values, read_dtype, read_number

# As recorded from torch 2.11 on a GPU: what they give is FP32, whatever they are given.
WIDENED = frozenset(
    """acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
    cross_entropy cumprod cumsum dist erfinv exp expm1 frobenius_norm gaussian_nll_loss group_norm
    hinge_embedding_loss huber_loss interpolate kl_div l1_loss layer_norm log log10 log1p log2 log_softmax
    logsumexp margin_ranking_loss matrix_norm mse_loss multi_margin_loss multilabel_margin_loss nll_loss norm
    normalize nuclear_norm pairwise_distance pdist poisson_nll_loss pow prod reciprocal renorm rms_norm rsqrt
    sinh smooth_l1_loss soft_margin_loss softmax softmin softplus square sum tan trace triplet_margin_loss
    upsample vector_norm""".split()  # noqa: SIM905
)
# Those of linear algebra have no kernel for 16 bits, and weights are FP32 until a product reads them.
_ALWAYS_WIDE = frozenset(
    """Parameter det slogdet logdet inv inverse pinv cholesky eigh eigvalsh eig symeig svd svdvals qr solve lstsq
    matrix_exp""".split()  # noqa: SIM905
)
# What is drawn has no gradient.
_DRAWN = frozenset(("uniform_", "normal_", "exponential_", "bernoulli_", "rand_like", "randn_like"))
WIDENED_MODULES = frozenset(
    """Softmax LogSoftmax Softmin Softplus LayerNorm GroupNorm Upsample CosineSimilarity PairwiseDistance
    CrossEntropyLoss MSELoss L1Loss SmoothL1Loss KLDivLoss NLLLoss BCEWithLogitsLoss""".split()  # noqa: SIM905
)
# Matrix products are narrowed, whatever they are given.
_NARROWED = frozenset(
    """matmul mm bmm addmm baddbmm einsum linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d scaled_dot_product_attention mv addmv addr addbmm multi_dot vecdot prelu chain_matmul""".split()  # noqa: SIM905
)
# Of several tensors, the widest decides.
_LISTS = frozenset(("cat", "stack", "concat", "hstack", "vstack"))
# Methods that give the dtype of what they are called on, and that arrays have as well.
_KEEPS = frozenset(
    """mean max min amax amin std var clamp clip squeeze reshape view transpose flatten repeat round diff abs
    contiguous detach clone unsqueeze permute expand sqrt masked_fill item cpu cuda""".split()  # noqa: SIM905
)
_DEPTH = 10
# A model that is FP16, not a tensor: `Net().half()`, `self.model.half()`, `from_pretrained(…, dtype=torch.float16)`.
_PURE_HALF = re.compile(
    r"(\b[A-Z]\w*\([^()\n]*\)|model|net|network|encoder|decoder|generator|pipe|unet|vae)\.half\(\)"
    r"|(\b[A-Z]\w*\([^()\n]*\)|model|net)\.to\([^()\n]*torch\.(float16|half)\b"
    r"|from_pretrained\([^()]*dtype\s*=\s*torch\.(float16|half)\b|16-true"
)
_WORDS_OF_HALF = (".half()", "torch.float16", "torch.half", "16-true")
_ON_A_CPU = re.compile(r"""autocast\(\s*(device_type\s*=\s*)?["']cpu|cpu\.amp""")
_SIXTEEN_BITS = re.compile(
    r"autocast|GradScaler|fp16|bf16|mixed_precision|Accelerator|TrainingArguments|LightningModule"
    r"|\buse_amp\b|\bapex\b|deepspeed|precision\W{1,4}16|\.half\(\)|torch\.float16"
)


def shows_pure_half(text: str) -> bool:
    """Whether a file puts a model into FP16."""
    return any(word in text for word in _WORDS_OF_HALF) and _PURE_HALF.search(text) is not None


def shows_16_bits(text: str) -> bool:
    """Whether a file shows that somebody runs it in 16 bits, or may by an option."""
    return _SIXTEEN_BITS.search(text) is not None


def shows_half(source: Source, node: ast.AST) -> bool:
    """Whether something in an expression is cast to FP16, or made in it, before the eyes of who reads it."""
    return any(isinstance(one, ast.expr) and read_dtype(source, one) == "half" for one in ast.walk(node))


def trains_in_pure_half(text: str) -> bool:
    """Whether a file shows that its project trains weights in FP16."""
    return "16-true" in text or (".half()" in text and ".backward(" in text and "optim" in text)


def is_beside_autocast(source: Source, node: ast.AST) -> bool:
    """Whether CUDA's autocast does not widen what stands here: it is a CPU's, or its region lies elsewhere.

    Of a function that has a region, what stands outside of it is given what comes out of it: 16 bits.
    """
    if _ON_A_CPU.search(source.text):
        return True
    function = source.function(node)
    if isinstance(function, (ast.Module, ast.Lambda)) or find_region(source, node) is not None:
        return False
    return any(
        isinstance(one, (ast.With, ast.AsyncWith)) and any(is_on(source, item.context_expr) for item in one.items)
        for one in ast.walk(function)
    )


def is_wide_under_autocast(source: Source, node: ast.expr) -> bool:
    """Whether a value is FP32 under CUDA's autocast: by a cast, or since autocast widens what makes it."""
    return _is_wide(source, node, 0)


def _is_wide(source: Source, node: ast.expr, depth: int) -> bool:
    if depth > _DEPTH:
        return False
    known = source.answers.setdefault(_is_wide, {})
    if node not in known:
        known[node] = False  # what is made from itself shows nothing
        known[node] = _shows_wide(source, node, depth)
    return known[node]


def _shows_wide(source: Source, node: ast.expr, depth: int) -> bool:
    dtype = read_dtype(source, node)
    if dtype:
        return dtype == "wide"
    if isinstance(node, ast.Name):
        return _is_name_wide(source, node, depth)
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return _is_wide(source, node.value, depth + 1)
    if isinstance(node, ast.Attribute):
        if node.attr in ("T", "mT", "real", "imag", "values"):
            return _is_wide(source, node.value, depth + 1)
        return any(_is_owned_wide(source, one, depth + 1) for one in owned_values(source, node))
    if isinstance(node, ast.UnaryOp):
        return _is_wide(source, node.operand, depth + 1)
    if isinstance(node, ast.IfExp):
        return all(_is_wide(source, side, depth + 1) for side in (node.body, node.orelse))
    if isinstance(node, ast.BinOp):
        return _is_sum_wide(source, node, depth)
    return isinstance(node, ast.Call) and _is_call_wide(source, node, depth)


def _is_owned_wide(source: Source, node: ast.expr, depth: int) -> bool:
    """A parameter, a list of them, or a part of one."""
    if isinstance(node, ast.Call):
        return source.call_name(node) in ("Parameter", "ParameterList", "ParameterDict")
    return isinstance(node, ast.Subscript) and _is_wide(source, node, depth)


def _is_sum_wide(source: Source, node: ast.BinOp, depth: int) -> bool:
    if isinstance(node.op, ast.MatMult):
        return False
    if isinstance(node.op, ast.Pow):
        return True
    if isinstance(node.op, ast.Div) and read_number(source, node.left) is not None:
        return True  # a reciprocal
    return any(_is_wide(source, side, depth + 1) for side in (node.left, node.right))


def _is_name_wide(source: Source, node: ast.Name, depth: int) -> bool:
    values = reaching_values(source, node)
    if not values:
        function = source.function(node)
        if isinstance(function, ast.Module) or node.id not in parameters(function):
            return False
        given = [one for one in given_to(source, function, node.id) if not isinstance(one, ast.Constant)]
        return bool(given) and all(_is_wide(source, one, depth + 1) for one in given)
    if all(value is not None for value in values):
        return all(_is_wide(source, value, depth + 1) for value in values if value is not None)
    # Parts of a tuple: `values, indices = x.softmax(-1).max(-1)`.
    statements = [at for at, _ in assignments(source, source.function(node)).get(node.id, ())]
    before = [at for at in statements if (at.end_lineno or at.lineno) < node.lineno]
    if len(before) != 1 or not isinstance(before[0], ast.Assign):
        return False
    return _is_wide(source, before[0].value, depth + 1)


def _is_call_wide(source: Source, node: ast.Call, depth: int) -> bool:
    name = source.call_name(node).rstrip("_")
    if name in _NARROWED or name in ("half", "type_as", "to", "type"):
        return False
    if name in WIDENED or name in _ALWAYS_WIDE:
        return True
    if inner := _returned_by(source, node.func):
        return all(_is_wide(source, one, depth + 1) for one in inner)
    if isinstance(node.func, ast.Attribute):
        made = [source.call_name(one) for one in owned_values(source, node.func) if isinstance(one, ast.Call)]
        if made:  # self.softmax(x), with self.softmax = nn.Softmax(-1)
            return all(one in WIDENED_MODULES for one in made)
    if source.path(node.func).startswith("einops.") and node.args:  # reduce(x, "b n d -> b n", "sum")
        sums = any(isinstance(one, ast.Constant) and one.value in ("sum", "prod") for one in node.args)
        return sums or _is_wide(source, node.args[0], depth + 1)
    found = source.operation(node)
    if found is None:  # a method that numpy has as well, such as x.mean()
        owner = node.func.value if isinstance(node.func, ast.Attribute) and not source.path(node.func) else None
        return owner is not None and name in _KEEPS and _is_wide(source, owner, depth + 1)
    if found.name in _LISTS and isinstance(found.operand, (ast.List, ast.Tuple)):
        return any(_is_wide(source, one, depth + 1) for one in found.operand.elts)
    sides = [found.operand, *found.args] if found.name != "where" or found.is_method else list(found.args)
    return any(_is_wide(source, side, depth + 1) for side in sides if read_number(source, side) is None)


def _returned_by(source: Source, called: ast.expr) -> list[ast.expr]:
    """What a plain function of the file returns, or a method, `self.distance`; also of one with another name."""
    if isinstance(called, ast.Name):
        return _returned(source, called.id)
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name) or called.value.id != "self":
        return []
    owner = source.class_of(called)
    methods = {} if owner is None else _methods(source, owner)
    if called.attr not in methods:  # self.distance = self._squared_distance
        others = [one.attr for one in owned_values(source, called) if isinstance(one, ast.Attribute)]
        return [] if len(others) != 1 or others[0] not in methods else _ends_of(source, methods[others[0]])
    return _ends_of(source, methods[called.attr])


@read_once
def _methods(source: Source, owner: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for one in _members(source, owner):
        if isinstance(one, ast.FunctionDef):
            found.setdefault(one.name, one)
    return found


def _ends_of(source: Source, function: ast.FunctionDef) -> list[ast.expr]:
    ends = [one for one in ast.walk(function) if isinstance(one, ast.Return) and source.function(one) is function]
    return [one.value for one in ends if one.value is not None]


@read_once
def _returned(source: Source, name: str) -> list[ast.expr]:
    """What a plain function of the file returns; empty where there is none, or more than one of its name."""
    made = [one for one in source.tree.body if isinstance(one, ast.FunctionDef) and one.name == name]
    return _ends_of(source, made[0]) if len(made) == 1 else []


# What a function is given under these names comes out of a model; under those it is data, or whole numbers.
_OF_MODELS = frozenset(
    """pred preds prediction predictions output outputs out logit logits score scores prob probs probability heatmap
    hidden feat feats feature features attn attention activation activations embed embedding embeddings fake
    recon reconstruction energy similarity sim""".split()  # noqa: SIM905
)
_OF_DATA = frozenset(
    """target targets label labels gt mask masks box boxes bbox bboxes length lengths id ids idx index indices t
    timestep timesteps time times pos position positions coord coords point points xyz edge src dst batch seed weight
    eps beta alpha gamma sigma temperature scale bound bounds lower upper margin""".split()  # noqa: SIM905
)
_MODELS = frozenset("model net network encoder decoder generator discriminator backbone head unet policy".split())  # noqa: SIM905


def shows_narrow(source: Source, node: ast.expr, *, surely: bool = False) -> bool:
    """Whether a file shows that autocast gives a value 16 bits: a product or a layer made it, and nothing widened it.

    Args:
        source: The file.
        node: The value.
        surely: Whether that must stand in the file; else parameters that are named for what models give count, too.
    """
    return _is_narrow(source, node, 0, surely)


def _is_narrow(source: Source, node: ast.expr, depth: int, surely: bool) -> bool:
    if depth > _DEPTH:
        return False
    known = source.answers.setdefault(_is_narrow, {})
    if (node, surely) not in known:
        known[node, surely] = False  # what is made from itself shows nothing
        known[node, surely] = not _is_wide(source, node, 0) and _shows_narrow(source, node, depth + 1, surely)
    return known[node, surely]


def _shows_narrow(source: Source, node: ast.expr, depth: int, surely: bool) -> bool:
    if read_dtype(source, node) == "half":
        return True
    if isinstance(node, (ast.Call, ast.BinOp)) and "autocast" in source.text and is_in_disabled_region(source, node):
        return False  # what a layer makes there is FP32, as its weights are
    if isinstance(node, ast.Name):
        return (not surely and is_of_model(source, node)) or any(
            _is_narrow(source, one, depth, surely) for one in _made_from(source, node)
        )
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return _is_narrow(source, node.value, depth, surely)
    if isinstance(node, ast.Attribute):
        return node.attr in ("T", "mT", "data", "values") and _is_narrow(source, node.value, depth, surely)
    if isinstance(node, ast.UnaryOp):
        return _is_narrow(source, node.operand, depth, surely)
    if isinstance(node, ast.IfExp):
        return any(_is_narrow(source, side, depth, surely) for side in (node.body, node.orelse))
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult) or any(
            _is_narrow(source, x, depth, surely) for x in (node.left, node.right)
        )
    if isinstance(node, (ast.List, ast.Tuple)):
        return any(_is_narrow(source, one, depth, surely) for one in node.elts)
    return isinstance(node, ast.Call) and _is_call_narrow(source, node, depth, surely)


def _made_from(source: Source, node: ast.Name) -> list[ast.expr]:
    """What a name may hold: what is assigned to it, also as a part of a tuple, and what it is given as a parameter."""
    function = source.function(node)
    values = [one for one in reaching_values(source, node) if one is not None]
    if not values:
        statements = assignments(source, function).get(node.id, ())
        values = [at.value for at, _ in statements if isinstance(at, ast.Assign) and at.lineno <= node.lineno]
    if not values and not isinstance(function, ast.Module) and node.id in parameters(function):
        values = given_to(source, function, node.id)
    return values


def _is_call_narrow(source: Source, node: ast.Call, depth: int, surely: bool) -> bool:
    name = source.call_name(node).rstrip("_")
    if name in _NARROWED:
        return True
    if name in WIDENED or source.call_name(node) in _DRAWN:
        return False
    if isinstance(node.func, ast.Name) and not source.path(node.func):
        if inner := _returned(source, node.func.id):
            return any(_is_narrow(source, one, depth, surely) for one in inner)
        made = source.value(node.func)
        is_object = isinstance(made, ast.Call) and source.call_name(made)[:1].isupper()
        return is_object or node.func.id in _MODELS
    if isinstance(node.func, ast.Attribute) and not source.path(node.func):
        if _is_layer(source, node.func):
            return True
        if inner := _returned_by(source, node.func):
            return any(_is_narrow(source, one, depth, surely) for one in inner)
        # What a method of another file's object makes of 16 bits is not shown.
        given = [node.func.value] if surely else [node.func.value, *node.args]
        return any(_is_narrow(source, one, depth, surely) for one in given)
    return any(_is_narrow(source, one, depth, surely) for one in node.args)


def _is_layer(source: Source, node: ast.Attribute) -> bool:
    """`self.name` of a module that is no method of it: a layer, if nothing says that autocast widens it."""
    owner = source.class_of(node)
    is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
    if not is_own or owner is None or not source.is_module_class(owner):
        return False
    if any(isinstance(one, ast.FunctionDef) and one.name == node.attr for one in _members(source, owner)):
        return False
    made = [source.call_name(one) for one in owned_values(source, node) if isinstance(one, ast.Call)]
    return not made or any(one not in WIDENED_MODULES and one[:1].isupper() for one in made)


def _members(source: Source, owner: ast.ClassDef) -> list[ast.stmt]:
    """The statements of a class, and of those of the file that it stands on."""
    found, seen, waiting = list[ast.stmt](), set[str](), [owner]
    while waiting:
        one = waiting.pop()
        if one.name not in seen:
            seen.add(one.name)
            found += one.body
            bases = [base.id for base in one.bases if isinstance(base, ast.Name)]
            waiting += [source.classes[base] for base in bases if base in source.classes]
    return found


def is_of_model(source: Source, node: ast.Name) -> bool:
    """A parameter that is named for what models give, or one of a loss or a module's `forward` not named for data."""
    function = source.function(node)
    if not isinstance(function, ast.FunctionDef) or node.id not in parameters(function):
        return False
    words = set(node.id.lower().split("_"))
    if words & _OF_DATA:
        return False
    if words & _OF_MODELS:
        return True
    if node.id == "self":
        return False
    owner = source.class_of(function)
    is_loss = "loss" in function.name.lower() or (owner is not None and owner.name.lower().endswith("loss"))
    return is_loss or (function.name == "forward" and source.is_module_class(owner))
