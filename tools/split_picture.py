"""Draw the exact split of a float32 number into a 16-bit weight and a 16-bit remainder: docs/pictures/split.svg."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from floatline.numerics.split import join_master, split_master

PATH = Path(__file__).parents[1] / "docs" / "pictures" / "split.svg"
NUMBER = 0.1
WIDTH, LEFT, CELL = 860, 40, 24
INK, FAINT = "#24292f", "#8c959f"
COLOURS = {"sign": "#ffd8b5", "exponent": "#d8e8ff", "kept": "#c8ecd0", "rest": "#eadcff"}


def draw() -> str:
    """The picture as SVG text; every number in it comes from the library."""
    master = torch.tensor([NUMBER])
    shapes = [*_bits(master, top=60), *_line(master, top=250)]
    style = (
        "text{font-family:ui-sans-serif,system-ui,sans-serif;font-size:13px;fill:" + INK + "}"
        ".bit{font-family:ui-monospace,monospace;text-anchor:middle}"
        ".mid{text-anchor:middle}.faint{fill:" + FAINT + "}.head{font-size:15px;font-weight:600}"
    )
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 420" role="img" '
        f'aria-label="A float32 number is a bfloat16 weight and a 16-bit remainder">\n'
        f'<style>{style}</style>\n<rect width="{WIDTH}" height="420" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _bits(master: torch.Tensor, *, top: int) -> list[str]:
    """Two rows of bits: the number, and the two halves it becomes."""
    weight, remainder = split_master(master, torch.bfloat16)
    whole = format(int(master.view(torch.int32)) & 0xFFFFFFFF, "032b")
    high = format(int(weight.view(torch.int16)) & 0xFFFF, "016b")
    low = format(int(remainder) & 0xFFFF, "016b")
    found = [_text(LEFT, top - 14, f"float32 {NUMBER} = {float(master):.12g}", "head")]
    kinds = ["sign"] + ["exponent"] * 8 + ["kept"] * 7 + ["rest"] * 16
    found += _row(whole, kinds, LEFT, top)
    second = top + 74
    found += _row(high, kinds[:16], LEFT, second)
    found += _row(low, ["rest"] * 16, LEFT + 16 * CELL + 12, second)
    found.append(_text(LEFT, second + 46, f"weight, bfloat16: {float(weight):.12g}", "head"))
    found.append(_text(LEFT + 16 * CELL + 12, second + 46, f"remainder, int16: {int(remainder)}", "head"))
    found.append(
        _text(
            LEFT,
            top + 50,
            "The low half is read as a signed number; where it is negative, the high half is one larger:",
            "faint",
        )
    )
    return found


def _row(bits: str, kinds: list[str], left: float, top: float) -> list[str]:
    found: list[str] = []
    for i, (bit, kind) in enumerate(zip(bits, kinds, strict=True)):
        x = left + i * CELL
        found.append(f'<rect x="{x}" y="{top}" width="{CELL}" height="26" fill="{COLOURS[kind]}" stroke="#ffffff"/>')
        found.append(_text(x + CELL / 2, top + 18, bit, "bit"))
    return found


def _line(master: torch.Tensor, *, top: int) -> list[str]:
    """The number between its two neighbours of each 16-bit format."""
    found: list[str] = []
    for i, dtype in enumerate((torch.bfloat16, torch.float16)):
        y = top + i * 90
        weight, remainder = split_master(master, dtype)
        bits = weight.view(torch.int16)
        away = float((bits + 1).view(dtype)) - float(weight)
        lower = float(weight) if int(remainder) >= 0 else float((bits - 1).view(dtype))
        upper = float((bits + 1).view(dtype)) if int(remainder) >= 0 else float(weight)
        left, right = LEFT + 130, WIDTH - LEFT - 40
        at = left + (float(join_master(weight, remainder)) - lower) / (upper - lower) * (right - left)
        end = left if int(remainder) >= 0 else right
        name = str(dtype).removeprefix("torch.")
        found += [
            _text(LEFT, y + 5, name, "head"),
            f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="{FAINT}"/>',
            *(_tick(left + (right - left) * k / 16, y, tall=k in (0, 16)) for k in range(17)),
            f'<line x1="{end}" x2="{at:.1f}" y1="{y}" y2="{y}" stroke="#8250df" stroke-width="4"/>',
            f'<circle cx="{end}" cy="{y}" r="6" fill="#1a7f37"/><circle cx="{at:.1f}" cy="{y}" r="5" fill="#8250df"/>',
            _text(left, y + 30, f"{lower:.9g}", "mid"),
            _text(right, y + 30, f"{upper:.9g}", "mid"),
            _text(
                (left + right) / 2,
                y - 16,
                f"{NUMBER} = weight {'+' if int(remainder) >= 0 else '−'} {abs(int(remainder))}/65536 of the spacing"
                f" {away:.4g}",
                "mid",
            ),
        ]
    found.append(
        _text(
            LEFT,
            top + 150,
            "Green: the weight the model uses, the nearest 16-bit number. Violet: the number being trained.",
            "faint",
        )
    )
    return found


def _tick(x: float, y: float, *, tall: bool) -> str:
    size = 9 if tall else 4
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - size}" y2="{y + size}" stroke="{FAINT}"/>'


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(draw(), encoding="utf-8")
    sys.stdout.write(f"{PATH.name}: written\n")
