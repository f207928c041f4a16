"""FL208: a checkpoint with the optimizer's state and without the scaler's."""

from __future__ import annotations

import ast

from floatline.causes.scaler import SCALER_STATE_LOST
from floatline.lint.reading.loop import Unit, find_units
from floatline.lint.reading.loop_events import dotted
from floatline.lint.reading.source import Source
from floatline.lint.reading.source_tree import parameters, read_once
from floatline.lint.rule import Rule


class ScalerNotSaved(Rule):
    """Flags a dict with `optimizer.state_dict()` in a file that trains with a scaler and never asks for its state.

    ## Why is this bad?
    Every resume starts at a scale of 65536 again. A model that needs 64 pays 10 skipped steps each time; short sessions
    never get past them.
    """

    code = "FL208"
    name = "scaler-not-saved"
    cause = SCALER_STATE_LOST
    message = "this checkpoint holds the optimizer but not the scaler: every resume starts at a scale of 65536 again"
    advice = '"scaler": scaler.state_dict() beside the optimizer\'s, and scaler.load_state_dict on resume'
    words = (".backward(",)
    good = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, file)
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict()}, file)
""",
        """
import torch
for x, y in batches:
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
""",
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
state["scaler"] = scaler.state_dict()
torch.save(state, file)
""",
        """
import torch
class Trainer:
    def step(self, batch):
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(self.loss(batch)).backward()
        scaler.step(self.optimizer)
        scaler.update()
    def save(self, file):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
""",
    )
    bad = (
        """
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in batches:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
""",
        """
from torch import save
from torch.amp import GradScaler as Scaler
class Trainer:
    def __init__(self):
        self.scaler = Scaler("cuda")
    def train(self):
        for batch in self.batches:
            self.scaler.scale(self.loss(batch)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
    def save(self, file):
        state = dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict())
        save(state, file)
""",
        """
import torch
def train(model, opt, scaler):
    for x, y in batches:
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
    checkpoint = {"epoch": 1, "weights": model.state_dict(), "opt": opt.state_dict()}
    torch.save(checkpoint, "last.pt")
""",
        """
import torch
from dataclasses import asdict, dataclass
@dataclass
class State:
    weights: dict
    opt: dict
def store(state, file):
    torch.save(state, file)
def train(model, opt, scaler):
    for x, y in batches:
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
    store(asdict(State(weights=model.state_dict(), opt=opt.state_dict())), "last.pt")
""",
    )

    def visit_Module(self, node: ast.Module) -> None:  # noqa: N802
        """Checkpoints, where a loop of the file steps their optimizer through a scaler."""
        del node
        stepped: set[str] = set()
        scalers: set[str] = set()
        for unit in find_units(self.source):
            for event in unit.events:
                is_on = event.kind == "step" and event.owner and not unit.training.is_off(event.owner)
                if is_on and not self._is_made_anew(unit, event.owner):
                    stepped.add(event.target.rpartition(".")[2])
                    scalers.add(event.owner.rpartition(".")[2])
        if not stepped:
            return
        owners = [(call, owner) for call in ast.walk(self.source.tree) if (owner := _owner_of_state(call))]
        if any(owner in scalers for _, owner in owners):
            return
        for call, owner in owners:
            if owner in stepped and (holder := self._checkpoint(call)) is not None:
                self.report(holder)

    def _is_made_anew(self, unit: Unit, owner: str) -> bool:
        """Whether what runs one step makes the scaler: it has no state to keep."""
        made = unit.training.scalers.get(owner)
        is_file = isinstance(unit.node, ast.Module)
        return made is not None and not is_file and unit.node in self.source.ancestors(made.call)

    def _checkpoint(self, node: ast.AST) -> ast.expr | None:
        """The outermost dict or dataclass around a state, where torch.save writes it; None where it does not."""
        holder: ast.expr | None = None
        for above in self.source.ancestors(node):
            if isinstance(above, ast.Dict) or (isinstance(above, ast.Call) and self._holds_states(above)):
                holder = above
            elif isinstance(above, ast.stmt):
                break
        return holder if holder is not None and self._is_saved(holder) else None

    def _is_saved(self, holder: ast.expr) -> bool:
        above = self.source.parents.get(holder)
        if self._saves(above):
            return True
        names = {dotted(target) for target in above.targets} if isinstance(above, ast.Assign) else set[str]()
        return any(
            self._saves(call) and any(dotted(arg) in names for arg in call.args)
            for call in ast.walk(self.source.function(holder))
            if isinstance(call, ast.Call)
        )

    def _saves(self, node: ast.AST | None) -> bool:
        """`torch.save(…)`, a function of the file that calls it, and a helper whose name says that it saves."""
        if not isinstance(node, ast.Call):
            return False
        name = self.source.call_name(node)
        says_so = "save" in name.lower() and ("ckpt" in name.lower() or "check" in name.lower())
        return says_so or self.source.is_call_to(node, "torch.save") or name in _saving(self.source)

    def _holds_states(self, node: ast.Call) -> bool:
        """`dict(…)`, a class of the file (`State(…)`), and `asdict(State(…))`."""
        name = dotted(node.func)
        return name in ("dict", "asdict", "dataclasses.asdict") or name in self.source.classes


@read_once
def _saving(source: Source) -> frozenset[str]:
    """Functions of the file that give torch.save what they are given: `def store(state, file): …`."""
    return frozenset(
        one.name
        for one in ast.walk(source.tree)
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
        for call in ast.walk(one)
        if isinstance(call, ast.Call)
        and source.is_call_to(call, "torch.save")
        and call.args
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id in parameters(one)
    )


def _owner_of_state(node: ast.AST) -> str:
    """The last name of X in `X.state_dict()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "state_dict":
        return dotted(node.func.value).rpartition(".")[2]
    return ""
