"""What a run came to: the word its page is headed by, why, and what to do next."""

from __future__ import annotations

import math
import re

from floatline.ledger.lines import TO_FIND
from floatline.report.document.document import Tone
from floatline.report.run.facts import RunFacts, State
from floatline.report.run.texts import TONES, show_number
from floatline.report.validation.texts import sentence

MEANINGS: dict[State, str] = {
    "running": "The run goes on; this is how it stood when the page was written.",
    "silent": "The ledger is not closed, and nothing was added to it for long: the run hangs, or its machine is away.",
    "finished": "The ledger was closed in order.",
    "interrupted": "The ledger was closed in order before the run had all of its steps.",
    "stopped": "The guard ended the run; its last event says why.",
    "died": "The ledger was not closed, and the process that wrote it is gone.",
}
_EMPTY, _IDLE, _LOST, _BLIP = "EMPTY", "NOTHING APPLIED", "LOSS NOT FINITE", "LAST LOSS NOT FINITE"
_TAIL = 10  # stretches without any finite loss at the end of a run whose loss is lost
_DIAGNOSE = "Find line and fix: `floatline diagnose TARGET`, or `floatline diagnose -- python train.py`."
_RESUME = "Go on from the last checkpoint: `floatline train TARGET --folder RUN --resume`."
_TODO: dict[str, tuple[str, ...]] = {
    "FINISHED": ("Is it as good as FP32? `floatline validate TARGET`, or `floatline compare` with runs in FP32.",),
    "SILENT": ("See whether the process still works; `floatline watch RUN` shows the run as it goes on.",),
    "INTERRUPTED": (_RESUME,),
    "STOPPED": (_DIAGNOSE,),
    "DIED": (_RESUME,),
    _EMPTY: ("See whether the loop makes a step at all: each `guard.update()` writes one.",),
    _IDLE: (_DIAGNOSE,),
    _LOST: (_DIAGNOSE,),
    _BLIP: (_DIAGNOSE,),
}
_FIXED = ("Make that change, and go on from the last checkpoint: `floatline train TARGET --folder RUN --resume`.",)


def word_of(run: RunFacts) -> tuple[str, Tone]:
    """The word for a run, and its tone. A ledger that was closed in order is not yet a run that trained."""
    account, state = run.account, run.state.upper()
    if run.state in ("stopped", "died"):
        return state, TONES[run.state]
    if not account.attempted:
        return (_EMPTY, "warn") if run.state == "finished" else (state, TONES[run.state])
    if not account.applied:
        return _IDLE, "bad"
    if account.last_loss is not None and not math.isfinite(account.last_loss):
        return (_BLIP, "warn") if any(stretch.loss.num for stretch in run.stretches[-_TAIL:]) else (_LOST, "bad")
    return state, TONES[run.state]


def cause_of(run: RunFacts) -> tuple[str, str]:
    """Why a run was stopped or died, the diagnosis first; and what its last words say beside that."""
    word, _ = word_of(run)
    account = run.account
    if word == _IDLE:
        return f"All {account.attempted:,} steps were skipped: the weights are those of the start.", MEANINGS[run.state]
    if word in (_LOST, _BLIP):
        lost = account.num_nan_losses + account.num_inf_losses
        all_losses = lost + account.num_finite_losses
        newest = f"The newest loss is {show_number(account.last_loss)}: {lost:,} of {all_losses:,} are not finite."
        return newest, MEANINGS[run.state]
    if run.state not in ("stopped", "died") or not run.events:
        return "", ""
    last = run.events[-1].message or str(run.events[-1])
    found = [event.message for event in run.events if event.event == "diagnosis" and event.message]
    if found:
        before, _, after = last.partition(found[-1])  # what the guard says holds the diagnosis
        rest = f"{re.sub(r' The diagnosis of step [0-9,]+: $', '', before)}{after}"
        return sentence(found[-1]), " ".join(rest.split())
    alarms = [event.message.partition(TO_FIND)[0] for event in run.events if TO_FIND in event.message]
    if alarms:
        return sentence(alarms[-1]), sentence(last)
    if run.state == "died" and run.events[-1].event != "stop":  # whatever was written last did not end it
        return MEANINGS["died"], sentence(f"the newest event: {last}")
    return sentence(last), ""


def todo_of(run: RunFacts) -> tuple[str, ...]:
    """What to type next."""
    if run.state in ("stopped", "died") and any(event.event == "diagnosis" for event in run.events):
        return _FIXED
    commands = [event.message.partition(TO_FIND)[2] for event in run.events if TO_FIND in event.message]
    if run.state == "stopped" and commands:
        return (f"Find line and fix: `{commands[-1].rstrip('.')}`.",)
    return _TODO.get(word_of(run)[0], ())
