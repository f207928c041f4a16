"""No operation of the five reference systems or of public models is called a wrong kernel, where kernels are judged."""

import pytest
import torch
import transformers
from tests.marks import judges_kernels
from tests.slow import slow

from floatline.probe.runs.runs import trace_target
from floatline.probe.trace.recorder import Recorder
from floatline.workload import load_target

pytestmark = judges_kernels
PICTURES = ["num_images=4", "batch_size=2", "image_size=64", "held_out=2", "total_steps=4"]
SYSTEMS = {"dbnet": PICTURES, "mmgcn": [], "conditioned": [], "distill": [], "audio_lora": []}


@slow
@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_kernel_of_a_reference_system_is_called_wrong(system, precision):
    trace = trace_target(load_target(system, pairs=SYSTEMS[system]), step=1, steps=2, precision=precision)
    assert len(trace.ops) > 100
    assert "kernels" not in trace.meta


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
STAGES = {"num_encoder_blocks": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "num_attention_heads": [1, 2]}
STAGES |= {"sr_ratios": [4, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
# Batch norm and grouped convolutions are among them: torch's own are less exact than others in 16 bits.
PUBLIC = {
    "Bert": ("MaskedLM", SIZES | {"vocab_size": 99}),
    "Llama": ("CausalLM", SIZES | {"vocab_size": 99}),
    "ViT": ("ImageClassification", SIZES | {"image_size": 32, "patch_size": 8}),
    "MobileNetV2": ("ImageClassification", {"depth_multiplier": 0.35, "image_size": 32}),
    "ResNet": ("ImageClassification", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    "Segformer": ("ImageClassification", STAGES | {"decoder_hidden_size": 16}),
}


@slow
@pytest.mark.parametrize("pure", [False, True], ids=["mixed", "pure"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", PUBLIC)
def test_no_kernel_of_a_public_model_is_called_wrong(name, dtype, pure):
    torch.manual_seed(0)
    head, sizes = PUBLIC[name]
    model = getattr(transformers, f"{name}For{head}")(getattr(transformers, f"{name}Config")(**sizes))
    if "vocab_size" in sizes:
        tokens = torch.randint(0, 99, (2, 24))
        batch = {"input_ids": tokens, "labels": tokens}
    else:
        pictures = torch.randn(4, 3, 32, 32)
        batch = {"pixel_values": pictures.to(dtype) if pure else pictures, "labels": torch.tensor([0, 1, 0, 1])}
    model = model.to(dtype) if pure else model
    with Recorder(model) as recorder:
        with torch.autocast("cpu", dtype=dtype, enabled=not pure):
            loss = model(**batch).loss
        loss.backward()
    assert len(recorder.trace.ops) > 60
    assert "kernels" not in recorder.trace.meta
