"""FL309: an optimizer whose eps is zero in FP16, over weights in FP16."""

from __future__ import annotations

from floatline.causes.underflow import OPTIMIZER_STATE_UNDERFLOW
from floatline.lint.configs import ConfigRule, RunConfig, Setting
from floatline.lint.reading.reaching import DEFAULT_EPS, ZERO_IN_FP16
from floatline.lint.rule import Bad


class HalfOptimizerEps(ConfigRule):
    """Flags optimizers of torch whose eps FP16 rounds to zero, in runs whose weights are FP16 (`precision: 16-true`).

    Configuration files alone; optimizers that are made in code are the matter of FL110. FP32 weights under mixed
    precision, and DeepSpeed's FP32 master weights, are fine with an eps of 1e-8.

    ## Why is this bad?
    torch's optimizers keep their state in the dtype of the parameter. In FP16 everything up to 2.98e-08 rounds to zero,
    and with it Adam's eps of 1e-8 and Adagrad's of 1e-10. The second moment is zero too for gradients below 5.4e-03, so
    a zero gradient gives 0 / 0: NaN in the weights after the first step.
    """

    code = "FL309"
    name = "half-optimizer-eps"
    cause = OPTIMIZER_STATE_UNDERFLOW
    message = "the optimizer's eps is zero in FP16, and the weights are FP16"
    advice = "precision: 16-mixed; or at the least eps: 1e-4"
    words = ("16-true",)
    good = (
        Bad(
            "trainer: {max_epochs: 3, precision: 16-mixed}\n"
            "optimizer: {class_path: torch.optim.Adam, init_args: {eps: 1e-8}}\n",
            file="run.yaml",
        ),
        Bad(
            "trainer: {max_epochs: 3, precision: 16-true}\noptimizer: {_target_: torch.optim.AdamW, eps: 1e-4}\n",
            file="run.yaml",
        ),
        Bad("trainer: {max_epochs: 3, precision: 16-true}\noptimizer: {_target_: torch.optim.SGD}\n", file="run.yaml"),
        Bad(
            "trainer: {max_epochs: 3, precision: 16-true}\noptimizer: {_target_: torch.optim.Adam, fused: true}\n",
            file="run.yaml",
        ),
    )
    bad = (
        Bad(
            "trainer: {max_epochs: 3, precision: 16-true}\n"
            "optimizer: {class_path: torch.optim.Adam, init_args: {eps: 1e-8}}\n",
            file="run.yaml",
        ),
        Bad(
            "trainer:\n  max_epochs: 3\n  precision: 16-true\noptimizer:\n  _target_: torch.optim.AdamW\n  lr: 0.001\n",
            file="run.yaml",
        ),
        Bad(
            '[trainer]\nmax_steps = 9\nprecision = "16-true"\nlog_every_n_steps = 1\n'
            '[optimizer]\n_target_ = "torch.optim.Adagrad"\nlr = 0.1\n',
            file="run.toml",
        ),
    )

    def visit_config(self, config: RunConfig) -> None:
        """An optimizer beside a trainer whose weights are FP16."""
        if config.kind != "optimizer" or config.document.is_python:  # FL110 is the rule for code
            return
        if not any(trainer.mode == "fp16-true" for trainer in config.document.of_kind("lightning", "fabric")):
            return
        inner = next((key for key in ("init_args", "params") if config.get(key) is not None), None)
        at = (inner,) if inner else ()
        eps, fused = config.get(*at, "eps"), config.get(*at, "fused")
        name = config.name.rpartition(".")[2]
        number = (
            DEFAULT_EPS.get(name) if eps is None and not config.is_open else eps.number if eps is not None else None
        )
        # The fused kernels add eps in FP32.
        if (
            number is None
            or name not in DEFAULT_EPS
            or number > ZERO_IN_FP16
            or (fused is not None and fused.value is not False)
        ):
            return
        self._report(config, eps, name, number)

    def _report(self, config: RunConfig, eps: Setting | None, name: str, number: float) -> None:
        said = config.place if eps is None else eps
        default = " (its default)" if eps is None else ""
        self.report_setting(
            said,
            seen=f"eps of {name} is {number:.0e}{default}, which FP16 rounds to 0, and the weights are FP16 (16-true)",
        )
