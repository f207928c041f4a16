"""Folds and fits for people: what was scaled, what stands in the way, and how near FP16 is. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from floatline.base.json_values import decode_number
from floatline.base.texts import printable

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.folding.scale_fold import Fold

_MOST_LINES = 8
_STYLES = {"as it is": "green", "folded": "green", "after folding": "green", "with an island": "yellow"}


def print_fold(
    fold: Fold, console: Console, *, folder: str, out: str, difference: float | None, eps_by_hand: bool = False
) -> None:
    """Print what a fold did.

    Args:
        fold: The fold.
        console: Where it is printed.
        folder: The checkpoint.
        out: Where the folded one is.
        difference: Between the outputs of the two, read back; None where nothing was written.
        eps_by_hand: Whether no config carries the epsilons, so that they must be set in code.
    """
    words = {"as it is": "fits FP16 as it is", "folded": "folded", "in the way": "something stands in the way"}
    style = f"bold {_STYLES.get(fold.verdict, 'red')}"
    console.print(_text(f"{folder}: {words.get(fold.verdict, 'the fold is not proven')}", style), soft_wrap=True)
    for group in fold.groups[:_MOST_LINES]:
        console.print(_text(f"  × 2^{group.exponent}  {group.place}, {group.largest:.3g} before"), soft_wrap=True)
    changed = fold.rewrite
    if changed:
        parts = f" (parts of {len(changed.parts)} of them)" if changed.parts else ""
        num = len(changed.weights) + len(changed.parts) + len(changed.shifted)
        console.print(_text(f"  {num} weights{parts}, {len(changed.eps)} epsilons changed"), soft_wrap=True)
    for obstacle in fold.obstacles[:_MOST_LINES]:
        console.print(_text(f"  in the way: {obstacle}"), soft_wrap=True)
    proof = fold.proof
    same = (
        f"the same bit for bit on {proof.trials} random inputs"
        if proof.equal == proof.trials
        else f"{proof.difference:.1e} apart on {proof.trials} random inputs, {proof.tolerance:.1e} allowed"
    )
    console.print(_text(f"  FP32: {same}"), soft_wrap=True)
    console.print(
        _text(
            f"  FP16 against FP32: {_error(proof.fp16_before)} before, {_error(proof.fp16_after)} after; "
            f"BF16: {_error(proof.bf16)}"
        ),
        soft_wrap=True,
    )
    if fold.fp32:
        console.print(_text(f"  keep in FP32, since FP16 would spoil them: {', '.join(fold.fp32)}"), soft_wrap=True)
    if difference is not None:
        read = "the same bit for bit" if difference == 0 else f"{difference:.1e} apart"
        console.print(_text(f"  written to {out}, read back: {read}"), soft_wrap=True)
    if difference is not None and eps_by_hand and changed.eps:
        (module, name), power = next(iter(changed.eps.items()))
        one = f"{module}.{name} × 2^{power}"
        console.print(
            _text(f"  weights hold no epsilons: set those of fold.json in your code, as {one}"), soft_wrap=True
        )


def print_fits(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print one line for each checkpoint."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("checkpoint", "FP16", "error", "BF16's", "because of"):
        table.add_column(name, overflow="fold")
    for row in rows:
        verdict: str = row["verdict"]
        style = _STYLES.get(verdict, "bold red")
        obstacles: list[str] = row.get("obstacles", [])
        why = row.get("error") or (obstacles[0] if obstacles else "")
        near = [_error(decode_number(row[name])) if name in row else "" for name in ("fp16", "bf16")]
        table.add_row(_text(row["checkpoint"]), _text(_words(row), style), *near, _text(why))
    console.print(table)


def _words(row: Mapping[str, Any]) -> str:
    verdict: str = row["verdict"]
    if verdict == "after folding":
        return f"after folding by 2^{row['exponent']}"
    if verdict == "with an island":
        folded = f"after folding by 2^{row['exponent']}, " if row["exponent"] else ""
        return f"{folded}with FP32 in {', '.join(row['island'])}"
    return verdict


def _error(number: float) -> str:
    return f"{number:.1e}" if math.isfinite(number) else "not finite"


def _text(words: str, style: str = "") -> Text:
    """One line; never read as markup, and nothing in it moves the cursor."""
    return Text(printable(words), style)
