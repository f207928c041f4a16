"""FL312: adapters that stay in FP16 under a loss scaler."""

from __future__ import annotations

from floatline.causes.scaler import FP16_PARAMS_WITH_SCALER
from floatline.lint.configs import ConfigRule, RunConfig, read_dtype
from floatline.lint.rule import Bad


class HalfAdaptersWithScaler(ConfigRule):
    """Flags `autocast_adapter_dtype=False` of PEFT with FP16 mixed precision over a base in FP16.

    ## Why is this bad?
    PEFT makes adapters of an FP16 base FP32, unless `autocast_adapter_dtype=False` leaves them in FP16. They are what
    is trained, and torch.amp.GradScaler refuses FP16 parameters: "Attempting to unscale FP16 gradients".
    """

    code = "FL312"
    name = "half-adapters-with-scaler"
    cause = FP16_PARAMS_WITH_SCALER
    message = "the adapters stay in FP16 and are trained with a loss scaler: the first step raises"
    advice = "autocast_adapter_dtype=True (the default): FP32 adapters over the FP16 base"
    words = ("autocast_adapter_dtype",)
    good = (
        "import torch\nfrom peft import get_peft_model\nfrom transformers import AutoModel, TrainingArguments\n"
        "base = AutoModel.from_pretrained('m', dtype=torch.float16)\n"
        "model = get_peft_model(base, lora, autocast_adapter_dtype=True)\nargs = TrainingArguments('out', fp16=True)",
        "import torch\nfrom peft import get_peft_model\nfrom transformers import AutoModel, TrainingArguments\n"
        "base = AutoModel.from_pretrained('m', dtype=torch.bfloat16)\n"
        "model = get_peft_model(base, lora, autocast_adapter_dtype=False)\nargs = TrainingArguments('out', bf16=True)",
        "import torch\nfrom peft import PeftModel\nfrom transformers import AutoModel\n"
        "base = AutoModel.from_pretrained('m', dtype=torch.float16)\n"
        "model = PeftModel.from_pretrained(base, 'adapter', autocast_adapter_dtype=False)",
        "import torch\nfrom peft import get_peft_model\nfrom transformers import AutoModel, TrainingArguments\n"
        "base = AutoModel.from_pretrained('m', dtype=torch.float16)\n"
        "model = get_peft_model(base, lora, autocast_adapter_dtype=False)\nargs = TrainingArguments('out', fp16=True)\n"
        "for p in model.parameters():\n    if p.requires_grad:\n        p.data = p.data.float()",
    )
    bad = (
        (
            "import torch\nfrom peft import get_peft_model as wrap\n"
            "from transformers import AutoModel, TrainingArguments\n"
            "base = AutoModel.from_pretrained('m', dtype=torch.float16)\n"
            "model = wrap(base, lora, autocast_adapter_dtype=False)\nargs = TrainingArguments('out', fp16=True)"
        ),
        (
            "import peft\nimport torch\nfrom accelerate import Accelerator\nfrom transformers import AutoModel\n"
            "accelerator = Accelerator(mixed_precision='fp16')\n"
            "base = AutoModel.from_pretrained('m', torch_dtype=torch.float16)\n"
            "model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False)"
        ),
        Bad(
            "per_device_train_batch_size: 8\nlearning_rate: 1e-4\nfp16: true\ntorch_dtype: float16\n"
            "autocast_adapter_dtype: false\n",
            file="run.yaml",
        ),
    )

    def visit_config(self, config: RunConfig) -> None:
        """A scaler, adapters that keep their dtype, and a base in FP16, in one file."""
        if config.kind not in ("transformers", "accelerate", "lightning") or config.mode != "fp16-mixed":
            return
        document = config.document
        if document.mentions("float32", ".float()", "deepspeed", "fsdp"):
            return  # widened by hand, or master weights elsewhere
        if not document.is_python:
            kept = next(document.find("autocast_adapter_dtype"), None)
            if (
                kept is not None
                and kept.value is False
                and any(read_dtype(one) == "fp16" for one in document.find("torch_dtype", "dtype"))
            ):
                self.report_setting(kept)
            return
        for adapter in document.of_kind("adapter"):
            kept = adapter.get("autocast_adapter_dtype")
            base = read_dtype(adapter.get("base_dtype"))
            if kept is not None and kept.value is False and base == "fp16":
                self.report_setting(kept)
