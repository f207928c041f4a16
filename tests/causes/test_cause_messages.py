"""Error messages, made by real code where a CPU can make them, and the causes they are matched to."""

from __future__ import annotations

import datetime
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from floatline.causes import find_named_causes, find_symptom, match_message

HALF = torch.float16
x = torch.ones(4, 4, dtype=HALF)
everywhere = torch.ones(4, 4, dtype=torch.bool)


def message_of(action) -> str:
    """What the user sees: the exception, or else the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join(f"{w.category.__name__}: {w.message}" for w in caught)


class Loop:
    """A layer, an optimizer and a scaler whose calls can be made in any order."""

    def __init__(self, *, dtype=torch.float32, factor=1.0):
        self.layer = nn.Linear(2, 2, dtype=dtype)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu")
        self.loss = self.layer(torch.ones(1, 2, dtype=dtype)).sum() * factor

    def backward(self):
        self.scaler.scale(self.loss).backward()
        return self

    def unscale(self):
        self.scaler.unscale_(self.optimizer)
        return self

    def step(self):
        self.scaler.step(self.optimizer)
        return self

    def step_directly(self):
        self.optimizer.step()
        return self

    def update(self):
        self.scaler.update()
        return self

    def schedule(self):
        self.scheduler.step()
        return self


def never_backward():
    loop = Loop()
    loop.scaler.scale(loop.loss.detach())
    loop.step()


def two_ranks_of_which_one_skips():
    """An all-reduce that only one of two ranks joins, in threads."""
    store, errors, gave_up = torch.distributed.HashStore(), [], threading.Event()

    def run(rank: int) -> None:
        group = torch.distributed.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=5))
        try:
            if rank == 0:
                group.allreduce([torch.ones(1)]).wait()
            else:
                gave_up.wait(250)
        except RuntimeError as error:
            errors.append(error)
            gave_up.set()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    raise errors[0]


class NoCustomForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(w)
        return a @ w

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad @ w, None


def backward_of_a_custom_function():
    a, w = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3)
    with torch.autocast("cpu", dtype=HALF):
        y = NoCustomForward.apply(a, w)
    y.sum().backward()


def disabled_region_without_a_cast():
    with torch.autocast("cpu", dtype=HALF):
        y = nn.Linear(3, 3)(torch.ones(2, 3))
        with torch.autocast("cpu", enabled=False):
            nn.Linear(3, 3)(y)


def anomaly(function, value: float):
    def action():
        leaf = torch.full((2,), value, requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            function(leaf).sum().backward()

    return action


def numpy_half(function, *values: float):
    return lambda: function(*(np.full(2, value, np.float16) for value in values))


NAMED = {
    "masked_fill": (lambda: x.masked_fill(everywhere, -1e9), "scalar-out-of-range"),
    "fill_": (lambda: x.clone().fill_(1e9), "scalar-out-of-range"),
    "clamp": (lambda: x.clamp(-1e9, 1e9), "scalar-out-of-range"),
    "pad": (lambda: F.pad(x, (1, 1), value=-1e9), "scalar-out-of-range"),
    "bf16 fill": (lambda: x.bfloat16().masked_fill(everywhere, 1e39), "scalar-out-of-range"),
    "unscale half": (lambda: Loop(dtype=HALF).backward().step(), "fp16-params-with-scaler"),
    "no gradients": (never_backward, "params-not-trained"),
    "no graph": (lambda: torch.ones(()).backward(), "params-not-trained"),
    "no parameters": (lambda: torch.optim.SGD([], lr=0.1), "params-not-trained"),
    "unscale twice": (lambda: Loop().backward().unscale().unscale(), "scaler-misuse"),
    "unscale after step": (lambda: Loop().backward().step().unscale(), "scaler-misuse"),
    "step twice": (lambda: Loop().backward().step().step(), "scaler-misuse"),
    "optimizer.step directly": (lambda: Loop().backward().step_directly().update(), "scaler-misuse"),
    "step without scale": (lambda: Loop().step(), "scaler-misuse"),
    "update without scale": (lambda: Loop().update(), "scaler-misuse"),
    "unscale without scale": (lambda: Loop().unscale(), "scaler-misuse"),
    "empty scaler state": (lambda: Loop().scaler.load_state_dict({}), "scaler-state-lost"),
    "no scaler in checkpoint": (lambda: {"model": 1}["scaler"], "scaler-state-lost"),
    "skipped first step": (
        lambda: Loop(factor=float("inf")).backward().step().update().schedule(),
        "scheduler-vs-skipped-step",
    ),
    "slogdet": (lambda: torch.linalg.slogdet(x), "unsupported-half-op"),
    "svd": (lambda: torch.linalg.svd(x), "unsupported-half-op"),
    "svd bf16": (lambda: torch.linalg.svd(x.bfloat16()), "unsupported-half-op"),
    "fft": (lambda: torch.fft.fft(x), "unsupported-half-op"),
    "cdist": (lambda: torch.cdist(x, x), "unsupported-half-op"),
    "numpy of bf16": (lambda: x.bfloat16().numpy(), "unsupported-half-op"),
    "quantile": (lambda: torch.quantile(x, 0.5), "unsupported-half-op"),
    "index put": (lambda: x.clone().__setitem__(torch.tensor([0]), torch.ones(1, 4)), "dtype-mismatch"),
    "index add": (lambda: torch.ones(4, 4).index_add(0, torch.tensor([0]), x[:1]), "dtype-mismatch"),
    "index copy": (lambda: torch.ones(4, 4).index_copy(0, torch.tensor([0]), x[:1]), "dtype-mismatch"),
    "scatter": (lambda: torch.ones(4, 4).scatter(0, torch.zeros(4, 4).long(), x), "dtype-mismatch"),
    "assigned gradient": (lambda: setattr(nn.Parameter(torch.ones(2)), "grad", x[0, :2]), "dtype-mismatch"),
    "lerp": (lambda: torch.lerp(torch.zeros(4, 4), x, 0.5), "dtype-mismatch"),
    "bce dtypes": (lambda: F.binary_cross_entropy(x, x.float()), "dtype-mismatch"),
    "max of nothing": (lambda: torch.zeros(0).max(), "empty-reduction"),
    "max of an empty dim": (lambda: torch.zeros(0, 3).max(0), "empty-reduction"),
    "var of one": (lambda: torch.ones(1).var(), "empty-reduction"),
    "numpy mean of nothing": (lambda: np.mean([]), "empty-reduction"),
    "numpy cast": (lambda: np.full(2, 1e5).astype(np.float16), "input-out-of-range"),
    "numpy product": (numpy_half(np.multiply, 300, 300), "product-overflow"),
    "numpy square": (numpy_half(np.square, 300), "product-overflow"),
    "numpy exp": (numpy_half(np.exp, 12), "exp-overflow"),
    "numpy sum": (lambda: np.ones(70_000, np.float16).sum(), "reduction-overflow"),
    "one rank skips": (two_ranks_of_which_one_skips, "distributed-desync"),
}

SHARED = {
    "linear": (lambda: nn.Linear(4, 4)(x), "dtype-mismatch"),
    "linear without bias": (lambda: nn.Linear(4, 4, bias=False)(x), "dtype-mismatch"),
    "matmul": (lambda: x @ torch.ones(4, 4), "dtype-mismatch"),
    "matrix times vector": (lambda: x @ torch.ones(4), "dtype-mismatch"),
    "dot": (lambda: x[0] @ torch.ones(4), "dtype-mismatch"),
    "bmm": (lambda: torch.bmm(x[None], torch.ones(1, 4, 4)), "dtype-mismatch"),
    "baddbmm": (lambda: torch.baddbmm(torch.ones(1, 4, 4), x[None], x[None]), "dtype-mismatch"),
    "conv": (lambda: nn.Conv2d(1, 1, 3)(x[None, None]), "dtype-mismatch"),
    "layer norm": (lambda: nn.LayerNorm(4).half()(torch.ones(2, 4)), "dtype-mismatch"),
    "lstm": (lambda: nn.LSTM(4, 4)(x[None]), "dtype-mismatch"),
    "attention": (
        lambda: F.scaled_dot_product_attention(x[None], x[None].float(), x[None].float()),
        "dtype-mismatch",
    ),
    "custom function": (backward_of_a_custom_function, "dtype-mismatch"),
    "disabled region": (disabled_region_without_a_cast, "dtype-mismatch"),
    "sqrt at zero": (anomaly(lambda t: t.sqrt() * 0, 0.0), "singular-gradient"),
    "pow at zero": (anomaly(lambda t: t.pow(0.5) * 0, 0.0), "singular-gradient"),
    "acos at one": (anomaly(lambda t: t.acos() * 0, 1.0), "singular-gradient"),
    "softmax of -inf": (anomaly(lambda t: t.softmax(0), float("-inf")), "fully-masked-softmax"),
    "half exp": (anomaly(lambda t: 1 / (1 + t.half().exp()), 20.0), "exp-overflow"),
    "half log sigmoid": (
        anomaly(lambda t: (torch.sigmoid(-t.half()) + 1e-8).log(), 20.0),
        "rounded-onto-singularity",
    ),
    "layer norm of inf": (anomaly(lambda t: F.layer_norm(t, (2,)), float("inf")), "activation-overflow"),
    "norm of inf gradients": (
        lambda: nn.utils.get_total_norm([torch.full((2,), float("inf"))], error_if_nonfinite=True),
        "gradient-overflow",
    ),
    "sampling": (lambda: torch.multinomial(torch.tensor([float("nan"), 1.0]), 1), "activation-overflow"),
    "distribution": (
        lambda: torch.distributions.Normal(torch.tensor([float("nan")]), 1.0, validate_args=True),
        "activation-overflow",
    ),
    "bce of nan": (
        lambda: F.binary_cross_entropy(torch.full((1,), float("nan")), torch.ones(1)),
        "activation-overflow",
    ),
    "svd of nan": (lambda: torch.linalg.svd(torch.full((2, 2), float("nan"))), "activation-overflow"),
    "numpy log of zero": (numpy_half(np.log, 0), "eps-underflow"),
    "numpy zero by zero": (numpy_half(np.divide, 0, 0), "eps-underflow"),
}

# Messages that need a GPU, another library, an older version or a person.
QUOTED = {
    "value cannot be converted to type at::Half without overflow: -1e+09": "scalar-out-of-range",
    "value cannot be converted to type c10::Float8_e4m3fn without overflow": "scalar-out-of-range",
    "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'": "unsupported-half-op",
    "RuntimeError: \"slogdet\" not implemented for 'Half'": "unsupported-half-op",
    "RuntimeError: qr is not implemented for type torch.cuda.HalfTensor": "unsupported-half-op",
    "RuntimeError: cuFFT only supports dimensions whose sizes are powers of two when computing in half "
    "precision, but got a signal size of [80, 80]": "unsupported-half-op",
    "RuntimeError: cuFFT doesn't support tensors of type: BFloat16": "unsupported-half-op",
    "RuntimeError: torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.": (
        "rounded-onto-singularity"
    ),
    "The current optimizer, AdamW, does not allow for gradient clipping because it performs unscaling of "
    "gradients internally. HINT: Are you using a 'fused' optimizer?": "clip-before-unscale",
    "[rank0]:[E515 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=241, OpType=ALLREDUCE) ran for 600086 milliseconds": "distributed-desync",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.89 GiB": (
        "out-of-memory"
    ),
    "CUDA OOM": "out-of-memory",
    "RuntimeError: MPS backend out of memory (MPS allocated: 8.50 GB, other allocations: 9.21 GB)": "out-of-memory",
    "Detected mismatch between collectives on ranks. Rank 0 is running collective": "distributed-desync",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:64748": (
        "distributed-desync"
    ),
    "ValueError: Input X contains NaN.": "bad-input-data",
    "ValueError: Input contains NaN, infinity or a value too large for dtype('float32').": "bad-input-data",
    "RuntimeError: expected scalar type Half but found Float": "dtype-mismatch",
    "Training loss is nan": "activation-overflow",
    "total_loss=nan, kd=0.0000, ce=nan": "activation-overflow",
    "Loss is nan, stopping training": "activation-overflow",
    "{'loss': nan, 'grad_norm': nan, 'epoch': 0.1}": "activation-overflow",
    "ValueError: The loss returned in `training_step` is inf.": "activation-overflow",
    "step 12 loss 2.31 grad_norm nan": "gradient-overflow",
    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0": "gradient-overflow",
    "Gradient overflow detected, skipping batch": "gradient-overflow",
    "Loss scale reduced from 65536.0 to 32768.0 due to overflow": "gradient-overflow",
    "Final validation perplexity: inf": "activation-overflow",
    "Loss overflow detected: inf, skipping batch": "activation-overflow",
    "Skipping unstable gradient step": "clip-before-unscale",
    "\u26a0\ufe0f  Large gradient norm: 120.00": "clip-before-unscale",
    "\u26a0\ufe0f  Small gradient: backbone.stem.weight = 1e-07": "gradient-underflow",
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing": "gradient-overflow",
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore.": "gradient-overflow",
    "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.": ("gradient-overflow"),
    "Detected nan and/or inf values in `layer.weight`. Check your forward pass": "optimizer-state-underflow",
    "Assertion `input_val >= zero && input_val <= one` failed.": "activation-overflow",
    "UserWarning: torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.": ("gradient-underflow"),
    "Expected to have finished reduction in the prior iteration before starting a new one.": ("params-not-trained"),
    "my loss does not decrease": "gradient-underflow",
    "accuracy drops with amp": "update-lost-to-rounding",
    "nan": "activation-overflow",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_real_message_names_its_cause(name):
    action, expected = NAMED[name]
    message = message_of(action)
    assert message
    assert [cause.id for cause in find_named_causes(message)] == [expected]
    assert match_message(message)[0].id == expected


@pytest.mark.parametrize("name", SHARED)
def test_a_real_message_that_decides_nothing_gives_several_causes(name):
    action, first = SHARED[name]
    message = message_of(action)
    assert find_named_causes(message) == []
    causes = match_message(message)
    assert causes[0].id == first
    assert len(causes) > 1
    assert find_symptom(message) is not None


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_finds_its_cause(message):
    assert match_message(message)[0].id == QUOTED[message]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Epoch 3: loss 2.31, accuracy 0.71, lr 1e-3",
        "INFO inference finished: infinite-scroll, info, banana",
        "INFO the GPU zooms in on the room",
        "RuntimeError: value cannot be converted to type uint8_t without overflow",
        "NotImplementedError: \"histogram\" not implemented for 'Long'",
        "ModuleNotFoundError: No module named 'torch'",
    ],
)
def test_a_text_without_a_known_message_matches_nothing(text):
    assert match_message(text) == []


def test_colour_and_line_breaks_do_not_hide_a_message():
    text = "\x1b[31mValueError\x1b[0m: Attempting to\n    unscale \x1b[1mFP16\x1b[0m gradients."
    assert match_message(text)[0].id == "fp16-params-with-scaler"


def test_the_last_error_of_a_log_comes_first():
    warning = message_of(NAMED["skipped first step"][0])
    error = message_of(NAMED["unscale half"][0])
    log = f"epoch 0\n{warning}\nloss: nan\nTraceback (most recent call last):\n{error}\n"
    assert [cause.id for cause in find_named_causes(log)] == [
        "fp16-params-with-scaler",
        "scheduler-vs-skipped-step",
    ]
    assert [cause.id for cause in match_message(log)][2] == "activation-overflow"


def test_words_of_a_complaint_mean_nothing_in_a_long_log():
    assert match_message("it does not learn")
    assert match_message("it does not learn " + "step ok " * 100) == []
