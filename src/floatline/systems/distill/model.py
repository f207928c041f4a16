"""Distiller: student, frozen teacher, the router of its exits and the projection of states; its loss and perplexity."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floatline.systems.distill.alignment import SharedVocabulary, coarsen
from floatline.systems.distill.config import Config
from floatline.systems.distill.networks import read_exits, width_of
from floatline.systems.distill.text import load_tokenizer, read_text, split_text, tile_tokens


class LossTerms(NamedTuple):
    """What the loss is made of.

    Args:
        logits: The student's, [batch, length, tokens].
        kd: Divergence from the teacher, times temperature squared; as it is, also where it is not finite.
        router: Cross-entropy of the router's mixture of teacher exits.
        feature: Mean squared difference of normalized states.
        sound: Whether the last three are finite, on the device.
        training: Whether the batch is trained on; a guard's canary is not.
    """

    logits: Tensor
    kd: Tensor
    router: Tensor
    feature: Tensor
    sound: Tensor
    training: bool


class Distiller(nn.Module):
    """A student that learns from the text and from a teacher with another tokenizer.

    The router reads the student's state and gives each exit of the teacher a weight, token by token. It learns which
    exit tells the true next token; the student learns from the mixture.

    Args:
        student: The model that is trained.
        teacher: The model that is learnt from; frozen, and always in evaluation mode.
        shared: The tokens that both know.
        exits: Layers of the teacher that are read.
        temperature: Softens both distributions.
        clamp_logits: Folk remedy: bound of the student's logits; None leaves them.
    """

    order: Tensor
    teacher_order: Tensor
    outcome_of: Tensor
    kd_failures: Tensor

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        shared: SharedVocabulary,
        *,
        exits: tuple[int, ...],
        temperature: float,
        clamp_logits: float | None = None,
    ) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher.requires_grad_(False)
        self.router = nn.Linear(width_of(student), len(exits))
        self.projection = nn.Linear(width_of(student), width_of(teacher))
        self.exits, self.temperature, self.bound = exits, temperature, clamp_logits
        own, theirs = shared.orders()
        self.num_shared = len(shared.own)
        for name, ids in {"order": own, "teacher_order": theirs, "outcome_of": shared.outcome_of()}.items():
            self.register_buffer(name, ids, persistent=False)
        # Batches whose distillation term was not finite, and which were trained on the text alone.
        self.register_buffer("kd_failures", torch.zeros((), dtype=torch.int64))

    def train(self, mode: bool = True) -> Distiller:
        """Training mode, except for the teacher."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, ids: Tensor, teacher_ids: Tensor, positions: Tensor, aligned: Tensor) -> LossTerms:
        """The student's logits, and how far it is from the teacher.

        Args:
            ids: Student's tokens and the one after them, [batch, length + 1].
            teacher_ids: Teacher's tokens of the same text.
            positions: The teacher's position for each of the student's.
            aligned: Where there is one.
        """
        out = self.student(ids[:, :-1], output_hidden_states=True)
        logits, state = out.logits, out.hidden_states[-1]
        if self.bound is not None:
            logits = logits.clamp(-self.bound, self.bound)
        with torch.no_grad():
            scores, states = read_exits(self.teacher, teacher_ids, exits=self.exits, positions=positions)
            taught = coarsen(scores / self.temperature, self.teacher_order, self.num_shared)
            states = F.layer_norm(states.float(), states.shape[-1:])
        gate = ExitGate()
        weights = gate(self.router(state.detach())).float().log_softmax(-1)
        mixed = (weights[..., None] + taught).logsumexp(2)
        true = mixed.gather(-1, self.outcome_of[ids[:, 1:]][..., None])[..., 0]
        own = coarsen(gate(logits) / self.temperature, self.order, self.num_shared)
        rest = len(self.order) > self.num_shared
        kd = _mean(diverge(own, mixed.detach(), rest=rest), aligned) * self.temperature**2
        wanted = (weights.detach().exp()[..., None] * states).sum(2)
        projected = F.layer_norm(gate(self.projection(state)).float(), states.shape[-1:])
        feature, router = _mean((projected - wanted).square().mean(-1), aligned), _mean(-true, aligned)
        gate.open = sound = torch.stack([kd, router, feature]).detach().isfinite().all()
        if self.training:
            self.kd_failures.add_(~sound)  # on the device: nobody waits for it
        return LossTerms(logits, kd, router, feature, sound, self.training)


class ExitGate:
    """Lets gradients back out of the distillation terms only where these are finite.

    Numerics:
        `torch.where` on the loss alone is not enough: it sends a gradient of 0 into a term that is not finite, and 0
        times inf on its way back is NaN. Here that gradient is replaced where it leaves, by selecting on the device.

    Attributes:
        open: Whether gradients pass; set before backward.
    """

    def __init__(self) -> None:
        self.open: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The same tensor, whose gradient passes the gate."""
        if not tensor.requires_grad:
            return tensor
        passed = tensor.view_as(tensor)
        passed.register_hook(self._select)
        return passed

    def _select(self, gradient: Tensor) -> Tensor:
        return gradient if self.open is None else torch.where(self.open, gradient, 0.0)


def diverge(own: Tensor, taught: Tensor, *, rest: bool) -> Tensor:
    """Kullback-Leibler divergence of coarsened distributions, teacher first, for each position.

    Numerics:
        Never negative. Where the student has no token but the shared ones, it cannot answer 'another token': it learns
        the teacher's distribution over the shared ones, weighted by the mass that lies on them.

    Args:
        own: The student's log-probabilities, [..., shared + 1].
        taught: The teacher's.
        rest: Whether the student has tokens that are not shared.
    """
    if not rest:
        own, taught = own[..., :-1], taught[..., :-1]
        mass = taught.logsumexp(-1, keepdim=True)
        return (taught.exp() * (taught - mass - own)).sum(-1)
    return (taught.exp() * (taught - own)).sum(-1)


def _mean(values: Tensor, aligned: Tensor) -> Tensor:
    """The mean over aligned positions; 0 where there is none. NaN at a position that does not count does not count."""
    return torch.where(aligned, values, 0.0).sum() / aligned.sum().clamp(min=1)


class TermLog:
    """Distillation and cross-entropy of each batch, added up on the device until somebody asks for their means.

    Numerics:
        Summed in FP64 where the device has it, else in FP32. Batches that are not finite are
        counted, and left out of the means.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, kd: Tensor, ce: Tensor) -> None:
        """One batch; nobody waits for it. A step that is only estimated, on tensors without numbers, is none."""
        if type(ce) is not Tensor:
            return
        parts = torch.stack([kd.detach().float(), ce.detach().float()])
        finite = parts.isfinite().all()
        row = torch.cat([torch.where(finite, parts, 0.0), finite[None].float(), torch.ones_like(parts[:1])])
        row = row if row.device.type == "mps" else row.double()
        self._sums = row if self._sums is None or self._sums.device != row.device else self._sums + row

    def describe(self) -> str:
        """The means since it was last asked, '' where there was no batch; reading them waits for the device."""
        if self._sums is None:
            return ""
        kd, ce, finite, batches = cast("list[float]", self._sums.tolist())
        self._sums = None
        means = f"kd={kd / finite:.4f}, ce={ce / finite:.4f}" if finite else "kd and ce not finite"
        return f"{means} over {batches:.0f} batches, {100 * finite / batches:.0f} % of them finite"


@dataclass(frozen=True)
class DistillationLoss:
    """Weighted sum of the terms.

    Where the distillation terms are not finite, the batch is trained on the text alone; that is chosen on the device,
    and the next batch chooses again. The loss is then what was trained on, the cross-entropy's part; it is never made
    finite: a cross-entropy that is not stays so. `Distiller.kd_failures` counts such batches.

    Args:
        ce_weight: Of the cross-entropy.
        kd_weight: Of the distillation.
        router_weight: Of the router's own loss, which reaches no other weights.
        feature_weight: Of the states.
        clamp: Folk remedy: the cross-entropy and the sum are clamped to it, as people write it; None does not.
        terms: What the distillation and cross-entropy of each batch that is trained on were.
    """

    ce_weight: float
    kd_weight: float
    router_weight: float
    feature_weight: float
    clamp: float | None = None
    terms: TermLog = field(default_factory=TermLog, compare=False)

    def __call__(self, terms: LossTerms, labels: Tensor) -> Tensor:
        """The loss of one batch."""
        ce = F.cross_entropy(terms.logits.float().flatten(0, 1), labels.flatten())
        if self.clamp is not None:
            ce = torch.clamp(ce, 0, self.clamp)
        if terms.training:  # before the loss is made, which a trace takes for the last
            self.terms.add(torch.where(terms.sound, terms.kd, 0.0), ce)
        taught = self.kd_weight * terms.kd + self.router_weight * terms.router + self.feature_weight * terms.feature
        loss = self.ce_weight * ce + torch.where(terms.sound, taught, 0.0)
        return loss if self.clamp is None else torch.clamp(loss, 0, self.clamp)


@torch.no_grad()
def perplexity(model: nn.Module, held: Tensor) -> float:
    """The student's perplexity for each of its tokens on held-out text.

    Numerics:
        exp of the mean cross-entropy, summed in float64.

    Args:
        model: The distiller.
        held: Rows of tokens; each predicts its second to its last.
    """
    device = next(model.parameters()).device
    student = model.get_submodule("student")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, len(held), 32):
        rows = held[first : first + 32].to(device)
        logits = student(rows[:, :-1]).logits
        total += F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return math.exp(total.item() / held[:, 1:].numel())


def unigram_perplexity(config: Config) -> float:
    """The baseline: each token by its frequency in the training text, plus one."""
    tokenizer = load_tokenizer(config.student_path, "student")
    train_text, held_out = split_text(read_text(config.text_path))
    counts = Counter(tokenizer.encode(train_text, add_special_tokens=False).ids)
    total = counts.total() + tokenizer.get_vocab_size()
    rows = tile_tokens(held_out, length=config.length, student=tokenizer)
    held = cast("list[int]", rows[:, 1:].flatten().tolist())
    return math.exp(-sum(math.log((counts[i] + 1) / total) for i in held) / len(held))
