"""FL301: FP16 mixed precision over a checkpoint that is loaded in FP16."""

from __future__ import annotations

from floatline.causes.scaler import FP16_PARAMS_WITH_SCALER
from floatline.lint.configs import ConfigRule, RunConfig, read_dtype
from floatline.lint.rule import Bad
from floatline.lint.rules.config import OTHER_WEIGHTS, fix_of, half_checkpoints


class HalfCheckpointWithScaler(ConfigRule):
    """Flags FP16 mixed precision (`fp16: true`, `mixed_precision: fp16`, `precision: 16-mixed`) over a model in FP16.

    ## Why is this bad?
    Mixed precision in FP16 brings a loss scaler, and torch.amp.GradScaler refuses FP16 parameters: the first
    step raises "Attempting to unscale FP16 gradients". It is right to: a gradient of 1e-8 that a scale of 65536 lifted
    to 6.6e-4 would round to 0 again.

    ## Fix safety
    Unsafe: the weights are loaded in FP32, and take twice the memory. The compute stays in FP16.
    """

    code = "FL301"
    name = "half-checkpoint-with-scaler"
    cause = FP16_PARAMS_WITH_SCALER
    message = "FP16 mixed precision trains weights that are loaded in FP16: the first step raises"
    advice = "load the model in float32; mixed precision takes care of the 16 bits"
    fix_safety = "unsafe"
    words = ("fp16", "mixed_precision", "precision")
    good = (
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nfp16: true\ntorch_dtype: float32\n", file="run.yaml"),
        Bad(
            "per_device_train_batch_size: 8\nlearning_rate: 1e-4\nfp16: true\ntorch_dtype: float16\nuse_peft: true\n",
            file="run.yaml",
        ),
        Bad("fp16: true\ntorch_dtype: float16\n", file="app.yaml"),
        "import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
        'teacher = AutoModel.from_pretrained("t", torch_dtype=torch.float16)\n'
        'model = AutoModel.from_pretrained("m")\n'
        'Trainer(model=model, args=TrainingArguments("out", fp16=True))',
        "import torch\nfrom peft import get_peft_model\n"
        "from transformers import AutoModel, Trainer, TrainingArguments\n"
        'base = AutoModel.from_pretrained("m", torch_dtype=torch.float16)\nmodel = get_peft_model(base, settings)\n'
        'Trainer(model=model, args=TrainingArguments("out", fp16=True))',
    )
    bad = (
        Bad(
            "per_device_train_batch_size: 8\nlearning_rate: 1e-4\nfp16: true\ntorch_dtype: float16\n",
            file="run.yaml",
            fixed="per_device_train_batch_size: 8\nlearning_rate: 1e-4\nfp16: true\ntorch_dtype: float32\n",
        ),
        Bad(
            "import torch as t\nfrom transformers import AutoModelForCausalLM as Model\n"
            "from transformers import Trainer, TrainingArguments as Args\n"
            'model = Model.from_pretrained("m", torch_dtype=t.float16)\n'
            'Trainer(model=model, args=Args("out", fp16=True)).train()',
            fixed="import torch as t\nfrom transformers import AutoModelForCausalLM as Model\n"
            "from transformers import Trainer, TrainingArguments as Args\n"
            'model = Model.from_pretrained("m", torch_dtype=t.float32)\n'
            'Trainer(model=model, args=Args("out", fp16=True)).train()',
        ),
        Bad(
            "import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
            'settings = {"fp16": True, "gradient_checkpointing": True}\n'
            'model = AutoModel.from_pretrained("m", torch_dtype=torch.float16)\n'
            'Trainer(model=model, args=TrainingArguments("out", **settings)).train()',
            fixed="import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
            'settings = {"fp16": True, "gradient_checkpointing": True}\n'
            'model = AutoModel.from_pretrained("m", torch_dtype=torch.float32)\n'
            'Trainer(model=model, args=TrainingArguments("out", **settings)).train()',
        ),
        Bad(
            "import torch\nfrom accelerate import Accelerator\nfrom transformers import AutoModel\n"
            'accelerator = Accelerator(mixed_precision="fp16")\n'
            'model = AutoModel.from_pretrained("m", dtype="float16")\n'
            "model, optimizer = accelerator.prepare(model, optimizer)",
            fixed="import torch\nfrom accelerate import Accelerator\nfrom transformers import AutoModel\n"
            'accelerator = Accelerator(mixed_precision="fp16")\n'
            'model = AutoModel.from_pretrained("m", dtype="float32")\n'
            "model, optimizer = accelerator.prepare(model, optimizer)",
        ),
    )

    def visit_config(self, config: RunConfig) -> None:
        """The mode, and what the models that are trained are loaded in."""
        mode, said = config.precision
        if config.kind not in ("transformers", "accelerate", "lightning") or mode != "fp16-mixed" or said is None:
            return
        document = config.document
        if document.mentions(*OTHER_WEIGHTS):
            return
        if not document.is_python:
            dtype = config.first("torch_dtype", "dtype", "model_dtype")
            if dtype is not None and read_dtype(dtype) == "fp16":
                seen = f"the model is loaded in FP16 and trained with {said} (line {said.line}): {_THEN}"
                self.report_setting(dtype, seen=seen, fix="fp32-setting")
            return
        for dtype in half_checkpoints(document):
            seen = f"the model is loaded in FP16 and trained with {said} (line {said.line}): {_THEN}"
            self.report_setting(dtype, seen=seen, fix=fix_of(dtype))


_THEN = 'GradScaler raises "Attempting to unscale FP16 gradients"'
