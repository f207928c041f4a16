"""Other modules of the linted tree: their constants and the schedulers of their classes count."""

import pytest

from floatline.lint.paths import lint_paths
from floatline.lint.reading.neighbours import LintedTree
from floatline.lint.settings import Settings

CONSTANTS = "NEG_INF: float = -1e9  # for masks\nEPS = 1e-8\nTWO = 1.0\nTWO = 2.0\nLOW = make()\nif x:\n    IN = 1.0\n"
ATTEND = "import torch\n{line}\n\n\ndef attend(q, k, mask):\n    return torch.matmul(q, k).masked_fill(mask, {name})\n"
BASE = """import torch
from torch.optim.lr_scheduler import OneCycleLR


class Base:
    def __init__(self, model):
        self.opt = torch.optim.SGD(model.parameters(), lr=0.1)
        self.rate = OneCycleLR(self.opt, 0.1, total_steps=100)
"""
TRAINER = """import torch
from .base import Base


class Trainer(Base):
    def train(self, loader):
        for x, y in loader:
            self.opt.zero_grad()
            with torch.autocast("cuda"):
                loss = self.model(x, y)
            self.amp.scale(loss).backward()
            self.amp.step(self.opt)
            self.amp.update()
            self.rate.step()
"""
LOADS = """import torch
from transformers import AutoModelForCausalLM, AutoProcessor


def load(path):
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float16)
    model.gradient_checkpointing_enable()
    return model, processor
"""
TRAINS = """from transformers import Trainer, TrainingArguments
from model_configs import load as load_model

model, processor = load_model("m")
settings = {"fp16": False, "gradient_checkpointing": True}
Trainer(model=model, args=TrainingArguments("out", **settings)).train()
"""


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def codes(*paths, select=()):
    result = lint_paths(paths, settings=Settings(select=select), jobs=1)
    return [one.rule.code for one in result.findings]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from .constants import NEG_INF", "NEG_INF"),
        ("from .constants import NEG_INF as LOWEST", "LOWEST"),
        ("from . import constants", "constants.NEG_INF"),
        ("from pkg.constants import NEG_INF", "NEG_INF"),
        ("from pkg import constants as c", "c.NEG_INF"),
    ],
)
def test_a_constant_of_another_module_counts(tmp_path, line, name):
    write(tmp_path, {"pkg/constants.py": CONSTANTS, "pkg/attend.py": ATTEND.format(line=line, name=name)})
    assert codes(tmp_path) == ["FL105"]
    assert codes(tmp_path / "pkg" / "attend.py") == []  # the twin: the other file is not linted
    (tmp_path / "pkg" / "constants.py").write_text("NEG_INF = -1e4\n")
    assert codes(tmp_path) == []


def test_a_parameter_or_an_assignment_of_the_same_name_hides_it(tmp_path):
    text = ATTEND.format(line="from .constants import NEG_INF", name="NEG_INF")
    write(tmp_path, {"constants.py": CONSTANTS, "attend.py": text.replace("q, k, mask):", "q, k, mask, NEG_INF):")})
    assert codes(tmp_path) == []
    write(tmp_path, {"attend.py": text.replace("\n\n\ndef", "\nNEG_INF = -1e4\n\n\ndef")})
    assert codes(tmp_path) == []
    write(tmp_path, {"attend.py": text})
    assert codes(tmp_path) == ["FL105"]


def test_only_numbers_that_are_given_once_at_the_top_are_known(tmp_path):
    file = str(tmp_path / "constants.py")
    write(tmp_path, {"constants.py": CONSTANTS})
    found = LintedTree([file])
    numbers = {
        name: found.find_number(str(tmp_path / "a.py"), ".constants", name) for name in ("EPS", "TWO", "LOW", "IN")
    }
    assert numbers == {"EPS": 1e-8, "TWO": None, "LOW": None, "IN": None}


def test_a_scheduler_of_a_base_in_another_file_is_one(tmp_path):
    write(tmp_path, {"base.py": BASE, "trainer.py": TRAINER})
    assert codes(tmp_path, select=("FL206",)) == ["FL206"]
    write(tmp_path, {"base.py": BASE.replace("OneCycleLR(self.opt", "Meter(self.opt")})
    assert codes(tmp_path, select=("FL206",)) == []
    write(tmp_path, {"base.py": BASE.replace("class Base", "class Other")})
    assert codes(tmp_path, select=("FL206",)) == []


def test_several_processes_find_the_same(tmp_path):
    write(tmp_path, {"constants.py": CONSTANTS, "base.py": BASE, "trainer.py": TRAINER})
    write(tmp_path, {"attend.py": ATTEND.format(line="from .constants import NEG_INF", name="NEG_INF")})
    results = [lint_paths([tmp_path], jobs=jobs).findings for jobs in (1, 2)]
    assert results[0] == results[1]
    assert {one.rule.code for one in results[0]} == {"FL105", "FL206"}


def test_what_is_left_after_a_fix_still_sees_the_tree(tmp_path):
    text = ATTEND.format(line="from .constants import NEG_INF", name="NEG_INF")
    other = "\n\ndef loss(logits):\n    return -torch.log(torch.sigmoid(logits)).mean()\n"
    write(tmp_path, {"constants.py": CONSTANTS, "attend.py": text + other})
    result = lint_paths([tmp_path], fix=True, jobs=1)
    assert [one.rule.code for one in result.fixed] == ["FL102"]
    assert [one.rule.code for one in result.findings] == ["FL105"]


# --- models that a function of another file loads ------------------------------------------------------


@pytest.mark.parametrize(("fp16", "code"), [("False", "FL311"), ("True", "FL301")])
def test_a_model_that_another_file_loads_in_fp16_is_trained_in_fp16(tmp_path, fp16, code):
    write(tmp_path, {"src/model_configs.py": LOADS, "src/train.py": TRAINS.replace("False", fp16)})
    (found,) = lint_paths([tmp_path], jobs=1).findings
    assert (found.rule.code, found.line, found.text) == (code, 4, 'model, processor = load_model("m")')
    assert not found.fix
    assert codes(tmp_path / "src" / "train.py") == []  # the twin: the other file is not linted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.float16", "torch.float32"),
        ("torch.float16", "dtype"),  # whoever calls it decides
        ("return model, processor", "return processor, model"),
        ("return model, processor", "return wrap(model), processor"),
        ("    return model", "    if path:\n        return None, None\n    return model"),
        ("    model.gradient", "    model = model.float()\n    model.gradient"),
        ("    model.gradient", "    model = get_peft_model(model, lora)\n    model.gradient"),
        ("def load(", "def load_it("),
        ("def load(", "def load(:"),
    ],
)
def test_a_model_that_may_be_another_one_is_left_alone(tmp_path, old, new):
    assert old in LOADS
    write(tmp_path, {"model_configs.py": LOADS.replace(old, new), "train.py": TRAINS})
    assert [one for one in codes(tmp_path) if one != "FL001"] == []


def test_a_model_that_this_file_changes_is_left_alone(tmp_path):
    write(tmp_path, {"model_configs.py": LOADS, "train.py": TRAINS})
    assert codes(tmp_path) == ["FL311"]
    write(tmp_path, {"train.py": TRAINS.replace("settings =", "model = wrap(model)\nsettings =")})
    assert codes(tmp_path) == []
    write(tmp_path, {"train.py": TRAINS.replace("settings =", "model.requires_grad_(False)\nsettings =")})
    assert codes(tmp_path) == []


def test_one_model_alone_is_followed_as_well(tmp_path):
    alone = {
        "model_configs.py": LOADS.replace("return model, processor", "return model"),
        "train.py": TRAINS.replace("model, processor =", "model ="),
    }
    write(tmp_path, alone)
    assert codes(tmp_path) == ["FL311"]
    write(tmp_path, {"model_configs.py": LOADS})  # what it gives now is a tuple
    assert codes(tmp_path) == []
