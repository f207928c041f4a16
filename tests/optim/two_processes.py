"""Run by test_distributed.py: trains the same model on one process, with DDP and with FSDP2 on two, and compares."""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from floatline import optim
from floatline.numerics.orthogonal import COEFFICIENTS, newton_schulz
from floatline.optim.mesh import local_part

STEPS = 6


def make_model(dtype):
    torch.manual_seed(0)
    # 7 rows do not divide by 2: the shards differ in size, and one begins at an odd place.
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch(step, rank=None):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 5, generator=generator)
    return x if rank is None else x[4 * rank : 4 * rank + 4]


def backward(model, x, dtype):
    model(x.to(dtype)).float().square().mean().backward()


def train(model, dtype, rank=None, *, steps=STEPS, clip_norm=0.05, optimizer=None, first=0, **options):
    optimizer = optimizer or optim.AdamW(model.parameters(), lr=1e-2, **options)
    norms = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, batch(step, rank), dtype)
        optimizer.step(clip_norm=clip_norm)
        norms.append(float(optimizer.decision.norm))
    return optimizer, norms


def sharded(dtype, mesh):
    model = make_model(dtype)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def set_grads(model, seed):
    """The same gradients however the model is sharded."""
    for i, param in enumerate(model.parameters()):
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * seed + i)).to(param.dtype)
        if hasattr(param, "device_mesh"):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad


def live(model, optimizer):
    """This process's part of weights and states, as a guard finds them."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [local_part(tensor.detach()) for tensor in (*model.parameters(), *states)]


def largest_difference(one, two):
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def checks(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    found = {}

    # Exact weights on the same gradients: the same bits on shards as on one process.
    for name, dtype, options in (
        ("exact", torch.float16, {}),
        ("stochastic", torch.bfloat16, {"update": "stochastic"}),
        ("bf16 states", torch.bfloat16, {"states": "bf16"}),
    ):
        whole, parts = make_model(dtype), sharded(dtype, mesh)
        first = optim.AdamW(whole.parameters(), lr=1e-2, **options)
        second = optim.AdamW(parts.parameters(), lr=1e-2, **options)
        for step in range(STEPS):
            set_grads(whole, step)
            set_grads(parts, step)
            first.step()
            second.step()
        one, two = first.master_state_dict(whole), second.master_state_dict(parts)
        found[f"{name}: shards equal one process"] = all(torch.equal(one[key], two[key]) for key in one)

    # Writes from outside, which the wrapper or its local part counts: the same bits again.
    for name, write in (("DTensor", lambda p: p.mul_(-0.5)), ("local part", lambda p: local_part(p).mul_(-0.5))):
        whole, parts = make_model(torch.bfloat16), sharded(torch.bfloat16, mesh)
        pairs = [(model, optim.AdamW(model.parameters(), lr=1e-2)) for model in (whole, parts)]
        for step in range(STEPS):
            for model, optimizer in pairs:
                if step == 3:
                    with torch.no_grad():
                        for param in model.parameters():
                            write(param)
                set_grads(model, step)
                optimizer.step()
        one, two = (optimizer.master_state_dict(model) for model, optimizer in pairs)
        found[f"written through the {name}: shards equal one process"] = all(torch.equal(one[k], two[k]) for k in one)

    # Forward, backward and a rollback in place are no such writes.
    for name in ("DDP", "FSDP2"):
        model = DistributedDataParallel(make_model(torch.bfloat16)) if name == "DDP" else sharded(torch.bfloat16, mesh)
        optimizer, _ = train(model, torch.bfloat16, rank)
        kept = [tensor.clone() for tensor in live(model, optimizer)]
        train(model, torch.bfloat16, rank, optimizer=optimizer)
        after = [tensor.clone() for tensor in live(model, optimizer)]
        with torch.no_grad():
            for tensor, value in zip(live(model, optimizer), kept, strict=True):
                tensor.copy_(value)
        train(model, torch.bfloat16, rank, optimizer=optimizer)
        found[f"{name}: rolled back bit for bit"] = all(map(torch.equal, after, live(model, optimizer)))
        found[f"{name}: has remainders"] = sum(bool(s["remainder"].any()) for s in optimizer.state.values())

    # Norm and clipping over the mesh.
    whole, parts = make_model(torch.float32), sharded(torch.float32, mesh)
    first, second = optim.AdamW(whole.parameters()), optim.AdamW(parts.parameters())
    set_grads(whole, 3)
    set_grads(parts, 3)
    expected, seen = first.survey(), second.survey()
    found["norm on one process"] = float(expected.norm)
    found["norm on two"] = float(seen.norm)
    found["norms of tensors differ by"] = float((expected.norms - seen.norms).abs().max())
    local = sum(float(p.grad.to_local().square().sum()) for p in parts.parameters()) ** 0.5
    found["norm without the mesh"] = local

    # Real training: forward, backward, reduction, clipping.
    for dtype in (torch.float32, torch.bfloat16):
        single = make_model(dtype)
        reference, norms = train(single, dtype)
        replicated = make_model(dtype)
        ddp = DistributedDataParallel(replicated)
        second, ddp_norms = train(ddp, dtype, rank)
        parts = sharded(dtype, mesh)
        third, fsdp_norms = train(parts, dtype, rank)
        one = reference.master_state_dict(single)
        key = str(dtype).removeprefix("torch.")
        found[f"{key}: DDP differs by"] = largest_difference(one, second.master_state_dict(replicated))
        found[f"{key}: FSDP2 differs by"] = largest_difference(one, third.master_state_dict(parts))
        found[f"{key}: moved by"] = largest_difference(one, make_model(dtype).float().state_dict())
        found[f"{key}: norms differ by"] = max(
            abs(a - b) / a for other in (ddp_norms, fsdp_norms) for a, b in zip(norms, other, strict=True)
        )

    # A NaN in one process's shard stops both.
    parts = sharded(torch.float16, mesh)
    optimizer, _ = train(parts, torch.float16, rank, steps=1)
    set_grads(parts, 1)
    if rank == 0:
        parts[0].weight.grad.to_local()[0, 0] = torch.nan
    before = optimizer.master_state_dict(parts)
    optimizer.step(clip_norm=1.0)
    after = optimizer.master_state_dict(parts)
    found["NaN on one rank: applied"] = bool(optimizer.decision.applied)
    found["NaN on one rank: unchanged"] = all(torch.equal(before[key], after[key]) for key in before)
    found["NaN on one rank: counted"] = int(optimizer.survey().nonfinite.sum())

    # Float32 weights by name.
    optimizer.save_master(parts, Path(folder) / "master.safetensors")
    dist.barrier()
    again = sharded(torch.float16, mesh)
    second = optim.AdamW(again.parameters())
    second.load_master(again, Path(folder) / "master.safetensors")
    loaded = second.master_state_dict(again)
    found["master file on shards"] = all(torch.equal(after[key], loaded[key]) for key in loaded)

    found |= muon_checks(rank, mesh)

    # Full checkpoints through torch's own tools.
    for states in ("fp32", "int8"):
        found[f"{states}: resumed differs by"] = resume(rank, mesh, states=states)
    return found


def deep_model(dtype):
    """Three matrices on two processes: the last batch of the exchange has one owner and one idle process."""
    torch.manual_seed(0)
    layers = (nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 9, bias=False), nn.Tanh(), nn.Linear(9, 1))
    return nn.Sequential(*layers).to(dtype)


def sharded_deep(dtype, mesh):
    model = deep_model(dtype)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def cut_into_columns(dtype, mesh):
    """A model that is cut as tensor parallelism cuts: no process has a whole row."""
    model = deep_model(dtype)
    for layer in (model[0], model[2], model[4]):
        weight = distribute_tensor(layer.weight.detach(), mesh, [Shard(1)])
        layer.weight = nn.Parameter(weight)
    return model


def muon_checks(rank, mesh):
    """Muon turns whole matrices: shards have to end with the bits of one process."""
    found = {}
    cases = [("exact", ns_dtype, {}) for ns_dtype in ("bf16", "fp16", "fp32")]
    cases += [("stochastic", "bf16", {"states": "bf16"}), ("exact", "bf16", {"nesterov": False})]
    for update, ns_dtype, options in cases:
        for name, cut in (("rows", sharded_deep), ("columns", cut_into_columns)):
            if name == "columns" and update == "stochastic":  # other choices than on one process, by design
                continue
            models = deep_model(torch.bfloat16), cut(torch.bfloat16, mesh)
            pair = [(m, optim.Muon(m.parameters(), 0.02, update=update, ns_dtype=ns_dtype, **options)) for m in models]
            for step in range(3):
                for model, optimizer in pair:
                    set_grads(model, step)
                    optimizer.step(clip_norm=1e3 if options else None)
            one, two = (optimizer.master_state_dict(model) for model, optimizer in pair)
            key = f"Muon, {update}, {ns_dtype}, {', '.join(options) or 'plain'}, {name}"
            found[key] = all(torch.equal(one[k], two[k]) for k in one)
    start = deep_model(torch.float32).state_dict()
    found["Muon: moved by"] = largest_difference(one, start)

    # Each process by itself would turn another matrix.
    parts, whole = sharded_deep(torch.float32, mesh), deep_model(torch.float32)
    for model in (parts, whole):
        set_grads(model, 1)
    grads = (parts[2].weight.grad.to_local(), whole[2].weight.grad)
    own, held = (newton_schulz(one, "bf16", coefficients=COEFFICIENTS, steps=5, eps=1e-7)[0].float() for one in grads)
    found["Muon: turned alone differs by"] = float((own - held.chunk(2)[rank]).abs().max())

    parts = sharded_deep(torch.float16, mesh)
    optimizer = optim.Muon(parts.parameters(), 0.02)
    set_grads(parts, 0)
    optimizer.step()
    set_grads(parts, 1)
    if rank == 0:
        parts[2].weight.grad.to_local()[0, 0] = torch.nan
    before = [tensor.clone() for tensor in live(parts, optimizer)]
    optimizer.step(clip_norm=1.0)
    found["Muon, NaN on one rank: unchanged"] = all(map(torch.equal, before, live(parts, optimizer)))
    found["Muon: resumed differs by"] = resume(rank, mesh, sharded_deep, lambda params: optim.Muon(params, 0.02))
    return found


def resume(rank, mesh, make=None, build=None, **options):
    """Train, save a full checkpoint, load it into a new optimizer, train both: how far apart they end."""
    make = make or sharded
    build = build or (lambda params: optim.AdamW(params, lr=1e-2, **options))
    full = StateDictOptions(full_state_dict=True)
    parts, again = make(torch.float16, mesh), make(torch.float16, mesh)
    optimizer, _ = train(parts, torch.float16, rank, optimizer=build(parts.parameters()))
    box = [get_optimizer_state_dict(parts, optimizer, options=full)]
    dist.broadcast_object_list(box, src=0)
    resumed = build(again.parameters())
    set_optimizer_state_dict(again, resumed, box[0], options=full)
    with torch.no_grad():
        for mine, theirs in zip(again.parameters(), parts.parameters(), strict=True):
            mine.copy_(theirs)
    train(parts, torch.float16, rank, optimizer=optimizer, first=STEPS)
    train(again, torch.float16, rank, optimizer=resumed, first=STEPS)
    return largest_difference(optimizer.master_state_dict(parts), resumed.master_state_dict(again))


def run(rank, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = checks(rank, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=2)
        results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    json.dump(results, sys.stdout)
