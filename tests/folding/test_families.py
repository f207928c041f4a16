"""Models of transformers' classes with planted outliers: after a fold FP16 is as near to FP32 as without the plant."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from tests.slow import mostly_slow, slow

import floatline as fl
from floatline.folding.model_fit import fit_model

transformers = pytest.importorskip("transformers")


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


@slow
@pytest.mark.parametrize("name", mostly_slow(FOLDED, every=4))
def test_a_folded_family_is_as_near_as_without_the_plant(name):
    clean = fl.fold(*models.build(name, planted=False))
    found = fl.fold(*models.build(name, planted=True))
    assert (clean.verdict, found.verdict) == ("as it is", "folded")
    assert found.proof.fp16_before == math.inf
    assert found.proof.equal == found.proof.trials
    assert found.proof.fp16_after <= 1.2 * clean.proof.fp16_before


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "BloomForCausalLM": {"n_layer": 2, "n_head": 2},
    "GPTJForCausalLM": {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8},
    "Qwen3MoeForCausalLM": {"num_experts": 4, **EXPERTS},
    "GptOssForCausalLM": {"num_local_experts": 4, **EXPERTS},
    "MambaForCausalLM": {"state_size": 4},
    **{
        f"{name}ForCausalLM": {}
        for name in (
            *("Phi", "Phi3", "Cohere", "Cohere2", "Olmo2", "Granite", "StableLm", "Glm4", "Starcoder2", "Mistral"),
            *("Gemma", "Nemotron", "Persimmon", "Exaone4", "Helium", "SmolLM3"),
        )
    },
}


@pytest.mark.parametrize("name", mostly_slow(OTHERS, every=len(OTHERS) + 1))
def test_other_families_are_the_same_function_and_nothing_but_their_logits_is_left_too_large(name):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**(SMALL | OTHERS[name])))
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        model.get_input_embeddings().weight[1, 5] = 98304.0
    found = fl.fold(model, {"input_ids": torch.arange(1, 9)[None], "use_cache": False})
    assert found.proof.equal == found.proof.trials
    assert found.proof.fp16_before == math.inf
    assert {obstacle.place for obstacle in found.obstacles} <= {"mm in lm_head"}  # where it is the embedding
    assert found.obstacles or found.proof.fp16_after < found.proof.bf16


@pytest.mark.slow
def test_whispers_encoder_is_not_folded_since_gelu_writes_its_stream_and_fits_with_an_island():
    found = fit_model(*models.build("whisper, encoder", planted=True))
    assert {obstacle.why for obstacle in found.fold.obstacles} == {"gelu in model.encoder"}
    assert (found.verdict, found.island) == ("with an island", ("model.encoder",))
