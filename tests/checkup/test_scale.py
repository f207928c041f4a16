"""Bytes and time on paper, against live objects: a decoder that runs, and FSDP2 on real gloo processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkup.reference_decoder import Decoder, batch_of, loss_of
from tests.marks import needs_fsdp2
from tests.shared import once
from tests.slow import slow
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from floatline.checkup import examine_scale
from floatline.checkup.forward import run_forward
from floatline.checkup.scale import SCALE_HOW, scale_up
from floatline.checkup.shapes import TRANSFORMERS, Transformer, find_transformer
from floatline.cli.main import app
from floatline.errors import FloatlineError
from floatline.hardware.rates import RATES, find_rates
from floatline.plans.presets import PLANS
from floatline.workload import Workload

SMALL = [
    Transformer(2, 64, 4, 4, 96, 50),
    Transformer(3, 32, 2, 2, 80, 40),
    Transformer(2, 64, 4, 1, 96, 50),  # grouped heads
]
SIZES = {"fp32": 4, "bf16-true": 2, "fp16-true": 2}


def workload(shape: Transformer, batch: int, sequence: int) -> Workload:
    tokens, targets = batch_of(shape, batch, sequence)
    return Workload(
        model=Decoder(shape),
        batches=[((tokens,), (targets,))],
        loss_fn=loss_of,
        precision="fp32",
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters()),
    )


# --- the model ---


@pytest.mark.parametrize("shape", SMALL)
def test_the_parameters_are_those_of_a_decoder_that_runs(shape: Transformer):
    size = shape.size("small", batch=1, sequence=1, size=4)
    model = Decoder(shape)
    assert size.num_parameters == sum(p.numel() for p in model.parameters())
    shapes = sorted((s.rows, s.columns) for block in size.blocks for s in block)
    held = [p.shape for block in model.blocks for p in block.parameters()]
    assert shapes == sorted((s[0], s[1] if len(s) == 2 else 1) for s in held)


def test_the_named_models_have_the_parameters_that_are_published():
    published = {"1b": 1_100_048_384, "3b": 3_426_473_600, "7b": 6_738_415_616, "70b": 68_976_648_192}
    for name, count in published.items():
        assert TRANSFORMERS[name].size(name, batch=1, sequence=1, size=2).num_parameters == count


@pytest.mark.parametrize("plan", SIZES)
@pytest.mark.parametrize(("batch", "sequence"), [(2, 16), (1, 24)])
@pytest.mark.parametrize("shape", SMALL)
def test_the_activations_are_those_that_a_real_pass_saves(shape: Transformer, batch: int, sequence: int, plan: str):
    done = run_forward(workload(shape, batch, sequence), PLANS[plan], like_cuda=True)
    tokens = batch * sequence
    expected = shape.activations(tokens, SIZES[plan], checkpointing=False)
    # Not in the formula: on a CPU a norm's two numbers are of its dtype, and the loss keeps what it divides by.
    norms = 2 * shape.layers + 1
    assert done.saved == expected - (4 - SIZES[plan]) * 2 * norms * tokens + 4


def test_a_block_that_keeps_more_would_be_noticed():
    shape = SMALL[0]
    work = workload(shape, 2, 16)
    for block in work.model.blocks:
        block.register_forward_hook(lambda _, __, out: out.tanh().tanh())
    done = run_forward(work, PLANS["fp32"], like_cuda=True)
    assert done.saved == shape.activations(32, 4, checkpointing=False) + 4 + shape.layers * 32 * shape.width * 4


class Again(torch.nn.Module):
    """A block that is computed again in backward."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def saved_bytes(model: Decoder, shape: Transformer) -> int:
    """Bytes that a forward pass saves, counted by hooks around it."""
    tokens, targets = batch_of(shape, 2, 16)
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), tokens, targets)}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model(tokens), targets)
    return sum(t.untyped_storage().nbytes() for t in saved.values())


def test_with_checkpointing_the_inputs_of_the_blocks_are_saved_and_nothing_of_their_inside():
    shape = SMALL[1]
    plain, again = Decoder(shape), Decoder(shape)
    again.blocks = torch.nn.ModuleList(map(Again, again.blocks))
    one = shape.block_activations(32, 4)  # is there in backward, one block after the other
    assert saved_bytes(again, shape) == shape.activations(32, 4, checkpointing=True) - one + 4
    assert saved_bytes(plain, shape) == shape.activations(32, 4, checkpointing=False) + 4


@pytest.mark.parametrize("shape", SMALL)
def test_the_operations_are_those_of_the_products_of_a_real_pass(shape: Transformer):
    done = run_forward(workload(shape, 2, 16), PLANS["fp32"], like_cuda=True)
    attention = 3 * shape.layers * 2 * 32 * 16 * shape.width  # fused: no product is seen
    products = 3 * 2 * sum(gemm.multiply_adds for gemm in done.gemms)
    assert shape.operations(2, 16, checkpointing=False) == products + attention
    again = shape.operations(2, 16, checkpointing=True) - shape.operations(2, 16, checkpointing=False)
    head = 2 * 32 * shape.vocabulary * shape.width
    assert again == (products + attention) // 3 - head


# --- the processes ---

WORLDS = [2, 3]


def measure_all(_: Path) -> dict[int, list[dict[str, Any]]]:
    found = {}
    for world in WORLDS:
        script = Path(__file__).with_name("fsdp_bytes.py")
        run = subprocess.run([sys.executable, script, str(world)], capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stderr[-4000:]
        found[world] = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("[{")))
    return found


@pytest.fixture(scope="module", params=WORLDS)
def measured(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    return request.param, once("bytes of shards", measure_all)[str(request.param)]


def on_paper(plan: str, world: int):
    from tests.checkup.fsdp_bytes import SHAPE

    size = 4 if PLANS[plan].compute == "fp32" else 2
    return scale_up(SHAPE.size("small", batch=2, sequence=8, size=size), PLANS[plan], world=world)


@slow
@needs_fsdp2
@pytest.mark.parametrize("plan", ["bf16-true", "bf16-mixed", "fp32"])
def test_weights_master_gradients_and_states_are_those_of_live_shards(measured: Any, plan: str):
    world, found = measured
    paper = on_paper(plan, world)
    for part in ("weights", "master", "gradients", "states"):
        assert max(one[plan][part] for one in found) == paper.parts[part], part
    assert sum(one[plan]["weights"] for one in found) == paper.model.num_parameters * (2 if plan == "bf16-true" else 4)


@slow
@needs_fsdp2
@pytest.mark.parametrize("plan", ["bf16-true", "bf16-mixed", "fp32"])
def test_the_bytes_that_travel_are_those_of_the_collectives(measured: Any, plan: str):
    world, found = measured
    names = {"bf16": "bfloat16", "fp32": "float32"}
    expected: dict[str, int] = {}
    for name, size in on_paper(plan, world).traffic.items():
        what, dtype = name.split(", ")
        key = f"{what.split(' ')[0].replace('-', '', 1).replace('-', '_')} {names[dtype]}"
        expected[key] = expected.get(key, 0) + size
    expected = {key.replace("reducescatter", "reduce_scatter"): size for key, size in expected.items()}
    assert all(one[plan]["received"] == expected for one in found)


@slow
@needs_fsdp2
@pytest.mark.parametrize("plan", ["bf16-true", "bf16-mixed", "fp32"])
def test_whole_parameters_of_the_root_and_a_block_are_there_while_it_runs(measured: Any, plan: str):
    """The formula has room for the block that is fetched ahead, and for gradients before they are reduced."""
    world, found = measured
    paper = on_paper(plan, world)
    size = 4 if plan == "fp32" else 2
    root = sum(s.rows * s.columns for s in paper.model.root) * size
    block = sum(s.rows * s.columns for s in paper.model.blocks[0]) * size
    assert all(one[plan]["gathered"] == root + block for one in found)
    assert paper.parts["gathered"] == 2 * root + 3 * block


def test_one_process_gathers_and_sends_nothing():
    paper = on_paper("bf16-true", 1)
    assert paper.parts["gathered"] == 0
    assert set(paper.traffic.values()) == {0}
    assert on_paper("bf16-true", 2).parts["weights"] < paper.parts["weights"]


def test_mixed_plans_keep_and_reduce_in_fp32_and_move_16_bits():
    true, mixed = on_paper("bf16-true", 4), on_paper("bf16-mixed", 4)
    assert mixed.parts["weights"] == 2 * true.parts["weights"]
    assert mixed.parts["master"] == 0 < true.parts["master"]
    assert mixed.traffic["all-gather forward, bf16"] == true.traffic["all-gather forward, bf16"]
    assert mixed.traffic["reduce-scatter, fp32"] == 2 * true.traffic["reduce-scatter, bf16"]


# --- time ---


def test_the_time_is_the_longer_of_computing_and_moving_and_then_the_optimizer():
    size = find_transformer("7b").size("7b", batch=1, sequence=4096, size=2)
    near, far = (scale_up(size, PLANS["bf16-true"], world=world, rates=RATES["h100"]) for world in (8, 64))
    assert near.seconds["compute"] == far.seconds["compute"] == pytest.approx(size.operations / 989e12)
    assert near.seconds["communication"] == pytest.approx(sum(near.traffic.values()) / 450e9)
    assert far.seconds["communication"] == pytest.approx(sum(far.traffic.values()) / 400e9)
    parts = near.parts
    moved = parts["gradients"] + 2 * (parts["weights"] + parts["master"] + parts["states"])
    assert near.seconds["optimizer"] == pytest.approx(moved / 3.35e12)
    assert near.least_seconds == pytest.approx(near.seconds["compute"] + near.seconds["optimizer"])
    assert scale_up(size, PLANS["bf16-true"], world=8).least_seconds is None


def test_rates_are_found_by_the_names_people_type():
    assert find_rates("NVIDIA H100") is find_rates("h-100") is RATES["h100"]
    assert find_rates("T4") is None
    assert all(rates.source for rates in RATES.values())


# --- the command ---


def test_the_command_tells_every_part_and_that_nothing_was_run():
    words = ["doctor", "--model", "70b", "--world", "64", "--plan", "bf16-true", "--on", "H100", "--checkpointing"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    for part in ("68,976,648,192 parameters", "one of 64 processes", *SCALE_HOW, "no run on several GPUs was made"):
        assert part in said
    result = json.loads(CliRunner().invoke(app, [*words, "--format", "json"]).stdout)["scale"]
    assert result["parts"]["total"] == sum(size for part, size in result["parts"].items() if part != "total")
    assert set(result["parts"]) == {*SCALE_HOW, "total"}
    assert result["seconds"]["least"] > 0


def test_without_rates_no_time_is_told():
    done = CliRunner().invoke(app, ["doctor", "--model", "7b", "--world", "8", "--plan", "fp16-true", "--on", "T4"])
    assert "Not told: no rates are known" in done.stdout
    scale = examine_scale("7b", world=8, on="t4").scale
    assert scale is not None and scale.as_json()["seconds"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "8"], "--world and --model go together"),
        (["--model", "7b"], "--world and --model go together"),
        (["--model", "8b", "--world", "8"], "Model '8b' is not known. Did you mean '7b'"),
        (["--model", "7b", "--world", "0"], "world is 0. Use the number of processes"),
        (["--model", "7b", "--world", "8", "--batch", "0"], "A batch of 0 sequences of 4096 tokens is empty"),
        (["--model", "7b", "--world", "8", "examples/tour.py"], "are two models. Give one of them"),
    ],
)
def test_wrong_use_is_refused_in_one_line(words: list[str], said: str):
    with pytest.raises(FloatlineError, match=".") as refused:
        CliRunner().invoke(app, ["doctor", "--on", "H100", *words], catch_exceptions=False)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
