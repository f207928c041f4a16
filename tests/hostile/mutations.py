"""Mutations of valid artefacts: bytes, texts and JSON trees, made of a random number generator and nothing else."""

import copy
import json
from random import Random
from typing import Any

# Repeated, a token of 12 bytes makes a nesting of thousands, or a number of thousands of digits.
TOKENS = (
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[2J", b"\r\n", b"\n", b" ", b"'", b'"', b"\\", b"%s%n", b"${x}"),
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0.0", b"9" * 20, b"-1", b"0", b"1e-999", b"0x", b"0x_", b"1:99"),
    *(b"null", b"true", b"[]", b"{}", b"[", b"{", b"]", b"}", b'{"a":', b"(", b")", b"\xf0\x9f\x98\x80"),
    *(b"../../../../tmp/x", b"/etc/passwd", b"C:\\x", b"~", b".", b"..", b"file:///etc/passwd"),
    *(b"<script>alert(1)</script>", b"<!--", b"</script>", b"{{7*7}}", b"{% raw %}", b"javascript:alert(1)"),
)
YAML_TOKENS = (
    *(b"!!bool x", b"!!int x", b"!!float x", b"!!timestamp x", b"!!binary \xc3\xa9", b"!!null x", b"!!set {a, b}"),
    *(b"2020-99-99", b"0x_", b"0b2", b"1:99:99", b".inf", b".nan", b"<<: *a", b"&a", b"*a", b"&a [*a]", b"- *a\n"),
    *(b"!!omap [a: 1]", b"!!pairs [a]", b"? [a, b]\n: c", b"%YAML 9.9\n---\n", b"---\n", b"...\n", b"|", b">", b"? "),
    *(b"!!python/object/apply:os.system ['false']", b"!!python/name:os.system", b"!include /etc/passwd", b"2001-01-01"),
)
CODE_TOKENS = (
    *(b"import torch\n", b"scaler.step(optimizer)\n", b"loss.backward()\n", b"with torch.autocast('cuda'):\n    "),
    *(b"torch.log(torch.softmax(x, 1))", b"x.half()", b".half()", b"lambda: ", b"async ", b"await ", b"yield ", b":="),
    *(b"f'{x!r:{y}}'", b"match x:\n    case [*_]:\n        pass\n", b"*", b"**", b"@", b"1e-8", b"1e-999", b"-" * 9),
    *(b"x = x.y\n", b"def f():\n    ", b"while True:\n    ", b"try:\n    pass\nexcept* E:\n    pass\n", b"del x\n"),
    *(b"    ", b"\t", b"\\\n", b"# floatline: allow[", b"global x\n", b"for x in x:\n    ", b"class A(A):\n    "),
)


def deep(depth: int = 3000) -> Any:
    """A list in a list in a list; deeper than Python's own limit on calls."""
    tree: Any = []
    for _ in range(depth):
        tree = [tree]
    return tree


_DEEP = b"[" * 3000 + b"]" * 3000
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, 5e-324, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**400, 10**19),
    *("", "x", "NaN", "Infinity", "-Infinity", "nan", "1", "../../../../tmp/x", "/etc/passwd", "a\x00b", "\ud800"),
    *("<script>alert(1)</script>", "\x1b[2J", "x" * 3000, "float32", "nn", "save", "step", "fp32", "2020-01-01"),
    *([], {}, [[]], [None], {"": None}, {"$tuple": 5}, {"$items": [[[], 1]]}, {"$number": "x"}, {"$items": [1]}),
    *(
        {"$tuple": []},
        {"$number": "NaN"},
        {"$tensor": "no such tensor"},
        {"value": 3},
        [1, 2],
        [["a", 1]],
        {"a": {"a": {}}},
    ),
    *([1 << 40, 1 << 40], [-1], [0, 1 << 62], float("nan"), float("inf"), float("-inf")),
)


def mutate_bytes(data: bytes, random: Random, tokens: tuple[bytes, ...] = TOKENS) -> bytes:
    """One to four small changes."""
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice((1, 1, 2, 4, 16, 200)))
        kind = random.randrange(8)
        if kind == 0 and data:
            at = random.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + random.randbytes(end - at) + data[end:]
        elif kind == 2:
            data = data[:at] + data[end:]
        elif kind == 3:
            data = data[:end] + data[at:end] * random.choice((1, 2, 50)) + data[end:]
        elif kind == 4:
            data = data[:at]
        elif kind == 5:
            other = random.randrange(len(data) + 1)
            data = data[:at] + data[other : other + end - at] + data[end:]
        else:
            times = random.choice((1,) * 9 + (2, 500, 5000))
            end = random.choice((at, end))
            data = data[:at] + random.choice(tokens) * times + data[end:]
        data = data[: 1 << 20]
    return data


def mutate_lines(data: bytes, random: Random, tokens: tuple[bytes, ...] = TOKENS) -> bytes:
    """Lines swapped, doubled, left out, or their values replaced by tokens."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    kind = random.randrange(5)
    if kind == 0:
        lines.insert(at, random.choice(lines))
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        other = random.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 3:
        before, sign, _ = lines[at].partition(random.choice((b": ", b"=", b"(", b",", b" ")))
        lines[at] = before + sign + random.choice(tokens)
    else:
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines.insert(at, indent + random.choice(tokens))
    return b"\n".join(lines)


def mutate_json(data: bytes, random: Random) -> bytes | None:
    """A JSON text, or one of its lines, with one to three values of another kind; None where it is no JSON."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        lines = data.split(b"\n")
        at = random.randrange(len(lines))
        try:
            json.loads(lines[at])
        except (ValueError, RecursionError):
            return None
        lines[at] = mutate_json(lines[at], random) or b""
        return b"\n".join(lines)
    holder = [tree]
    for _ in range(random.choice((1, 1, 1, 3))):
        _change(holder, random)
    text = json.dumps(holder[0]).encode()
    kind = random.randrange(20)
    if kind == 0:
        return text.replace(b"null", _DEEP, 1)  # nested too deep for json.dumps
    if kind == 1 and text.startswith(b"{") and len(text) > 2:
        name = random.choice(list(holder[0]) or ["x"]) if isinstance(holder[0], dict) else "x"
        return (
            text[:-1] + b", " + json.dumps(name).encode() + b": " + json.dumps(random.choice(_VALUES)).encode() + b"}"
        )
    return text


def _change(tree: Any, random: Random) -> None:
    """Go down at random, and change what is there."""
    while True:
        keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = random.choice(keys)
        inner = tree[key]
        if isinstance(inner, dict | list) and inner and random.random() < 0.8:
            tree = inner
            continue
        kind = random.randrange(8)
        if kind == 0 and len(keys) > 1:
            del tree[key]
        elif kind == 1 and isinstance(tree, dict):
            tree[random.choice(("x", "", "$tuple", "step", "name", "../x", "\ud800", "a" * 300))] = tree.pop(key)
        elif kind == 2:
            tree[key] = [inner, copy.deepcopy(inner)]
        elif kind == 3:
            tree[key] = {"x": inner}
        elif kind == 4 and isinstance(inner, int | float):
            tree[key] = random.choice((-inner, inner + 1, inner * 1e300 if abs(inner) < 1e8 else 0, str(inner)))
        else:
            tree[key] = copy.deepcopy(random.choice(_VALUES))  # it may be changed next
        return
