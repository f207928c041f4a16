"""Records what each call of tests/numerics/autocast_table.py returns under CUDA's autocast, as JSON.

PYTHONPATH=src:. python tools/record_cuda_autocast.py tests/data/cuda_autocast.json

The record is what the tests compare CUDA's lists on CPU with. `--device cpu` is a dry run: it needs no
GPU, shows that every call can be made, and its file must not be kept.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path

import torch
from tests.numerics.autocast_table import CALLS, run_table


def registered_kernels() -> list[str]:
    """The operations to which this build of torch gives an autocast rule for CUDA."""
    return sorted(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    )


def main() -> None:
    """Run the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    table = run_table(chosen.device)
    record = {
        "device": torch.cuda.get_device_name() if chosen.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "kernels": registered_kernels(),
        "columns": table,
    }
    chosen.path.write_text(json.dumps(record, indent=1) + "\n")
    for column, results in table.items():
        errors = {call: got for call, got in results.items() if "Error: " in got}
        print(f"{column}: {len(CALLS)} calls, {len(errors)} raise")
        for call, got in errors.items():
            print(f"    {call}\n        {got[:160]}")


if __name__ == "__main__":
    main()
