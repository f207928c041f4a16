"""A rescue for people: the summary on the terminal, and report.html with the evidence of every stage."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from floatline import __version__
from floatline.base.json_values import plain_json
from floatline.base.texts import on_one_line, printable
from floatline.report.document.detail import FULL, Detail, fit
from floatline.report.document.document import Block, Code, Document, Part, Table, Tile, Tone, Words
from floatline.report.document.html import page_of, put_in_place
from floatline.report.losses import draw_losses
from floatline.report.step_ranges import draw_step_ranges
from floatline.report.validation.report import document_of, plan_code
from floatline.report.validation.texts import TONES, sentence
from floatline.rescuing.finished_stages import RESULTS, finish

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.findings import Finding
    from floatline.rescuing.result import Rescue

_STYLES = {
    "healthy": "bold green",
    "rescued": "bold green",
    "not-verified": "bold yellow",
    "code-change": "bold yellow",
    "not-precision": "bold red",
    "unsolved": "bold red",
}
# A page has one of validate's verdicts as its mark; without a validation there is nothing to pass: PASS is not said.
_MARKS = {"healthy": "HEALTHY"}
_TONES: dict[str, Tone] = {**TONES, "HEALTHY": "good"}
_TITLES = {
    "healthy": "healthy as it is",
    "rescued": "rescued",
    "not-verified": "a plan, not verified",
    "code-change": "the code must change",
    "not-precision": "not precision",
    "unsolved": "not solved",
}
_PLANS = "The plans of the arms, in full"
_RANGES = "Exponents of what each module wrote in that step: the upper bar forward, the lower backward."


def write_rescue(rescue: Rescue, folder: Path) -> dict[str, str]:
    """Write plan.yaml, fix.patch, rescue.json and report.html, each in one step; what there is none of is taken away.

    Args:
        rescue: What was found out.
        folder: Made where it is not there.

    Returns:
        Name of each file that was written to its path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / name for name in RESULTS}
    for name, text in (("plan.yaml", rescue.plan), ("fix.patch", rescue.patch)):
        if not text:  # of an earlier rescue: it does not belong to this one
            files.pop(name).unlink(missing_ok=True)
    if rescue.plan is not None:
        rescue.plan.save(files["plan.yaml"])
    if rescue.patch:
        put_in_place(files["fix.patch"], rescue.patch)
    _, page = fit(lambda detail: ((), page_of(document_of_rescue(rescue, detail), tones=_TONES)))
    put_in_place(files["report.html"], page)
    written = {name: str(path) for name, path in files.items()}
    data = json.dumps(plain_json({**rescue.in_full(), "files": written}), indent=1, ensure_ascii=False, allow_nan=False)
    put_in_place(files["rescue.json"], data + "\n")
    finish(folder, proved=rescue.proved)
    return written


def print_rescue(rescue: Rescue, files: dict[str, str], console: Console) -> None:
    """Print the outcome, what led to it, and where the files are."""
    lines = [Text(rescue.outcome, style=_STYLES[rescue.outcome]) + Text(f"  {printable(rescue.words)}")]
    primary = rescue.diagnosis.primary
    if primary is not None:
        lines.append(_row("found", f"{primary.cause.id}: {primary.cause.title}, at {rescue.where}"))
        lines.append(_row("seen", primary.seen))
    lines += [_row("tried", f"{tried.does}: {tried.shortfall or 'trains as FP32 does'}") for tried in rescue.tried]
    if rescue.validation is not None:
        lines.append(_row("check", f"{rescue.validation.verdict}: {rescue.validation.best.reason}"))
        lines += [_row("do", gate.advice) for gate in rescue.validation.best.failed_gates]
    fix = "" if primary is None else primary.fix
    for words in _say_change(rescue):
        shown = words.splitlines() if words == fix else [words]
        lines += [_row("" if number else "code", line) for number, line in enumerate(shown)]
    lines += [_row("note", note) for note in _notes(rescue)]
    taken = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in rescue.stages)
    lines.append(_row("time", taken))
    lines += [_row(_LABELS[name], path) for name, path in files.items() if name in _LABELS]
    if rescue.plan is not None:
        lines.append(_row("next", _say_next(rescue, files["plan.yaml"])))
        if rescue.solved and not rescue.is_script:
            folder = Path(files["plan.yaml"]).parent
            lines.append(
                _row("or", f"floatline approve {folder} --by NAME; floatline train {rescue.target} then uses it")
            )
    if rescue.by_patch and rescue.patch:
        lines.append(_row("next", f"git apply {files['fix.patch']}"))
    for line in lines:
        console.print(line, soft_wrap=True)


def _say_next(rescue: Rescue, plan: str) -> str:
    if rescue.is_script:
        return f"floatline run --plan {plan} -- {rescue.target}"
    return f"floatline train {rescue.target} --plan {plan}"


def _notes(rescue: Rescue) -> tuple[str, ...]:
    """Its own, and the diagnosis's where that found nothing and so is all there is."""
    return rescue.notes if rescue.diagnosis.findings else (*rescue.diagnosis.notes, *rescue.notes)


_LABELS = {"plan.yaml": "plan", "fix.patch": "patch", "report.html": "report"}


def document_of_rescue(rescue: Rescue, detail: Detail = FULL) -> Document:
    """The report: diagnosis, plan and trials first, then the validation where there is one.

    Args:
        rescue: What was found out.
        detail: How much of what is long.
    """
    own = (*_before_and_after(rescue), _diagnosis(rescue), *_trials(rescue), *_code(rescue), _stages(rescue))
    title = f"{rescue.target}: {_TITLES[rescue.outcome]}"
    if rescue.validation is None:
        return Document(
            title=title,
            subtitle=_found(rescue),
            verdict=_MARKS.get(rescue.outcome, "INCONCLUSIVE" if rescue.plan is not None else "FAIL"),
            meaning="No validation was made: nothing is claimed about it.",
            reason=_without_fix(rescue.words),
            tiles=(),
            flags=_notes(rescue),
            before=own,
            chapters=(),
            after=(),
            footer=f"Made by floatline {__version__} in {sum(stage.seconds for stage in rescue.stages):.0f} s.",
            todo=_todo(rescue),
        )
    document = document_of(rescue.validation, detail)
    return replace(
        document,
        title=title,
        subtitle=f"{_found(rescue)}; by {rescue.validation.best.terms.metric}",
        reason=rescue.words,
        meaning=f"{document.reason} {document.meaning}",
        tiles=tuple(map(_say_unmeasured, document.tiles)),
        todo=_todo(rescue),
        flags=(*document.flags, *rescue.notes),
        before=(*own, *document.before),
        chapters=tuple(
            replace(chapter, parts=tuple(filter(_is_measured, chapter.parts))) for chapter in document.chapters
        ),
        after=tuple(
            replace(part, heading=_PLANS) if part.heading in ("The plan", "The plans") else part
            for part in document.after
        ),
    )


def _found(rescue: Rescue) -> str:
    """What is wrong and where, as one line."""
    primary = rescue.diagnosis.primary
    what = "nothing was found" if primary is None else f"{primary.cause.id} at {_place(primary)}"
    return f"{what}, in {rescue.diagnosis.precision}"


def _todo(rescue: Rescue) -> tuple[str, ...]:
    """What to type next; the change of the line where there is no plan."""
    if rescue.by_patch and rescue.patch:
        return ("Apply the change: `git apply fix.patch`, which lies beside this page.",)
    if rescue.plan is not None:
        return (f"Train with the plan: `{_say_next(rescue, 'plan.yaml')}`.",)
    primary = rescue.diagnosis.primary
    return () if primary is None else (f"At {_place(primary)}: {on_one_line(primary.fix)}",)


def _without_fix(words: str) -> str:
    """What is wrong: what to do about it stands below."""
    return sentence(re.split(r"[:.;]? do this: ", words, maxsplit=1, flags=re.IGNORECASE)[0])


def _say_unmeasured(tile: Tile) -> Tile:
    return replace(tile, detail="measured by --prove") if tile.detail == "not measured" else tile


def _before_and_after(rescue: Rescue) -> tuple[Part, ...]:
    drawn = draw_losses(rescue.curves)
    return () if drawn is None else (Part("Before and after", (drawn, Words(drawn.summary, "note"))),)


def _is_measured(part: Part) -> bool:
    """The short validation measures no speed, memory or layers: a heading over nothing is left out."""
    return not all(isinstance(block, Words) and block.kind == "missing" for block in part.blocks)


def _diagnosis(rescue: Rescue) -> Part:
    diagnosis = rescue.diagnosis
    if not diagnosis.findings:
        return Part("What is wrong", (Words("Nothing was found."),))
    blocks: list[Block] = [_finding(diagnosis.findings[0], folded=False)]
    blocks += [Words(sentence(text), "note") for text in (*diagnosis.tried, *diagnosis.notes)]
    drawn = draw_step_ranges(diagnosis.chart) if diagnosis.chart else None
    blocks += [] if drawn is None else [drawn, Words(_RANGES, "note")]
    blocks += [_finding(finding, folded=True) for finding in diagnosis.findings[1:]]
    return Part("What is wrong", tuple(blocks))


def _finding(finding: Finding, *, folded: bool) -> Table:
    caption = f"{'Also found: ' if folded else ''}{finding.cause.id}: {finding.cause.title}"
    row = (_place(finding), finding.seen, on_one_line(finding.fix))
    named = (0, 2) if finding.patch else (0,)  # a change that was tried is a line of code
    return Table(caption, ("where", "seen", "what to do"), (row,), named=named, folded=folded, cards=True)


def _trials(rescue: Rescue) -> tuple[Part, ...]:
    blocks: list[Block] = []
    if rescue.island is not None:
        blocks.append(Words(f"The smallest FP32 island: {', '.join(rescue.island.modules) or rescue.island.reason}."))
        told = {tried.why for tried in rescue.tried}  # the table below says it
        members = [m for m in rescue.island.members if m.reason and m.reason not in told]
        blocks += [Words(f"{m.module}: {m.reason}.", "note") for m in members]
    if rescue.tried:
        tones: tuple[Tone, ...] = tuple("bad" if tried.shortfall else "good" for tried in rescue.tried)
        rows = tuple((t.does, t.shortfall or "trains as FP32 does", t.why) for t in rescue.tried)
        caption = f"Plans in the order of trial, {rescue.steps} steps each"
        blocks.append(Table(caption, ("plan", "against FP32", "why it was tried"), rows, tones=tones, cards=True))
    if rescue.plan is not None:
        blocks.append(plan_code(rescue.plan.model_dump(mode="json", exclude_defaults=True), "plan.yaml"))
    return (Part("What was tried" if rescue.is_script else "The plan", tuple(blocks)),) if blocks else ()


def _say_change(rescue: Rescue) -> tuple[str, ...]:
    """The change of the code, and what came of trying it; nothing where none is known."""
    primary = rescue.diagnosis.primary
    if primary is None or not primary.tried:
        return ()
    does = [
        f"{fix.name}:{fix.line}: {fix.says}{'' if fix.safe else ' (look at it first)'}" for fix in rescue.fixes
    ] or [primary.fix]
    return (*does, primary.tried)


def _code(rescue: Rescue) -> tuple[Part, ...]:
    said = _say_change(rescue)
    if not said:
        return ()
    told = {tried.why for tried in rescue.tried}  # the table of trials has said it
    primary = rescue.diagnosis.primary
    code = primary.fix if primary is not None and "\n" in primary.fix else None
    blocks: list[Block] = [
        Code(words, "python") if words == code else Words(words) for words in said if words not in told
    ]
    if rescue.patch:
        instead = "" if rescue.plan is None else ", instead of the plan"
        words = f"The code itself could change so{instead}. Nothing was changed; `git apply fix.patch` does it."
        blocks += [Words(words), Code(rescue.patch.rstrip(), "diff", "fix.patch")]
    return (Part("Change of the code", tuple(blocks)),)


def _stages(rescue: Rescue) -> Part:
    rows = tuple((stage.name, f"{stage.seconds:.1f} s", stage.text) for stage in rescue.stages)
    return Part("Stages", (Table("What was done", ("stage", "time", "result"), rows, numeric=(1,)),))


def _place(finding: Finding) -> str:
    """Line, module and operation, as far as they are known; the file without its folder, which is the reader's own."""
    place = f"{Path(finding.file).name}:{finding.line}" if finding.file and finding.line else Path(finding.file).name
    return ", ".join(part for part in (place, finding.module, finding.op) if part) or "the model"


def _row(label: str, words: str) -> Text:
    return Text(f"  {label:<7}", style="cyan") + Text(printable(words))
