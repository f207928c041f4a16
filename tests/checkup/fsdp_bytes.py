"""Run by test_scale.py: a decoder under FSDP2 on real gloo processes, with its live bytes and collectives counted."""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))  # also in the processes that are started

from tests.checkup.reference_decoder import Decoder, batch_of, loss_of

from floatline import optim
from floatline.checkup.shapes import Transformer
from floatline.optim.mesh import is_distributed

# No width divides by 2 or 3 everywhere: shards are padded.
SHAPE = Transformer(layers=3, width=30, heads=5, kv_heads=5, hidden=41, vocabulary=37)


class Collectives(TorchDispatchMode):
    """Bytes that this process receives, by collective and dtype."""

    def __init__(self, world):
        super().__init__()
        self.world = world
        self.received = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            output, given = args[0], args[1]
            part = given if name == "_allgather_base_" else output
            key = f"{name.strip('_').removesuffix('_base')} {str(part.dtype).removeprefix('torch.')}"
            self.received[key] = self.received.get(key, 0) + (self.world - 1) * part.nbytes
        return func(*args, **(kwargs or {}))


def train(mesh, world, dtype, policy):
    torch.manual_seed(0)
    model = Decoder(SHAPE).to(dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = optim.AdamW(model.parameters())
    gathered = []

    def count(*_):
        whole = [p for p in model.parameters() if not is_distributed(p)]
        gathered.append(sum(p.nbytes for p in whole))

    for block in model.blocks:
        block.gate.register_forward_pre_hook(count)
    tokens, targets = batch_of(SHAPE, 2, 8)
    with Collectives(world) as seen:
        loss_of(model(tokens), targets).backward()
    optimizer.step()
    memory = optimizer.memory().parts
    return {
        "weights": memory["weights"],
        "master": memory.get("remainder", 0),
        "gradients": memory["gradients"],
        "states": memory["exp_avg"] + memory["exp_avg_sq"],
        "gathered": max(gathered),
        "received": seen.received,
    }


def run(rank, world, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {
        "bf16-true": train(mesh, world, torch.bfloat16, MixedPrecisionPolicy()),
        "bf16-mixed": train(mesh, world, torch.float32, mixed),
        "fp32": train(mesh, world, torch.float32, MixedPrecisionPolicy()),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(world, folder), nprocs=world)
        results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    json.dump(results, sys.stdout)
