"""Training loops as the rules see them: what a step does, in order, on every way through it.

A place that trains is a loop, or a function without one, that holds both a backward pass and an optimizer's step.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from floatline.lint.reading.branches import BranchChoice, BranchStep, Jump, Known, Piece, Turns, Way, find_ways, learn
from floatline.lint.reading.loop_events import (
    FUNCTIONS,
    LOOPS,
    SCALERS,
    Kind,
    LoopCall,
    LoopNames,
    body_of,
    calls_in,
    dotted,
    nodes_in,
)
from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import keyword, last_name, read_once

# Without CUDA a GradScaler is off by itself. Words like these in a test only ever make a rule silent.
_ABOUT_PRECISION = re.compile(r"amp|cuda|device|fp16|float16|half|precision|scaler", re.IGNORECASE)


@dataclass(frozen=True)
class MadeObject:
    """What the file shows of how an object is made."""

    call: ast.Call
    function: ast.AST
    known: Known


class Training:
    """The training loops of a file, and the objects that they use."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.scalers: dict[str, MadeObject] = {}
        self.made_scalers: list[tuple[str, MadeObject]] = []  # also those that share a name
        self.other_scalers: set[str] = set()  # of classes that are not torch's, whose calls have an order of their own
        self.optimizers: dict[str, MadeObject] = {}
        self.schedulers: dict[str, MadeObject] = {}
        self.functions: list[ast.AST] = [source.tree]
        self._read()

    def _read(self) -> None:
        for node in ast.walk(self.source.tree):
            if isinstance(node, FUNCTIONS):
                self.functions.append(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self._note(node, node.value, [name for target in targets if (name := dotted(target))])

    @cached_property
    def _inherited(self) -> set[str]:
        """Schedulers that classes of the file have from a base in another file of the tree."""
        source, found = self.source, set[str]()
        bases = [last_name(base) for one in source.classes.values() for base in one.bases]
        for base in bases if source.neighbours is not None else ():
            if source.neighbours is not None and base in source.imported:
                found |= source.neighbours.find_schedulers(source.file, *source.imported[base])
        return found

    def _note(self, node: ast.stmt, value: ast.expr, names: Sequence[str]) -> None:
        known: Known = {}
        while isinstance(value, ast.IfExp):
            side = isinstance(value.orelse, ast.Constant)
            known.update(learn(value.test, side))
            value = value.body if side else value.orelse
        if not names or not isinstance(value, ast.Call):
            return
        path = self.source.path(value.func)
        last = path.rpartition(".")[2]
        if path in SCALERS:
            home = self.scalers
        elif path.startswith("torch.optim.lr_scheduler.") or (
            path.startswith("transformers.") and last.startswith("get_") and "schedule" in last
        ):
            home = self.schedulers
        elif path.startswith("torch.optim.") and last[:1].isupper():
            home = self.optimizers
        else:
            name = self.source.call_name(value)
            if name.endswith("LossScaler") and name[:1].isupper():
                self.other_scalers |= set(names)
            return
        if home is self.scalers and (enabled := keyword(value, "enabled")) is not None:
            known.update(learn(enabled, True))
        above = self.source.parents.get(node)
        if isinstance(above, ast.If) and home is self.scalers:
            known.update(learn(above.test, node in above.body))
        for name in names:
            home[name] = MadeObject(value, self.source.function(node), known)
            if home is self.scalers:
                self.made_scalers.append((name, home[name]))

    def is_off(self, scaler: str) -> bool:
        """Whether the scaler is made with `enabled=False`."""
        made = self.scalers.get(scaler)
        enabled = keyword(made.call, "enabled") if made else None
        return isinstance(enabled, ast.Constant) and not enabled.value

    @cached_property
    def units(self) -> list[Unit]:
        """The places that train: the innermost loop, or else function, with a backward pass and a step in it."""
        found: list[Unit] = []
        for function in self.functions:
            calls = set(calls_in(body_of(function)))
            backward = [one for one in calls if last_name(one.func) == "backward"]
            if not backward or not any(last_name(one.func) == "step" for one in calls):
                continue
            loops = [node for node in nodes_in(body_of(function)) if isinstance(node, LOOPS)]
            names = LoopNames(
                self.source,
                function,
                calls,
                scalers=self.scalers,
                optimizers=self.optimizers,
                schedulers={*self.schedulers, *self._inherited},
            )
            if names.scalers & self.other_scalers:
                continue
            used: list[ast.AST] = []
            for loop in reversed(loops):  # the innermost first
                inside = set(calls_in(loop.body))
                if any(node in used for node in ast.walk(loop)):
                    continue
                if any(one in inside for one in backward) and any(names.is_step(one) for one in inside):
                    used.append(loop)
                    found.append(Unit(self, function, loop, names))
            if not used and any(names.is_step(one) for one in calls):
                found.append(Unit(self, function, function, names))
        return found


class Unit:
    """One place that trains.

    Args:
        training: The file.
        function: The function, or module, around it.
        node: The loop whose body is one step, or the function where it has no such loop.
        names: What its names are.
    """

    def __init__(self, training: Training, function: ast.AST, node: ast.AST, names: LoopNames) -> None:
        self.training, self.function, self.node, self.names = training, function, node, names
        self.source = training.source
        self.body = body = body_of(node)
        self.is_loop = isinstance(node, LOOPS)
        self.pieces = tuple(self._pieces(body))
        self.assigned = _assigned(node)

    @cached_property
    def events(self) -> list[LoopCall]:
        """Everything that happens in it, in the order of the file."""
        return list(_flat(self.pieces))

    def has(self, kind: Kind, *, owner: str | None = None) -> bool:
        """Whether something of a kind happens in it at all."""
        return any(event.kind == kind and owner in (None, event.owner) for event in self.events)

    def known(self) -> Known:
        """What holds where the scalers are in use."""
        known: Known = {}
        for scaler in sorted({event.owner for event in self.events if event.owner}):
            last = scaler.rpartition(".")[2]
            known.update({last: True, f"{last} is not None": True, f"{last}.is_enabled()": True})
            if made := self.training.scalers.get(scaler):
                known.update(made.known)
        return known

    @cached_property
    def ways(self) -> list[Way[LoopCall]]:
        """Every way through one step."""
        return find_ways(self.pieces, self.known())

    @cached_property
    def two_turns(self) -> list[Way[LoopCall]]:
        """Every way through two steps after each other; one where it is not a loop."""
        return find_ways(self.pieces, self.known(), turns=2, assigned=self.assigned) if self.is_loop else self.ways

    def is_switched(self, scaler: str) -> bool:
        """Whether a scaler may be off on some ways: it is made elsewhere, or a test around its calls is about that."""
        made = self.training.scalers.get(scaler)
        if made is None or made.function is not self.function:
            return True
        for event in self.events:
            for above in self.source.ancestors(event.node) if event.owner == scaler else ():
                if isinstance(above, ast.If) and _ABOUT_PRECISION.search(ast.unparse(above.test)):
                    return True
        return False

    def calls(self) -> Iterator[ast.Call]:
        """Every call in its body, in the order of the file."""
        yield from calls_in(self.body)

    def _pieces(self, statements: Sequence[ast.stmt]) -> Iterator[Piece[LoopCall]]:
        for node in statements:
            if isinstance(node, ast.If):
                yield from self._steps(node.test)
                body, orelse = tuple(self._pieces(node.body)), tuple(self._pieces(node.orelse))
                if body or orelse:
                    yield BranchChoice(node.test, body, orelse)
            elif isinstance(node, LOOPS):
                body = tuple(self._pieces(node.body))
                if body:
                    yield Turns(body, _assigned(node))
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                yield from self._pieces(node.body)
            elif isinstance(node, ast.Try):
                for block in (node.body, node.orelse, node.finalbody):
                    yield from self._pieces(block)
            elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                continue
            else:
                yield from self._steps(node)
                if isinstance(node, (ast.Continue, ast.Break, ast.Return, ast.Raise)):
                    yield Jump(type(node).__name__.lower(), node)  # type: ignore[arg-type] # pyright: ignore

    def _steps(self, node: ast.AST) -> Iterator[Piece[LoopCall]]:
        for call in _ordered_calls(node):
            for event in self.names.events(call):
                yield BranchStep(event)


@read_once
def read_training(source: Source) -> Training:
    """The training loops of a file."""
    return Training(source)


def find_units(source: Source) -> list[Unit]:
    """The places of a file that train; none where it has no backward pass."""
    return read_training(source).units if ".backward(" in source.text and ".step(" in source.text else []


def _flat(pieces: Sequence[Piece[LoopCall]]) -> Iterator[LoopCall]:
    for piece in pieces:
        if isinstance(piece, BranchStep):
            yield piece.event
        elif isinstance(piece, BranchChoice):
            yield from _flat(piece.body)
            yield from _flat(piece.orelse)
        elif isinstance(piece, Turns):
            yield from _flat(piece.body)


def _ordered_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls as they are made: what is inside first."""
    if isinstance(node, (ast.Lambda, *FUNCTIONS, ast.ClassDef)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _ordered_calls(child)
    if isinstance(node, ast.Call):
        yield node


def _assigned(node: ast.AST) -> frozenset[str]:
    """Names that a loop changes."""
    return frozenset(
        one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, (ast.Store, ast.Del))
    )
