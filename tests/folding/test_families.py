"""Models of transformers' classes with planted outliers: after a fold FP16 is as near to FP32 as without the plant."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
from tests.slow import mostly_slow

import floatline as fl
from floatline.folding.model_fit import fit_model

pytest.importorskip("transformers")


def load_models():
    """benchmarks/fold_models.py, which builds and plants the models."""
    path = Path(__file__).parents[2] / "benchmarks" / "fold_models.py"
    spec = importlib.util.spec_from_file_location("fold_models", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fold_models"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


models = load_models()
FOLDED = [name for name in models.TOYS if name != "whisper, encoder"]


@pytest.mark.parametrize("name", mostly_slow(FOLDED, every=4))
def test_a_folded_family_is_as_near_as_without_the_plant(name):
    clean = fl.fold(*models.build(name, planted=False))
    found = fl.fold(*models.build(name, planted=True))
    assert (clean.verdict, found.verdict) == ("as it is", "folded")
    assert found.proof.fp16_before == math.inf
    assert found.proof.equal == found.proof.trials
    assert found.proof.fp16_after <= 1.2 * clean.proof.fp16_before


@pytest.mark.slow
def test_whispers_encoder_is_not_folded_since_gelu_writes_its_stream_and_fits_with_an_island():
    found = fit_model(*models.build("whisper, encoder", planted=True))
    assert {obstacle.why for obstacle in found.fold.obstacles} == {"gelu in model.encoder"}
    assert (found.verdict, found.island) == ("with an island", ("model.encoder",))
