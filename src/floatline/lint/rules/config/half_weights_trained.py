"""FL311: training whose weights are FP16, without a copy in FP32."""

from __future__ import annotations

from floatline.causes.rounding import UPDATE_LOST_TO_ROUNDING
from floatline.lint.configs import ConfigRule, RunConfig, read_dtype
from floatline.lint.rule import Bad
from floatline.lint.rules.config import OTHER_TRAINING, OTHER_WEIGHTS, fix_of, half_checkpoints

_TRAINS = ("max_epochs", "max_steps", "min_epochs", "accumulate_grad_batches", "gradient_clip_val")


class HalfWeightsTrained(ConfigRule):
    """Flags training with FP16 weights and no FP32 copy: `precision: 16-true`, or what Trainer trains without `fp16`.

    That is a checkpoint in FP16, or adapters that `autocast_adapter_dtype=False` leaves in the FP16 of their base; by
    itself PEFT makes them FP32.

    ## Why is this bad?
    A weight of 1.0 moves in FP16 only if the update is above 1/4096 = 2.4e-04: a step of Adam at a learning rate of
    1e-4 is lost. There is no loss scale either, so gradients up to 2.98e-08 are zero, and Adam's eps of 1e-8 is zero as
    well.

    ## Fix safety
    Unsafe: the weights become FP32, and take twice the memory; 16-true becomes 16-mixed, which computes in FP16. A
    checkpoint is loaded in FP32, and its compute stays there until fp16 is turned on.
    """

    code = "FL311"
    name = "half-weights-trained"
    cause = UPDATE_LOST_TO_ROUNDING
    message = (
        "the weights are FP16 with no copy in FP32: updates below |w| / 4096 are lost, and nothing scales the loss"
    )
    advice = "precision: 16-mixed"
    fix_safety = "unsafe"
    words = ("16-true", "float16", "fp16", ".half")
    good = (
        Bad(
            "accelerator:\n  type: ipu\n  optim_kwargs:\n    loss_scaling: 1024\n"
            "trainer:\n  accumulate_grad_batches: 1\n  precision: 16-true\n",
            file="run.yaml",
        ),
        Bad("trainer:\n  max_epochs: 3\n  precision: 16-mixed\n  gradient_clip_val: 1.0\n", file="run.yaml"),
        Bad("trainer:\n  precision: 16-true\n  limit_test_batches: 1.0\n", file="test.yaml"),
        "from lightning import Fabric\nfabric = Fabric(precision='16-true')\ny = fabric.setup(model)(x)",
        "import torch\nfrom transformers import AutoModel\nmodel = AutoModel.from_pretrained('m', dtype=torch.float16)",
        "import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
        "model = AutoModel.from_pretrained('m', dtype=torch.bfloat16)\n"
        "Trainer(model=model, args=TrainingArguments('out'))",
        "import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
        "model = AutoModel.from_pretrained('m', dtype=torch.float16)\nsettings = {'fp16': False}\n"
        "settings['bf16'] = prefers_bf16()\n"
        "Trainer(model=model, args=TrainingArguments('out', **settings))",
        "import torch\nfrom peft import get_peft_model\n"
        "from transformers import AutoModel, Trainer, TrainingArguments\n"
        "base = AutoModel.from_pretrained('m', dtype=torch.float16)\nmodel = get_peft_model(base, lora)\n"
        "Trainer(model=model, args=TrainingArguments('out')).train()",
        "import torch\nfrom peft import PeftModel\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
        "base = AutoModel.from_pretrained('m', dtype=torch.float16)\n"
        "model = PeftModel.from_pretrained(base, 'adapter', autocast_adapter_dtype=False)\n"
        "Trainer(model=model, args=TrainingArguments('out')).evaluate()",
    )
    bad = (
        Bad(
            "trainer:\n  max_epochs: 3\n  precision: 16-true\n  gradient_clip_val: 1.0\n",
            file="run.yaml",
            fixed="trainer:\n  max_epochs: 3\n  precision: 16-mixed\n  gradient_clip_val: 1.0\n",
        ),
        Bad(
            "import pytorch_lightning as pl\ntrainer = pl.Trainer(precision='16-true')\ntrainer.fit(model)",
            fixed="import pytorch_lightning as pl\ntrainer = pl.Trainer(precision='16-mixed')\ntrainer.fit(model)",
        ),
        Bad(
            "import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
            "model = AutoModel.from_pretrained('m', dtype=torch.float16)\n"
            "settings = {'fp16': False, 'bf16': False, 'gradient_checkpointing': True}\n"
            "Trainer(model=model, args=TrainingArguments('out', **settings)).train()",
            fixed="import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
            "model = AutoModel.from_pretrained('m', dtype=torch.float32)\n"
            "settings = {'fp16': False, 'bf16': False, 'gradient_checkpointing': True}\n"
            "Trainer(model=model, args=TrainingArguments('out', **settings)).train()",
        ),
        Bad(
            "import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
            "model = AutoModel.from_pretrained('m', dtype=torch.float16)\n"
            "Trainer(model=model, args=TrainingArguments('out')).train()",
            fixed="import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
            "model = AutoModel.from_pretrained('m', dtype=torch.float32)\n"
            "Trainer(model=model, args=TrainingArguments('out')).train()",
        ),
        (
            "import torch\nfrom peft import get_peft_model\n"
            "from transformers import AutoModel, Trainer, TrainingArguments\n"
            "base = AutoModel.from_pretrained('m', dtype=torch.float16)\n"
            "model = get_peft_model(base, lora, autocast_adapter_dtype=False)\n"
            "Trainer(model=model, args=TrainingArguments('out', fp16=False)).train()"
        ),
        (
            "from peft import get_peft_model as wrap\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
            "model = wrap(AutoModel.from_pretrained('m').half(), lora, autocast_adapter_dtype=False)\n"
            "Trainer(model=model, args=TrainingArguments('out', gradient_checkpointing=True)).train()"
        ),
        Bad(
            "per_device_train_batch_size: 8\nlearning_rate: 1e-4\ntorch_dtype: float16\nnum_train_epochs: 1\n",
            file="run.yaml",
            fixed="per_device_train_batch_size: 8\nlearning_rate: 1e-4\ntorch_dtype: float32\nnum_train_epochs: 1\n",
        ),
        Bad(
            "python -m my.training trainer.max_epochs=3 +trainer.precision=16-true  # fast\n",
            file="run.sh",
            fixed="python -m my.training trainer.max_epochs=3 +trainer.precision=16-mixed  # fast\n",
        ),
    )

    def visit_config(self, config: RunConfig) -> None:
        """A mode that is FP16 through and through, or a checkpoint that nothing widens."""
        mode, said = config.precision
        if config.kind in ("lightning", "fabric"):
            if mode == "fp16-true" and said is not None and _trains(config) and not _is_for_ipu(config):
                self.report_setting(said, fix="fp32-setting")
        elif config.kind == "transformers" and mode != "fp16-mixed":
            self._check_checkpoint(config)
            self._check_adapters(config)

    def _check_checkpoint(self, config: RunConfig) -> None:
        document, fp16 = config.document, config.get("fp16")
        if (
            document.mentions(*OTHER_WEIGHTS, "master")
            or (fp16 is not None and fp16.value is not False)
            or config.is_open
        ):
            return
        if not document.is_python:
            dtype = config.first("torch_dtype", "dtype", "model_dtype")
            trains = config.first("per_device_train_batch_size", "num_train_epochs", "learning_rate")
            if dtype is not None and read_dtype(dtype) == "fp16" and trains is not None:
                advice = "load in float32, and fp16: true for the compute"
                self.report_setting(dtype, advice=advice, fix="fp32-setting")
            return
        for dtype in half_checkpoints(document):
            advice = "load in float32, and TrainingArguments(fp16=True) for the compute"
            self.report_setting(dtype, advice=advice, fix=fix_of(dtype))

    def _check_adapters(self, config: RunConfig) -> None:
        document, fp16 = config.document, config.get("fp16")
        if document.mentions("float32", ".float()", *OTHER_TRAINING, "master") or config.is_open:
            return
        if fp16 is not None and fp16.value is not False:
            return
        for adapter in document.of_kind("adapter"):
            kept = adapter.get("autocast_adapter_dtype")
            half = read_dtype(adapter.get("base_dtype")) == "fp16"
            if adapter.name.endswith("get_peft_model") and half and kept is not None and kept.value is False:
                seen = "the adapters are FP16 with no copy in FP32, and nothing scales the loss"
                advice = "autocast_adapter_dtype=True (the default), and TrainingArguments(fp16=True) for the compute"
                self.report_setting(kept, seen=seen, advice=advice)


def _is_for_ipu(config: RunConfig) -> bool:
    """Whether it is for IPUs: PopTorch rounds FP16 weights at random, and its optimizers scale the loss."""
    return any(
        setting.value == "ipu" or str(key).startswith("ipu_")
        for path, setting in config.document.settings.items()
        for key in path
    )


def _trains(config: RunConfig) -> bool:
    document = config.document
    if not document.is_python:
        return config.first(*_TRAINS) is not None
    return (".fit(" if config.kind == "lightning" else ".backward(") in document.text
