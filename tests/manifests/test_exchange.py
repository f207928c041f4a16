"""What processes exchange gradients in, read on one process; parts of tensors are looked at where they are."""

import socket
import subprocess
import sys
from pathlib import Path

from tests.marks import needs_fsdp2, needs_gloo
from tests.slow import slow


@slow
def test_the_policy_of_fsdp2_and_the_hook_of_ddp_are_read():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, str(Path(__file__).with_name("on_one_rank.py")), str(port)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    sharded, hooked, plain = run.stdout.splitlines()
    assert "weights FP32, gradients FP32, states FP32; BF16 100 % of FLOPs" in sharded
    assert "kind='fsdp2', module='', param='bf16', reduce='fp32'" in sharded
    assert sharded.endswith(" 72")  # every weight and bias had an update
    assert "kind='ddp-hook', module='fp16_compress_hook', param='', reduce='fp16'" in hooked
    assert plain == "()"


@needs_gloo
@needs_fsdp2
@slow
def test_parts_of_sharded_tensors_are_measured_where_they_are():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("on_shards.py")
    run = subprocess.run([sys.executable, *words, str(script)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    bare, measured, whole, num_updates = (int(number) for number in run.stdout.split())
    assert measured == bare
    assert whole >= 1  # a weight that is gathered would be counted
    assert num_updates == 36  # this process' half of 72
