"""Runs as one page: how they stand, their curves, skips by reason, layers against the format's limits, events."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from floatline.errors import LedgerError
from floatline.ledger.account import Account
from floatline.ledger.lines import REASONS
from floatline.ledger.progress import Spread, Stretch
from floatline.report.document.detail import FULL, Detail, fit
from floatline.report.document.document import Chapter, Curves, Document, Part, Table, Tile, Tone, Words, seven_digits
from floatline.report.document.html import page_of, put_in_place
from floatline.report.run.details import details_of
from floatline.report.run.facts import OVER, RunFacts
from floatline.report.run.texts import (
    TONES,
    loss_of,
    norm_of,
    place_of,
    scale_of,
    show_number,
    show_pace,
    show_percent,
    show_scale,
    show_seconds,
    skips_of,
    time_of,
)
from floatline.report.run.verdict import MEANINGS, cause_of, todo_of, word_of
from floatline.report.validation.texts import sentence

_MARKED = ("rollback", "escalation", "stop", "lr-cut", "regime-change")
_MOST_MARKS = 40
_MOST_TODO = 3  # runs
_LEAST_POINTS, _COLUMNS = 50, 6
_WIDE = 30.0  # losses whose highest is so many times the lowest are drawn over their logarithm


def curves_of(runs: Sequence[RunFacts], *, most: int = FULL.numbers) -> dict[str, Any] | None:
    """Numbers and names for the charts; None where no run has a step.

    Args:
        runs: Those that are laid over each other.
        most: Numbers of all curves together.

    Numerics:
        A point is the mean of the finite values of its steps, null where there are none; low and high are the lowest
        and the highest of them. Values keep 7 significant digits.
    """
    drawn = [run for run in runs if run.stretches]
    if not drawn:
        return None
    points = max(_LEAST_POINTS, most // (_COLUMNS * len(drawn)))
    drawn = [replace(run, stretches=_joined(run.stretches, points)) for run in drawn]
    lows = [stretch.loss.low for run in drawn for stretch in run.stretches if stretch.loss.num]
    highs = [stretch.loss.mean for run in drawn for stretch in run.stretches if stretch.loss.num]
    return {
        "runs": [_run(run, alone=len(drawn) == 1) for run in drawn],
        "logLoss": bool(lows) and min(lows) > 0 and max(highs) / min(lows) > _WIDE,
        "perPoint": max(_per_point(run) for run in drawn),
    }


def _joined(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """At most so many, each of neighbours."""
    every = -(-len(stretches) // most)
    joined: list[Stretch] = []
    for place, stretch in enumerate(stretches):
        if place % every:
            joined[-1].join(stretch)
        else:
            joined.append(copy.deepcopy(stretch))
    return joined


def _per_point(run: RunFacts) -> int:
    """Steps that one point stands for at most."""
    return max((stretch.last - stretch.first + 1 for stretch in run.stretches), default=1)


def _run(run: RunFacts, *, alone: bool) -> dict[str, Any]:
    stretches = run.stretches
    marks = [[event.attempt, event.event] for event in run.events if event.event in _MARKED]
    return {
        "name": run.name,
        "steps": [stretch.last for stretch in stretches],
        "loss": _known(_means([stretch.loss for stretch in stretches])),
        # The band of one run; those of several would hide each other.
        "lossLow": [seven_digits(stretch.loss.low) for stretch in stretches] if alone else [],
        "lossHigh": [seven_digits(stretch.loss.high) for stretch in stretches] if alone else [],
        "norm": _positive(_means([stretch.norm for stretch in stretches])),
        "scale": _positive([seven_digits(stretch.scale.last) for stretch in stretches]),
        "lr": _known([seven_digits(stretch.lr.last) for stretch in stretches]),
        "lost": _lost([seven_digits(stretch.lost.last) for stretch in stretches]),
        # By place: how many were skipped there, and in words.
        "skips": [
            [place, sum(stretch.skipped.values()), ", ".join(f"{n:,} {why}" for why, n in stretch.skipped.items())]
            for place, stretch in enumerate(stretches)
            if stretch.skipped
        ],
        "nonfinite": [
            [place, stretch.loss.num_nan + stretch.loss.num_inf]
            for place, stretch in enumerate(stretches)
            if stretch.loss.num_nan + stretch.loss.num_inf
        ],
        "marks": marks[-_MOST_MARKS:],
    }


def _means(spreads: Sequence[Spread]) -> list[float | None]:
    return [seven_digits(spread.mean) if spread.num else None for spread in spreads]


def _positive(values: list[float | None]) -> list[float | None] | None:
    """For an axis of powers, which has no place for zero; None where nothing is left."""
    return _known([None if value is None or value <= 0 else value for value in values])


def _lost(shares: list[float | None]) -> list[float | None] | None:
    """Nothing to draw where all are 0."""
    return _known(shares) if any(shares) else None if all(share is None for share in shares) else []


def _known(values: list[float | None]) -> list[float | None] | None:
    return values if any(value is not None for value in values) else None


_REASONS = {
    "overflow": "a gradient was not finite, the loss was",
    "forward-nonfinite": "the loss was not finite",
    "outlier": "loss or norm was far out of line",
    "requested": "the caller asked for it",
}


def document_of(runs: Sequence[RunFacts], detail: Detail = FULL) -> tuple[Document, dict[str, Tone]]:
    """The page's content, and the tone of each word that it is headed by.

    Args:
        runs: What is shown.
        detail: How much of what is long.
    """
    tones: dict[str, Tone] = {state.upper(): tone for state, tone in TONES.items()}
    tones.update(map(word_of, runs))
    if len(runs) == 1:
        return _single(runs[0], detail), tones
    found = {tone for _, tone in map(word_of, runs)}
    order: tuple[Tone, ...] = ("bad", "warn", "good")
    head = f"{len(runs)} RUNS"
    tones[head] = next(tone for tone in order if tone in found)
    return _several(runs, head, detail), tones


def _single(run: RunFacts, detail: Detail) -> Document:
    stood = sentence(f"{place_of(run)}, {time_of(run)}" if run.account.attempted else "no step was recorded")
    cause, rest = cause_of(run)
    said = "" if cause and run.state == "stopped" else MEANINGS[run.state]  # the guard's own words say more
    return Document(
        title=run.name,
        subtitle=_origin(run),
        verdict=word_of(run)[0],
        meaning=" ".join(filter(None, (rest or said, stood if cause else ""))),
        reason=cause or stood,
        todo=todo_of(run),
        tiles=_tiles(run),
        flags=_flags(run),
        before=(_curves([run], detail), _skips([run])),
        chapters=(),
        after=tuple(details_of(run, most=detail.rows)),
        footer=_footer([run]),
    )


def _several(runs: Sequence[RunFacts], head: str, detail: Detail) -> Document:
    states = [word_of(run)[0].lower() for run in runs]
    counts = ", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states))
    rows = max(2, detail.rows // len(runs))
    return Document(
        title=", ".join(run.name for run in runs),
        subtitle="Runs side by side, as their ledgers tell them",
        verdict=head,
        meaning="The curves are laid over each other by step; what belongs to one run follows under its name.",
        reason=f"{counts}.",
        todo=_todo(runs),
        tiles=(),
        flags=tuple(f"{run.name}: {flag}" for run in runs for flag in (cause_of(run)[0], *_flags(run)) if flag),
        before=(Part("How they stand", (_standing(runs),)), _curves(runs, detail), _skips(runs)),
        chapters=tuple(
            Chapter(run.name, word_of(run)[0], f"{place_of(run)}, {time_of(run)}", tuple(details_of(run, most=rows)))
            for run in runs
        ),
        after=(),
        footer=_footer(runs),
    )


def _todo(runs: Sequence[RunFacts]) -> tuple[str, ...]:
    """What to do about those that did not go well; where all did, what comes next."""
    ill = [run for run in runs if word_of(run)[1] != "good"]
    if ill:
        return tuple(f"{run.name}: {line}" for run in ill[:_MOST_TODO] for line in todo_of(run))
    return tuple(dict.fromkeys(line for run in runs for line in todo_of(run)))


def _origin(run: RunFacts) -> str:
    words = [
        run.plan and f"plan {run.plan}",
        run.run_id and f"run {run.run_id}",
        run.started and f"begun {_moment(run.started)}",
    ]
    return ", ".join(filter(None, words))


def _moment(text: str) -> str:
    """A time as people write it; as it is where it is none."""
    try:
        return datetime.fromisoformat(text).astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return text


def _tiles(run: RunFacts) -> tuple[Tile, ...]:
    account = run.account
    return (
        Tile("Loss", show_number(account.last_loss), loss_of(run)),
        Tile("Skipped", *_skipped(run)),
        Tile("Loss scale", show_scale(account.scale), scale_of(run)),
        Tile("Gradient norm", show_number(run.grad_norm), norm_of(run)),
    )


def _skipped(run: RunFacts) -> tuple[str, str]:
    """How many of how many, and why."""
    count, _, why = skips_of(run).partition(" (")
    return (count, why.replace("):", ":", 1)) if why else ("0", count)


def _flags(run: RunFacts) -> tuple[str, ...]:
    told = [] if run.state in ("stopped", "died") else [event for event in run.events if event.event == "diagnosis"]
    flags = [str(event) for event in told[-1:]]
    if run.num_missed:
        flags.append(f"{run.num_missed:,} steps are in parts of the ledger that were deleted: in the totals only.")
    if run.num_resumes:
        flags.append(f"Gone on with {run.num_resumes:,} time{'s' * (run.num_resumes != 1)}.")
    return tuple(flags)


def _standing(runs: Sequence[RunFacts]) -> Table:
    rows = tuple(
        (
            run.name,
            word_of(run)[0],
            f"{run.account.attempted:,}" + (f" of {run.steps:,}" if run.steps is not None else ""),
            show_number(run.account.last_loss),
            f"{run.account.num_skipped:,}",
            show_scale(run.account.scale),
            show_pace(run),
            show_seconds(run.seconds if run.state in OVER else run.eta),
        )
        for run in runs
    )
    head = ("run", "state", "steps", "loss", "skipped", "scale", "pace", "took, or ETA")
    tones: tuple[Tone, ...] = tuple(word_of(run)[1] for run in runs)
    return Table("The runs", head, rows, named=(0,), numeric=(2, 3, 4, 5, 6, 7), tones=tones, cards=True)


def _curves(runs: Sequence[RunFacts], detail: Detail) -> Part:
    data = curves_of(runs, most=detail.numbers)
    if data is None:
        return Part("Curves", (Words("No step was recorded yet.", "missing"),))
    summary = "; ".join(
        f"{run.name}: loss {show_number(run.account.first_loss)} at the start, {show_number(run.account.last_loss)} at "
        f"step {run.account.attempted:,}, scale {show_scale(run.account.scale)}, {skips_of(run)} skipped"
        for run in runs
    )
    how = "The pointer or the arrow keys read the curves; drag to look closer, double-click to go back."
    return Part("Curves", (Curves(data, f"{summary}."), *_without_curve(data), Words(how, "hint")))


def _without_curve(data: dict[str, Any]) -> list[Words]:
    """What has no chart, and why."""
    names = (("loss", "the loss"), ("norm", "the gradient norm"))
    never = [name for key, name in names if all(run[key] is None for run in data["runs"])]
    words = (
        [Words(sentence(f"{' and '.join(never)} never had a finite value, so that no curve is drawn"), "flag")]
        if never
        else []
    )
    if any(run["lost"] == [] for run in data["runs"]):
        words.append(Words("No gradient element that was looked at had rounded to zero.", "note"))
    return words


def _skips(runs: Sequence[RunFacts]) -> Part:
    seen = [reason for reason in REASONS if any(run.account.skipped[reason] for run in runs)]
    if not seen:
        return Part("Skipped steps", (Words("No step was skipped."),))
    rows = tuple((reason, *(_share(run.account, reason) for run in runs), _REASONS.get(reason, "")) for reason in seen)
    names = ("steps",) if len(runs) == 1 else tuple(run.name for run in runs)
    numeric = tuple(range(1, 1 + len(runs)))
    table = Table("By reason", ("reason", *names, "because"), rows, named=(0,), numeric=numeric, cards=True)
    return Part("Skipped steps", (table,))


def _share(account: Account, reason: str) -> str:
    count = account.skipped[reason]
    return f"{count:,} ({show_percent(count / account.attempted)})" if count else "0"


def _footer(runs: Sequence[RunFacts]) -> str:
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    versions = ", ".join(dict.fromkeys(run.version for run in runs if run.version))
    return f"Written {now} from {', '.join(str(run.folder) for run in runs)}; recorded by floatline {versions}."


def _page(runs: Sequence[RunFacts], detail: Detail) -> str:
    document, tones = document_of(runs, detail)
    return page_of(document, script="run.js", tones=tones)


def write_run_page(runs: Sequence[RunFacts], path: Path) -> None:
    """Write the page in one step: a reader never sees half of it.

    Args:
        runs: What is shown; several are laid over each other.
        path: Where it goes.

    Raises:
        LedgerError: It cannot be written there.
    """
    _, text = fit(lambda detail: ((), _page(runs, detail)))
    try:
        put_in_place(path, text)
    except OSError as error:
        raise LedgerError(f"{path} cannot be written: {error.strerror}. Choose another place: --out.") from None
