"""Plants one hazard into a healthy script: the draws, the text that comes of them, and the truth beside it.

A host is a script with marks such as `# site: aux x=logits loss=loss`: a kind of place, and what things are called
there. A hazard has a piece of code for each kind of place that it needs. In a piece `{name}` is what the host calls
it, a value drawn for this plant or a name drawn for a variable, `[[a||b]]` is written either way, and a line that ends
in `#!` is one that a reader would point at. `{out} = {call}` stands for the hazard's function, in line or as a helper.
"""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path

FOLDER = Path(__file__).parent / "hosts"
HERE = "#!"
MARK = re.compile(r"^( *)# site: (\w+)(.*)$")
NAMES = {
    "out": ("extra", "penalty", "term", "aux", "reg"),
    "a": ("u", "a", "part", "vals", "tmp"),
    "b": ("v", "b", "other", "rest", "cur"),
    "state": ("state", "buf", "track", "running", "acc"),
    "old": ("start", "initial", "before", "first"),
    "f": ("regularizer", "extra_term", "side_loss", "spread", "auxiliary"),
    "arg": ("x", "z", "h", "inp", "values"),
    "goal_arg": ("y", "label", "cls", "truth"),
}


@dataclass(frozen=True)
class Hazard:
    """One thing that can go wrong, and the same code where nothing does.

    Args:
        name: One for each hazard.
        causes: Ids of the catalogue that are right; "precision" where any finding at the place is.
        loud: True for NaN, inf, skipped steps or an exception; False for a wrong result; None where it may be either.
        pieces: Code for each kind of site.
        bad: Values drawn for a plant, by name; a dict where they depend on the dtype.
        good: Values of controls, in place of the plant's; one is drawn of several, and the first computes in FP32.
        function: Arguments and body of a function that `{call}` stands for.
        report: Format of what is printed before the host's own results.
        dtypes: In which it goes wrong.
        verdict: Whether 16 bits are to blame.
        also: Texts of lines that are right as well.
        names: Names of variables in place of the usual ones.
        raises: Text of the exception, where it is one; another means that something else broke.
        alone: Whether its backward pass, with a scale of its own, must be the only one of a step.
    """

    name: str
    causes: tuple[str, ...]
    loud: bool | None
    pieces: dict[str, str]
    bad: dict[str, tuple | dict[str, tuple]] = field(default_factory=dict)
    good: tuple[dict[str, tuple | dict[str, tuple]], ...] = ()
    function: tuple[tuple[str, ...], str] | None = None
    report: str = ""
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    verdict: str = "precision"
    also: tuple[str, ...] = ()
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    raises: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Site:
    """A place of a host: the line of its mark, its indentation, and what things are called there."""

    kind: str
    line: int
    indent: str
    roles: dict[str, str]


@dataclass(frozen=True)
class Plant:
    """A script with a hazard or a control in it; its twin is the other of the two, written in the same way."""

    host: str
    hazard: Hazard
    dtype: str
    control: bool
    text: str
    places: tuple[int, ...]
    drawn: dict[str, str]
    twin: str = ""

    @property
    def num_results(self) -> int:
        """Of how many lines at the end of the output numbers are compared."""
        return 2 if self.hazard.report else 1


def read_sites(text: str) -> list[Site]:
    """All places of a host."""
    sites = []
    for number, line in enumerate(text.splitlines()):
        if mark := MARK.match(line):
            roles = dict(word.split("=", 1) for word in mark[3].split())
            sites.append(Site(mark[2], number, mark[1], roles))
    return sites


def fits(hazard: Hazard, sites: list[Site]) -> bool:
    """Whether a host has a place for every piece, with all that the piece names."""
    return all(_matching(hazard, kind, sites) for kind in _kinds(hazard))


def _kinds(hazard: Hazard) -> list[str]:
    """`aux|inner` is either of them."""
    return [*hazard.pieces, *(["final"] if hazard.report else [])]


def _matching(hazard: Hazard, kinds: str, sites: list[Site]) -> list[Site]:
    needs = set(re.findall(r"\{(\w+)\}", hazard.pieces.get(kinds, "")))
    if hazard.function and "call" in needs:
        needs |= set(hazard.function[0])
    roles = {"x", "loss", "target", "goal", "model", "opt", "other", "i", "n"} & needs
    return [site for site in sites if site.kind in kinds.split("|") and roles <= set(site.roles)]


class _Writer:
    """The choices of one plant."""

    def __init__(self, hazard: Hazard, host: str, dtype: str, num_good: int, rng: random.Random) -> None:
        self.hazard, self.rng = hazard, rng
        sizes = random.Random(rng.random())  # its own, so that a plant and its twin share their style
        given = {**hazard.bad, **(sizes.choice(hazard.good[:num_good]) if num_good else {})}
        self.values = {key: str(sizes.choice(_of(values, dtype))) for key, values in given.items()}
        taken = set(re.findall(r"[A-Za-z_]\w*", host))
        for key, pool in {**NAMES, **hazard.names}.items():
            self.values[key] = rng.choice([name for name in pool if name not in taken] or list(pool))
            taken.add(self.values[key])
        self.helper = rng.random() < 0.5
        self.values |= {"device": "device", "dtype": "dtype"}

    def fill(self, template: str, roles: dict[str, str]) -> str:
        """A piece with its spellings and names drawn."""
        text = self._spell(template)
        known = {**self.values, **roles}
        for _ in range(2):  # a drawn value may name another
            text = re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], found[0]), text)
        return "\n".join(line for line in text.split("\n") if line.removesuffix(HERE).strip())

    def _spell(self, template: str) -> str:
        """One of each pair of brackets."""
        return re.sub(r"\[\[(.*?)\]\]", lambda found: self.rng.choice(found[1].split("||")), template, flags=re.DOTALL)

    def write(self, piece: str, roles: dict[str, str]) -> tuple[str, str]:
        """The code for a site, and the helper that it calls."""
        called = re.search(r"^( *)(\{\w+\}) = \{call\}$", piece, flags=re.MULTILINE)
        if called is None or self.hazard.function is None:
            return self.fill(piece, roles), ""
        arguments, body = self.hazard.function
        body = self._spell(textwrap.dedent(body).strip("\n"))
        if not self.helper:
            inline = re.sub(r"^return ", lambda _: f"{called[2]} = ", body, flags=re.MULTILINE)
            inline = textwrap.indent(inline, called[1])
            return self.fill(piece.replace(called[0], inline), roles), ""
        own = dict(zip(arguments, (self.values["arg"], self.values["goal_arg"]), strict=False))
        helper = f"def {self.values['f']}({', '.join(own.values())}):\n{textwrap.indent(body, '    ')}"
        call = f"{called[1]}{called[2]} = {self.values['f']}({', '.join(roles[name] for name in arguments)})"
        return self.fill(piece.replace(called[0], call), roles), self.fill(helper, own)


def _of(values: tuple | dict[str, tuple], dtype: str) -> tuple:
    return values[dtype] if isinstance(values, dict) else values


def draw(hazard: Hazard, hosts: dict[str, str], rng: random.Random, *, control: bool) -> Plant:
    """A plant of this hazard, in one of the hosts that have a place for it.

    Args:
        hazard: What is planted.
        hosts: Texts with marks, by name.
        rng: Draws host, place, dtype, sizes and style.
        control: Draw the harmless form.
    """
    seed = rng.random()
    forms = (len(hazard.good), 0) if control else (0, 1)  # a plant's twin is the first of its controls
    plant, twin = (_draw(hazard, hosts, random.Random(seed), num_good) for num_good in forms)
    return replace(plant, twin=twin.text)


def _draw(hazard: Hazard, hosts: dict[str, str], rng: random.Random, num_good: int) -> Plant:
    known = [name for name, text in hosts.items() if fits(hazard, read_sites(text))]
    host = rng.choice([name for name in known if not hazard.alone or hosts[name].count("backward(") < 2])
    sites = read_sites(hosts[host])
    dtype = rng.choice(hazard.dtypes)
    writer = _Writer(hazard, hosts[host], dtype, num_good, rng)
    code: dict[int, str] = {}
    replaced: set[int] = set()
    for kinds, piece in hazard.pieces.items():
        site = rng.choice(_matching(hazard, kinds, sites))
        text, helper = writer.write(textwrap.dedent(piece).strip("\n"), site.roles)
        code[site.line] = textwrap.indent(text, site.indent)
        if site.kind == "update":
            replaced.add(site.line)
        if helper:
            code[_one(sites, "helpers").line] = "\n" + helper + "\n"
    if hazard.report:
        site = _one(sites, "final")
        line = writer.fill(f'print(f"{hazard.report}")', site.roles)
        code[site.line] = "\n".join(filter(None, [code.get(site.line), site.indent + line]))
    text, places = assemble(hosts[host], code, replaced, hazard.also, dtype)
    return Plant(host, hazard, dtype, num_good > 0, text, places, writer.values)


def _one(sites: list[Site], kind: str) -> Site:
    return next(site for site in sites if site.kind == kind)


def assemble(
    host: str, code: dict[int, str], replaced: set[int], also: tuple[str, ...], dtype: str
) -> tuple[str, tuple[int, ...]]:
    """The script without marks, and the lines that a reader would point at."""
    lines: list[str] = []
    skipping = False
    for number, line in enumerate(host.splitlines()):
        if line.strip() == "# end":
            skipping = False
        elif MARK.match(line):
            lines += code[number].split("\n") if number in code else []
            skipping = number in replaced
        elif not skipping:
            if "--precision" in line:
                line = line.replace('default="fp16"', f'default="{dtype}"')
            lines.append(line)
    lines = _without_gaps(lines)
    places = [at for at, line in enumerate(lines, 1) if line.rstrip().endswith(HERE) or any(t in line for t in also)]
    text = "\n".join(line.removesuffix(HERE).rstrip() for line in lines) + "\n"
    return text, tuple(places)


def _without_gaps(lines: list[str]) -> list[str]:
    """At most two empty lines in a row."""
    kept: list[str] = []
    for line in lines:
        if line.strip() or [*kept[-2:]] != ["", ""]:
            kept.append(line if line.strip() else "")
    return kept
