"""A validation on a real Ray cluster of one node; skipped where Ray is not installed."""

import pytest

pytest.importorskip("ray", reason="ray is not installed (the extra 'ray')")

TARGET = """
import torch
from torch import nn


def build(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(64, 8, generator=generator), torch.randn(8, 4, generator=generator)
    batches = [((x[i::4],), ((x[i::4] @ w).argmax(1),)) for i in range(4)]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    return model, batches, nn.functional.cross_entropy, "fp16-mixed", lambda m: torch.optim.AdamW(m.parameters(), 1e-2)
"""


def test_the_arms_run_as_tasks_of_a_cluster_and_get_a_verdict(tmp_path):
    import ray

    from floatline.integrations.ray import RayRunner
    from floatline.validate.target_study import validate

    (tmp_path / "net.py").write_text(TARGET)
    runner = RayRunner(jobs=1)
    try:
        options = {"steps": 60, "margins": (0.05, 0.1), "max_seeds": 3, "measure": False, "broken": False}
        found = validate(str(tmp_path / "net.py"), folder=tmp_path / "study", runner=runner, **options)
    finally:
        ray.shutdown()
    assert found.verdict == "PASS", found.best.reason
    assert len(found.best.seeds) == 3
