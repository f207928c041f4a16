"""Commands in shell scripts: what they hand to a Python program is settings, with places; all else is left alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floatline.hardware import find_hardware
from floatline.lint import RULES, lint_paths, lint_text
from floatline.lint.configs.commands import read_commands
from floatline.lint.configs.view import UNKNOWN
from floatline.lint.settings import Settings

BOTH = "--per_device_train_batch_size 8 --fp16 --bf16"


def values(text):
    return [
        {".".join(map(str, path)): one.value for path, one in document.settings.items()}
        for document in read_commands(text, "run.sh")
    ]


def lint(text, on=None):
    return lint_text(text, "run.sh", rules=list(RULES.values()), on=find_hardware(on) if on else None)


def codes(text, on=None):
    return [one.rule.code for one in lint(text, on)]


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("trainer.precision=16", {"trainer.precision": 16}),
        ("+trainer.precision='16-mixed' ++seed=1", {"trainer.precision": "16-mixed", "seed": 1}),
        ("--trainer.precision bf16-mixed --max-steps=-1", {"trainer.precision": "bf16-mixed", "max_steps": -1}),
        ("--max_steps -1 --fp16 --out 'a b'", {"max_steps": -1, "fp16": True, "out": "a b"}),
        ("--lr 1e-4 --lr 1e-3", {"lr": "1e-3"}),
        ("--lr $LR --steps ${STEPS} name=x_$(date +%Y%m)", {"lr": UNKNOWN, "steps": UNKNOWN, "name": UNKNOWN}),
        ("--fp16 trainer.precision=16", {"fp16": True, "trainer.precision": 16}),
        ("--fp16  # --bf16", {"fp16": True}),
        ("--fp16 \\\n  --seed 3 2>&1 | tee --append log", {"fp16": True, "seed": 3}),
        ("", None),
    ],
)
def test_options_and_overrides_are_settings(words, settings):
    assert values(f"python train.py {words}\n") == ([settings] if settings is not None else [])


@pytest.mark.parametrize(
    "start",
    [
        "python train.py",
        "CUDA_VISIBLE_DEVICES=0,1 /opt/env/bin/python3.11 -u train.py",
        "uv run python -m my.training",
        "srun torchrun --nproc_per_node=8 train.py",
        "accelerate launch --mixed_precision fp16 train.py",
        "deepspeed --num_gpus 2 train.py",
        "./train.py",
        "cd src && python train.py",
        "if true; then python train.py",
    ],
)
def test_a_python_program_is_started_in_many_ways(start):
    assert codes(f"{start} {BOTH}\n") == ["FL302"]


@pytest.mark.parametrize(
    "text",
    [
        f"# python train.py {BOTH}",
        f"trtexec {BOTH}",
        f"echo start; convert {BOTH}",
        f"python prepare.py; convert {BOTH}",
        f"python prepare.py\nconvert {BOTH}",
        "python train.py --per_device_train_batch_size 8 --fp16\npython train.py --num_train_epochs 3 --bf16",
    ],
)
def test_what_starts_no_python_program_says_nothing(text):
    assert codes(text) == []


def test_a_finding_stands_at_its_word():
    text = "#!/bin/sh\npython train.py \\\r\n  trainer.max_epochs=3 \\\n    trainer.limit_train_batches=0\n"
    (found,) = lint(text)
    assert (found.rule.code, found.line, found.column, found.end_column) == ("FL305", 4, 5, 34)
    assert text.split("\n")[3][4:33] == "trainer.limit_train_batches=0"


def test_what_a_command_does_not_say_the_program_may():
    spoken = "python train.py trainer.precision=16-mixed trainer.max_epochs=3"
    rules = [RULES["FL304"]]
    assert lint_text(spoken, "run.sh", rules=rules) == []
    assert lint_text(f"{spoken} trainer.gradient_clip_val=0", "run.sh", rules=rules) != []


def test_the_launcher_of_accelerate_has_settings_of_its_own():
    text = "accelerate launch --mixed_precision bf16 train.py --mixed_precision fp16\n"
    assert codes(text, on="t4") == ["FL303"]
    assert codes(text, on="a100") == []
    assert codes("accelerate launch train.py --mixed_precision bf16\n", on="t4") == []


def test_an_open_quote_costs_its_line_only():
    assert codes(f"cat <<EOF\nit doesn't\nEOF\npython train.py {BOTH}\n") == ["FL302"]
    assert codes(f'python train.py {BOTH[:-7]} "--bf16\n') == []


def test_a_line_is_allowed_as_in_python():
    assert codes(f"python a.py --fp16\npython train.py {BOTH}  # floatline: allow[two-sixteen-bit-formats]\n") == []
    assert codes(f"python a.py --fp16\npython train.py {BOTH}  # floatline: allow[no-training-batches]\n") == ["FL302"]


def test_scripts_of_a_folder_are_linted_and_not_run(tmp_path):
    (tmp_path / "run.sh").write_text(f"touch {tmp_path}/ran\npython train.py {BOTH}\n")
    (tmp_path / "run.txt").write_text(f"python train.py {BOTH}\n")
    result = lint_paths([tmp_path], settings=Settings(), jobs=1)
    assert [(one.rule.code, one.line) for one in result.findings] == [("FL302", 2)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.sh", "run.txt"]


@given(st.text("ab=.-+$`(){}[]\"'\\\n;|&<># \t16", max_size=120))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_without_an_error(text):
    for document in read_commands(f"python x.py {text}", "run.sh"):
        for one in document.settings.values():
            assert 1 <= one.line <= text.count("\n") + 1
            assert one.column >= 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_counts_every_file_whether_it_can_be_read_or_not(jobs, tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.py").write_text("x = 1\n" if number else "x = (\n")
    told = []
    result = lint_paths([tmp_path], settings=Settings(), jobs=jobs, on_progress=lambda *counts: told.append(counts))
    assert len(told) > 1 and told == sorted(told)
    assert told[-1] == (60, 60)
    assert result.num_lines == 60
