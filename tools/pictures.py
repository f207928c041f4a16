"""Makes the pictures of the documentation from real figures: docs/pictures/*."""

import shutil
import sys
import tempfile
from pathlib import Path

import torch

import floatline as fl
from floatline.numerics import cuda_autocast_lists
from floatline.plans.presets import resolve_plan
from floatline.report import draw_ranges
from floatline.report.run.folders import open_runs
from floatline.report.run.page import write_run_page
from floatline.report.run.terminal import draw_runs
from floatline.report.validation.report import write_report

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import how_low  # noqa: E402
import small_gpt  # noqa: E402


def main() -> None:
    """All pictures."""
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    draw_gradients(folder)
    draw_report(folder)
    draw_run(folder)


def draw_gradients(folder: Path) -> None:
    """The floatline chart of a small GPT's gradients, untrained, with and without loss scaling."""
    torch.manual_seed(0)
    model, batches, loss_fn, _, _ = small_gpt.build()
    exact = how_low.gradients(model, batches[0], loss_fn, fp16=False, scale=1.0)
    for name, scale in (("gradients", 1.0), ("gradients_scaled", 2.0**16)):
        measured = how_low.total([gradient * scale for gradient in exact])
        title = f"a small GPT's gradients against FP16, loss scale {scale:,.0f}"
        (folder / f"{name}.svg").write_text(draw_ranges(measured, "fp16", title=title).svg(), encoding="utf-8")


def draw_report(folder: Path) -> None:
    """The head of a report, of a small GPT under two plans; without a Chromium the picture stays as it is."""
    browser = find_browser()
    if browser is None:
        print("no Chromium here: docs/pictures/report.png stays as it is")
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as study, sync_playwright() as driver:
        plans = ["fp16-mixed", "bf16-mixed"]
        found = fl.validate("examples/small_gpt.py", plans, steps=80, folder=Path(study) / "study")
        page = driver.chromium.launch(executable_path=browser).new_page(viewport={"width": 1000, "height": 1000})
        page.goto(write_report(found, Path(study)).as_uri())
        page.screenshot(path=folder / "report.png")


def draw_run(folder: Path) -> None:
    """The head of a run's page, and the run as `floatline watch` shows it; without a Chromium the latter alone."""
    with tempfile.TemporaryDirectory() as place:
        train_small_gpt(Path(place) / "small_gpt")
        runs = [run.look() for run in open_runs([Path(place) / "small_gpt"])]
        print(draw_runs(runs, width=100).plain)
        write_run_page(runs, Path(place) / "run.html")
        browser = find_browser()
        if browser is None:
            print("no Chromium here: docs/pictures/run.png stays as it is")
            return
        from playwright.sync_api import sync_playwright

        with sync_playwright() as driver:
            page = driver.chromium.launch(executable_path=browser).new_page(viewport={"width": 1000, "height": 1240})
            page.goto((Path(place) / "run.html").as_uri())
            page.screenshot(path=folder / "run.png")


def train_small_gpt(folder: Path, *, steps: int = 120) -> None:
    """A small GPT in FP16 from a scale that is too high, which doubles early, with one batch that is broken."""
    torch.manual_seed(0)
    model, batches, loss_fn, precision, make_optimizer = small_gpt.build()
    plan = fl.Plan.model_validate(
        {**resolve_plan(precision).model_dump(), "scaling": {"init_scale": 2.0**21, "growth_interval": 60}}
    )
    guard = fl.Guard(
        model, make_optimizer(model), plan=plan, folder=folder, record_layers_every=5, steps=steps, policy="safe"
    )

    def compute_loss(number: int) -> torch.Tensor:
        inputs, targets = batches[number % len(batches)]
        loss = loss_fn(model(*inputs), *targets)
        return loss * float("nan") if number == 70 else loss

    with guard, fl.HalfOnCPU(), cuda_autocast_lists():
        for number in range(steps):
            guard.step(compute_loss, number)


def find_browser() -> str | None:
    """A Chromium that is already there."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


if __name__ == "__main__":
    main()
