"""Configurations: every format gives the same settings with their places; what is strange or hostile is left alone."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floatline.hardware import find_hardware
from floatline.lint import RULES, lint_text
from floatline.lint.configs.calls import read_calls
from floatline.lint.configs.files import read_documents
from floatline.lint.configs.kinds import find_configs
from floatline.lint.configs.view import UNKNOWN
from floatline.lint.reading.source import Source
from floatline.lint.rule import read_examples

CONFIG_RULES = [rule for code, rule in RULES.items() if code.startswith("FL3")]
HEAD = "per_device_train_batch_size: 8\nlearning_rate: 1e-4\n"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{f'*{before}, ' * 9}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
JSON_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab1. ", max_size=4)
)
TRAINER = "trainer:\n  max_epochs: 3\n  precision: 16-mixed\n  log_every_n_steps: 1\n"


def lint(text, file="run.yaml", on=None):
    return lint_text(text, file, rules=CONFIG_RULES, on=find_hardware(on) if on else None)


def codes(text, file="run.yaml", on=None):
    return [one.rule.code for one in lint(text, file, on)]


def values(text, file="run.yaml"):
    return {path: one.value for document in read_documents(text, file) for path, one in document.settings.items()}


def kinds(text, file="run.yaml"):
    documents = read_documents(text, file)
    for document in documents:
        find_configs(document)
    return [config.kind for document in documents for config in document.configs]


def test_all_formats_and_python_give_the_same_finding():
    arguments = {"per_device_train_batch_size": 8, "learning_rate": 1e-4, "fp16": True, "bf16": True}
    as_toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    as_yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in arguments.items())
    as_python = (
        f"from transformers import TrainingArguments\nTrainingArguments('out', **extra, {'fp16=True, bf16=True'})"
    )
    assert codes(as_yaml) == ["FL302"]
    assert codes(as_toml, "run.toml") == ["FL302"]
    assert codes(json.dumps(arguments), "run.json") == ["FL302"]
    assert codes(as_python, "run.py") == ["FL302"]


@pytest.mark.parametrize(
    ("text", "file", "place"),
    [
        (f"# a note\n{HEAD}fp16: true\n\nbf16: true  # too\n", "a.yaml", (6, 1, 11)),
        (
            '{\n\t"train_batch_size": 1, "zero_optimization": {},\n\t"fp16": {"enabled": true},\n'
            '\t"bf16": {"enabled": true}\n}',
            "a.json",
            (4, 11, 26),
        ),
        (
            '[train]\noutput_dir = "o"\nper_device_train_batch_size = 8\n  fp16 = true\n  bf16 = true # too\n',
            "a.toml",
            (5, 3, 14),
        ),
        (
            "from transformers import TrainingArguments\nTrainingArguments(\n    'ä', fp16=True, bf16=True)",
            "a.py",
            (3, 21, 30),
        ),
    ],
)
def test_a_finding_stands_at_its_setting(text, file, place):
    found = [one for one in lint(text, file) if one.rule.code == "FL302"]
    assert [(one.line, one.column, one.end_column) for one in found] == [place]


def test_yaml_gives_numbers_words_and_unknowns():
    text = "a: 1e-8\nb: yes\nc: null\nd: ${x}\ne: !include other.yaml\nf: 0x10\ng: '1'\nh: {i: [1, {j: 2}]}\n"
    read = values(text)
    assert read[("a",)] == "1e-8" and read[("b",)] is True and read[("c",)] is None
    assert read[("d",)] is UNKNOWN and read[("e",)] is UNKNOWN
    assert read[("f",)] == 16 and read[("g",)] == "1" and read[("h", "i", 1, "j")] == 2
    (document,) = read_documents(text, "a.yaml")
    assert document.settings[("a",)].number == 1e-8


def test_anchors_and_merges_are_followed_and_the_mapping_itself_wins():
    text = "base: &b {precision: 16-mixed, max_epochs: 3}\ntrainer:\n  <<: *b\n  log_every_n_steps: 1\n"
    assert codes(text) == ["FL304"]
    assert codes(text + "  precision: 32\n") == []
    assert codes(text.replace("*b", "[*b, {gradient_clip_val: 1.0}]")) == []


def test_each_document_of_a_stream_is_its_own():
    assert codes(f"{HEAD}fp16: true\n---\n{HEAD}bf16: true\n") == []
    assert codes(f"{HEAD}fp16: true\nbf16: true\n") == ["FL302"]


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "a: &a {b: *a}\n",
        "a: &a\n  <<: *a\n",
        "[" * 50_000,
        "- " * 50_000,
        "{a: " * 5_000,
        "a: *nobody\n",
        "a: !!python/object/apply:os.system ['false']\n",
        "a: !!float x\nb: !!int y\nc: !!bool z\n",
        "a: " + "9" * 10_000,
        "? {a: b}\n: c\n",
        "\x00",
        "a: b: c",
        "---\n---\n...\n---",
        "x" * 200_000,
        "[" + " " * 200_000,
        "1" * 200_000 + "x",
        "x" * 400_000,
    ],
    ids=range(18),
)
def test_hostile_files_are_neither_expanded_nor_run(text):
    hostile = f"fp16: true\nloss_scale: 1\nprecision: 16\n{text}"
    for file in ("a.yaml", "a.json", "a.toml"):
        assert codes(hostile, file) == []
    assert codes(f"[fp16]\nprecision = 16 # {text}", "a.toml") == []


@given(st.text(max_size=200), st.sampled_from(["a.yaml", "a.json", "a.toml"]))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_without_an_error(text, file):
    lint(text, file)
    lint(f"fp16: true\nprecision: 16\n{text}", file)


@given(
    st.recursive(
        JSON_LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_", min_size=1, max_size=4), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
@settings(max_examples=150, deadline=None)
def test_json_is_read_as_json_reads_it(data):
    text = json.dumps({"top": data}, indent="\t")
    (document,) = read_documents(text, "a.json")

    def check(value, path):
        if isinstance(value, dict):
            for key, inner in value.items():
                check(inner, (*path, key))
        elif isinstance(value, list):
            for key, inner in enumerate(value):
                check(inner, (*path, key))
        elif isinstance(value, float):
            assert document.settings[path].number == value
        else:
            assert document.settings[path].value == value

    check(data, ("top",))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (TRAINER, "lightning"),
        ("_target_: lightning.pytorch.Trainer\nprecision: 16\n", "lightning"),
        ("class_path: pytorch_lightning.Trainer\ninit_args: {}\n", "lightning"),
        ("fit:\n  trainer:\n    precision: 16\n    devices: 2\n", "lightning"),
        ("per_device_train_batch_size: 1\nfp16: true\nlearning_rate: 1\n", "transformers"),
        ("compute_environment: LOCAL_MACHINE\nmixed_precision: fp16\nnum_processes: 1\n", "accelerate"),
        ("zero_optimization: {stage: 1}\nfp16: {enabled: true}\n", "deepspeed"),
        ("optimizer:\n  _target_: torch.optim.Adam\n  lr: 1\n", "optimizer"),
    ],
)
def test_a_configuration_is_known_by_its_keys(text, kind):
    assert kinds(text) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "precision: 16\n",
        "precision: 16\nmax_epochs: 3\n",
        "fp16: true\nbf16: true\n",
        "mixed_precision: fp16\n",
        "fp16: {enabled: true}\nbf16: {enabled: true}\n",
        "zero_optimization: true\nfp16: true\nbf16: true\n",
        "loss_scale: 128\ninitial_scale_power: 32\n",
        "_target_: mine.Trainer\nprecision: 16-mixed\nmax_epochs: 3\nlog_every_n_steps: 1\n",
        "services:\n  web:\n    image: x\n    precision: 16\n    devices: [1]\n",
        "- 1\n- 2\n",
        "just text",
    ],
)
def test_a_file_that_only_looks_like_one_is_none(text):
    assert kinds(text) == []
    assert codes(text, on="t4") == []


def test_what_another_file_may_add_is_not_missed():
    assert codes(TRAINER) == ["FL304"]
    assert codes("# @package _global_\n" + TRAINER) == []
    assert codes("defaults: [base]\n" + TRAINER) == []
    assert codes(TRAINER + "  own_key_of_a_project: 1\n") == []
    assert codes(TRAINER + "optimizer: {grad_clip: 1}\n") == []


def test_lines_are_allowed_in_yaml_and_toml_as_in_python():
    line = "  precision: 16-mixed"
    assert codes(TRAINER.replace(line, line + "  # floatline: allow[fp16-without-clipping]")) == []
    assert codes(TRAINER.replace(line, "  # floatline: allow[FL304]\n" + line)) == []
    assert codes(TRAINER.replace(line, line + "  # floatline: allow[FL305]")) == ["FL304"]
    assert codes("# floatline: allow[*]\n\n" + TRAINER) == []


def test_the_device_decides_about_bf16_and_says_what_it_has():
    text = "per_device_train_batch_size: 8\nlearning_rate: 1\nbf16: true\n"
    assert codes(text) == [] and codes(text, on="h100") == []
    (finding,) = lint(text, on="t4")
    assert "emulated" in finding.seen and "tensor cores" in finding.seen and "FP16" in finding.advice
    (slow,) = lint(text, on="gtx 1080")
    assert "FP32" in slow.advice


def test_calls_are_resolved_by_imports_and_values_by_assignments():
    text = (
        "import torch\nfrom lightning import Trainer\nfrom mine import Trainer as Other\n"
        "mode = '16-true'\nTrainer(precision=mode, max_epochs=args.n, logger=False)\nOther(precision='16-true')\n"
    )
    (config,) = read_calls(Source(text)).configs
    assert config.mode == "fp16-true"
    assert config.get("max_epochs").value is UNKNOWN and config.get("logger").value is False
    assert read_calls(Source(text.replace("lightning", "mine"))).configs == ()


def test_a_model_counts_as_trained_only_where_a_trainer_gets_it():
    head = "import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
    load = "model = AutoModel.from_pretrained('m', dtype=torch.float16)\n"
    run = "Trainer(model=model, args=TrainingArguments('o', fp16=True))\n"
    assert codes(head + load + run, "a.py") == ["FL301"]
    assert codes(head + load.replace("\n", ".to('cuda')\n") + run, "a.py") == ["FL301"]
    assert codes(head + load + "TrainingArguments('o', fp16=True)\n", "a.py") == []
    assert codes(head + load.replace("\n", ".to(torch.bfloat16)\n") + run, "a.py") == []
    assert codes(head + load + "model.float()\n" + run, "a.py") == []
    assert codes(head + load + "if wide:\n    model = other()\n" + run, "a.py") == []


def test_every_finding_names_a_line_of_its_file():
    for rule in CONFIG_RULES:
        for bad in read_examples(rule.bad):
            for one in lint_text(bad.source, bad.file, rules=[rule], on=find_hardware(bad.on) if bad.on else None):
                lines = bad.source.split("\n")
                assert one.text == lines[one.line - 1].strip() != ""
                assert 1 <= one.column < one.end_column <= len(lines[one.end_line - 1]) + 1 or one.end_line > one.line
