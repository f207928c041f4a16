"""Forward passes that were planted without a look at the detectors: two rounds, kept as they are found now."""

from pathlib import Path

import pytest
from tests.slow import mostly_slow, slow

from floatline.diagnosis.forward.forward_target import diagnose_forward

HERE = Path(__file__).parent
HEALTHY = {
    "plain_models": "h_vae h_ids h_embed h_variance h_moves h_mask h_router",
    "more_models": "h_sinkhorn h_graph h_contrast h_solve h_dft h_flat h_sphere h_pool h_ssim h_bias h_rank",
    "language_models": "h_gemma h_qwen h_llama h_neox h_t5 h_whisper h_mixtral",
    "more_hf_models": "h_vit h_bert h_gpt2 h_mamba h_resnet",
}
# No single line in FP32 is enough: the search names them.
NEED_TWO_LINES = ("more_models:f_graph", "more_models:f_ssim")
ANY, POLE = "changed-in-16-bits", "rounded-onto-singularity eps-underflow"
# Target, causes that are right, and texts of lines that are; or the module.
PLANTED = [
    ("plain_models:f_vae", "activation-overflow", "blocks.1.conv2"),
    ("plain_models:f_ids", "integer-not-exact", ["ids = ids.to(self.proj"]),
    ("plain_models:f_embed", POLE, ["length = (e * e)", "return e / (length"]),
    ("plain_models:f_variance", "cancellation", ["var = (h * h)"]),
    ("plain_models:f_stalls", "accumulator-stagnation", ["state = state + self.dt"]),
    ("plain_models:f_mask", "scalar-out-of-range", ["s = s + (1.0 - keep"]),
    ("plain_models:f_log", POLE, ["return torch.log(p + self.eps)"]),
    ("plain_models:f_router", "choice-flipped", ["scores = self.gate(x) + self.offset", "weight, chosen"]),
    ("plain_models:f_softplus", "exp-overflow", ["h = torch.log(1 + torch.exp(h))"]),
    ("plain_models:f_fourier", f"{ANY} integer-not-exact", ["phase = coords", "feats = torch.cat"]),
    ("language_models:f_gemma_stream", "product-overflow", "model.layers.0"),
    ("language_models:f_qwen_gate", "product-overflow", "model.layers.2.mlp"),
    ("language_models:f_t5_o", "activation-overflow", "encoder.block.0.layer.0"),
    ("language_models:f_llama_scores", "activation-overflow", "model.layers.1.self_attn"),
    ("language_models:f_neox_bias", "activation-overflow", "gpt_neox.layers.1.mlp"),
    ("language_models:f_whisper_conv", "activation-overflow", "encoder.conv1"),
    ("more_models:f_graph", "accumulator-stagnation", ["degree = torch", "msg = torch"]),
    ("more_models:f_contrast", "exp-overflow", ["weights = torch.exp"]),
    ("more_models:f_solve", "cancellation", ["det = a * d"]),
    ("more_models:f_clock", "input-out-of-range", ""),
    ("more_models:f_dft", "product-overflow", ["power = spec"]),
    ("more_models:f_flat", POLE, ["scale = torch", "return self.lin(centred"]),
    ("more_models:f_sphere", "cancellation", ["angle = (1 - torch.cos"]),
    ("more_models:f_power", "product-overflow", ["y = y**4"]),
    ("more_models:f_pool", "reduction-overflow", ["total = (x *"]),
    ("more_models:f_ssim", "cancellation", ["var = F.conv2d"]),
    ("more_models:f_topp", ANY, ["total = total +"]),
    ("more_models:f_bias", "scalar-out-of-range", ["bias[:, ::2]"]),
    ("more_models:f_rank", "choice-flipped", ["d = 1000", "order = d.argsort"]),
    ("more_hf_models:f_bert_ff", "activation-overflow", "encoder.layer.1"),
    ("more_hf_models:f_gpt2_wpe", "activation-overflow", "transformer.h.1.attn"),
]


def diagnose(name, **options):
    file, _, function = name.partition(":")
    if file.startswith(("language", "more_hf")):
        pytest.importorskip("transformers")
    return diagnose_forward(f"{HERE / file}.py:{function}", **options)


@pytest.mark.parametrize(
    "name",
    mostly_slow([f"{file}:{one}" for file, names in HEALTHY.items() for one in names.split()], every=100, rare=4),
)
def test_a_healthy_pass_is_silent(name):
    assert diagnose(name).verdict == "healthy"


@slow
@pytest.mark.parametrize(("name", "causes", "place"), PLANTED, ids=[row[0] for row in PLANTED])
def test_what_is_planted_is_found_where_it_is(name, causes, place):
    found = diagnose(name, searches=name in NEED_TWO_LINES)
    assert found.verdict == "precision"
    assert found.primary.cause.id in causes.split()
    if isinstance(place, str):
        assert found.primary.module.startswith(place)
        return
    line = Path(found.primary.file).read_text(encoding="utf-8").splitlines()[found.primary.line - 1]
    assert any(text in line for text in place), line


@slow
def test_what_fp32_cannot_do_either_is_not_called_precision():
    assert diagnose("more_models:f_sinkhorn").verdict == "not-precision"
