"""transformers' Trainer under guard against the Trainer's own fp16=True. Ratios from one run, rounds in turn.

On a CPU the Trainer's fp16=True computes in FP32: there it gets what it has on a GPU, FP16 autocast and torch's scaler.
"""

import argparse
import contextlib
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import floatline as fl
from floatline.integrations.transformers import prepare_trainer

SIZES = {
    "cuda": {
        "375M, batch 8": ({"hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 32768}, (8, 1024)),
        "375M, batch 1": ({"hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 32768}, (1, 1024)),
        "219 small tensors": ({"hidden_size": 128, "num_hidden_layers": 24, "vocab_size": 4096}, (4, 64)),
    },
    "cpu": {"75 small tensors": ({"hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 512}, (4, 64))},
}
WARM_UP = 5  # steps of each round that are not timed


class Clock(TrainerCallback):
    """Times the steps of a round behind its first ones; the device is waited for at both ends only."""

    def __init__(self) -> None:
        self.began = self.took = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:  # noqa: ARG002, D102
        if state.global_step == WARM_UP:
            self.began = _now()

    def on_train_end(self, args, state, control, **kwargs) -> None:  # noqa: ARG002, D102
        self.took = (_now() - self.began) / (state.global_step - WARM_UP)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class WithTorchsScaler(Trainer):
    """What the Trainer has on a GPU, on a CPU."""

    def create_accelerator_and_postprocess(self) -> None:
        """Give the Accelerator a scaler."""
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu")


def make_trainer(
    kind: str, size: dict[str, int], shape: tuple[int, int], *, device: str, steps: int, folder: Path
) -> Trainer:
    """A Trainer of one kind, with the same model, data and settings as the others."""
    torch.manual_seed(0)
    width = size["hidden_size"]
    heads = max(1, width // 64)
    config = LlamaConfig(
        **size,
        intermediate_size=width * 11 // 4,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=shape[1],
    )
    model = LlamaForCausalLM(config)
    if kind == "guarded, FP16 weights":
        for param in model.parameters():  # as from_pretrained(dtype=torch.float16): rotary frequencies stay in FP32
            param.data = param.data.half()
    batch, length = shape
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, size["vocab_size"], (batch * 64, length), generator=generator)
    arguments = TrainingArguments(
        output_dir=str(folder / kind.replace(", ", "-").replace(" ", "-")),
        max_steps=steps,
        per_device_train_batch_size=batch,
        fp16=True,
        use_cpu=device == "cpu",
        learning_rate=1e-4,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        dataloader_pin_memory=device == "cuda",
    )
    plain = WithTorchsScaler if device == "cpu" and kind == "Trainer" else Trainer
    trainer = plain(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.remove_callback(transformers.PrinterCallback)
    if kind != "Trainer":
        prepare_trainer(trainer)
    return trainer


def time_round(trainer: Trainer, device: str) -> float:
    """Seconds a step."""
    clock = Clock()
    trainer.add_callback(clock)
    own = contextlib.nullcontext() if device == "cuda" or type(trainer) is not WithTorchsScaler else fl.HalfOnCPU()
    with own:
        trainer.train()
    trainer.remove_callback(clock)
    return clock.took


def main() -> None:
    """Print a row for each size and kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=55)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, floatline {fl.__version__}")
    print(
        f"{options.rounds} rounds in turn of {options.steps - WARM_UP} timed steps; ratio: median, lowest to highest\n"
    )
    print("| size | run | ms a step | of the Trainer's own |\n|---|---|---|---|")
    kinds = ("Trainer", "guarded", "guarded, FP16 weights")
    for name, (size, shape) in SIZES[options.device].items():
        with tempfile.TemporaryDirectory() as folder:
            own = {"device": options.device, "steps": options.steps, "folder": Path(folder)}
            trainers = {kind: make_trainer(kind, size, shape, **own) for kind in kinds}
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for number in range(options.rounds + 1):  # the first is thrown away
                for kind in kinds if number % 2 else reversed(kinds):
                    took = time_round(trainers[kind], options.device)
                    if number:
                        times[kind].append(took)
        for kind in kinds:
            ratios = [ours / theirs for ours, theirs in zip(times[kind], times["Trainer"], strict=True)]
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"| {name} | {kind} | {1e3 * statistics.median(times[kind]):.2f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
