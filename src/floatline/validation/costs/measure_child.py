"""What a fresh process measures of an arm: seconds of interleaved steps, and memory by part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from floatline.checkup.advice import note_memory, note_speed
from floatline.checkup.memory import estimate_memory, make_optimizer
from floatline.hardware import detect_devices
from floatline.optim.storage import EXTRAS
from floatline.plans import Plan
from floatline.training.settings import shared_policy
from floatline.training.trainer import Trainer
from floatline.validation.study.trained_arm import first_batches
from floatline.validation.verdict.timing import draw_order
from floatline.workload import Workload, load_target

NUM_PAIRS = 40
LEAST_PAIRS = 6
_WARM_UP = 3
_STATUS = Path("/proc/self/status")

Build = Callable[[], Workload]


def builder_of(settings: dict[str, Any]) -> Build:
    """Builds the workload that the settings name, with their seed and batches."""
    target = load_target(settings["target"])
    return lambda: first_batches(target.build(settings["seed"]), settings["num_batches"])


def make_trainer(workload: Workload, plan: dict[str, Any], seed: int) -> Trainer:
    """A trainer that keeps nothing, as every arm has it."""
    return Trainer(workload, plan=Plan(**plan), policy=shared_policy(workload), folder=None, seed=seed)


def time_target(settings: dict[str, Any]) -> dict[str, Any]:
    """Called in a child process: time the steps of two plans against each other."""
    return time_steps(builder_of(settings), settings)


def time_steps(build: Build, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps of the reference and of a candidate, in pairs, each pair in random order.

    Numerics:
        Both models live in this process. The first step of each, which compiles and allocates, is timed apart, and a
        few more are not timed at all. A GPU is waited for before and after each step. At least 6 pairs, then as many
        as the budget allows, up to 40. 'issuing' is the median share of the candidate's step after which the host had
        nothing left to do but wait: near 1, the GPU waits for the host. None without a GPU.

    Args:
        build: Gives the workload; called once for each arm.
        settings: 'reference' and 'plan' as plain data, 'seed', and 'budget' in seconds.
    """
    keys = {"A": "reference", "B": "plan"}
    trainers = {name: make_trainer(build(), settings[key], settings["seed"]) for name, key in keys.items()}
    first = {name: _seconds_of_step(trainer)[0] for name, trainer in trainers.items()}
    for trainer in trainers.values():
        for _ in range(_WARM_UP):
            _seconds_of_step(trainer)
    times: dict[str, list[float]] = {"A": [], "B": []}
    issued: list[float] = []  # the part of the candidate's steps that was over before the device was waited for
    began = time.monotonic()
    for order in draw_order(NUM_PAIRS, seed=settings["seed"]):
        for name in order:
            seconds, own = _seconds_of_step(trainers[name])
            times[name].append(seconds)
            issued += [own / seconds] if name == "B" else []
        if len(times["A"]) >= LEAST_PAIRS and time.monotonic() - began > settings["budget"]:
            break
    for trainer in trainers.values():
        trainer.guard.close()
    on_gpu = trainers["B"].device.type == "cuda"
    return {
        "reference": times["A"],
        "candidate": times["B"],
        "first_seconds": first["B"],
        "issuing": statistics.median(issued) if on_gpu else None,
    }


def _seconds_of_step(trainer: Trainer) -> tuple[float, float]:
    """The whole step, and what it took to issue it."""
    # Emulated arithmetic is set up outside of the clock: a run does that once, not in every step.
    with trainer.arithmetic():
        _wait(trainer.device)
        began = time.perf_counter()
        trainer.step()
        issued = time.perf_counter() - began
        _wait(trainer.device)
        return time.perf_counter() - began, issued


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_memory(settings: dict[str, Any]) -> dict[str, Any]:
    """Called in a child process: the peak of a few steps of one arm, and its parts.

    Numerics:
        On a GPU the allocator's peak after the first optimizer step, when the states exist. On a CPU VmHWM, the
        highest resident set of the process, from /proc/self/status; None where the system has no such file.
        'process' is what it held before the target was loaded. Weights, gradients, master and states are counted from
        the tensors themselves; activations and autocast's copies come from a watched forward pass of the first batch.

    Args:
        settings: 'target', 'plan', 'seed', 'num_batches'.
    """
    process = read_status("VmRSS")
    build = builder_of(settings)
    trainer = make_trainer(build(), settings["plan"], settings["seed"])
    model, gradients = trainer.workload.model, dict[str, int]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_note_gradient(name, gradients))  # pyright: ignore[reportUnknownArgumentType]
    with trainer.arithmetic():
        trainer.step()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(_WARM_UP):
            trainer.step()
        trainer.guard.drain()
    on_gpu = trainer.device.type == "cuda"
    peak = int(torch.cuda.max_memory_allocated()) if on_gpu else read_status("VmHWM")
    parts = {} if on_gpu or process is None else {"process": process}
    parts |= {"weights": _bytes_of([*model.parameters(), *model.buffers()]), "gradients": sum(gradients.values())}
    parts |= _states_of(trainer.guard.optimizer)
    trainer.guard.close()
    return {"peak": peak, "parts": parts, "device": trainer.device.type}


def explain_costs(settings: dict[str, Any]) -> dict[str, Any]:
    """Called in a child process: activations, autocast's copies, and doctor's notes on speed and memory."""
    return explain_workload(builder_of(settings)(), settings)


def explain_workload(workload: Workload, settings: dict[str, Any]) -> dict[str, Any]:
    """What a watched forward pass under both plans says about memory and speed."""
    reference, plan = Plan(**settings["reference"]), Plan(**settings["plan"])
    best = detect_devices().best
    optimizer = make_optimizer(workload)
    memory = estimate_memory(workload, [reference, plan], optimizer=optimizer, like_cuda=True)
    notes = [*note_memory(memory, plan, optimizer), *note_speed(memory, workload.model, plan, best.hardware)]
    support = best.hardware.supports(plan.compute)
    speed = [note.text for note in notes if note.topic == "speed"]
    sizes = [note.text for note in notes if note.topic == "memory"]
    if plan.compute != "fp32" and best.where == "cpu":
        speed.insert(
            0,
            f"There is no GPU here: products in {plan.compute} are computed in FP32 and rounded as a GPU rounds them, "
            "which takes longer. These times say nothing about a GPU.",
        )
        sizes.append("The FP32 copies behind those products are part of the peak, too.")
    elif plan.compute != "fp32" and not support.matrix_units:
        speed.insert(0, f"{best.name} has no matrix units for {plan.compute}: {support}.")
    parts: dict[str, dict[str, int]] = {}
    for name in (reference.name, plan.name):
        own = memory.parts[name]
        known = {"activations": own.activations, "copies": own.copies}
        parts[name] = {part: size for part, size in known.items() if size is not None}
    return {"parts": parts, "memory": sizes, "speed": speed}


def read_status(field: str) -> int | None:
    """A size from /proc/self/status in bytes, such as VmHWM; None where the system does not tell."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")]
    return sizes[0] if sizes else None


def _note_gradient(name: str, gradients: dict[str, int]) -> Callable[[Tensor], None]:
    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradients[name] = parameter.grad.nbytes

    return note


def _states_of(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the optimizer's states; what an exact master keeps beside 16-bit weights is apart."""
    extras = set(EXTRAS.values())
    held = [(name, value) for own in optimizer.state.values() for name, value in own.items()]
    tensors = [(name, value) for name, value in held if isinstance(value, Tensor)]
    master = _bytes_of([value for name, value in tensors if name in extras])
    states = _bytes_of([value for name, value in tensors if name not in extras])
    return {"states": states, **({"master": master} if master else {})}


def _bytes_of(tensors: list[Tensor]) -> int:
    """Shared memory counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
