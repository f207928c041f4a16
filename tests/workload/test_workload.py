"""Workloads and targets: what is accepted, and one line for what is not."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from floatline.errors import TargetError
from floatline.workload import Workload, load_target
from floatline.workload.target import split_settings

BUILD = """
import torch
from torch import nn

def build({signature}):
    model = nn.Linear(4, 2)
    batches = [((torch.randn(3, 4),), (torch.zeros(3, 2),))]
    return model, batches, nn.functional.mse_loss, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), 0.1)
"""


def write(folder: Path, text: str, name: str = "target.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def refusal(text: str, *, build: bool = True) -> str:
    with pytest.raises(TargetError) as caught:
        target = load_target(text)
        if build:
            target.build()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parts(**changes: object) -> dict[str, object]:
    return {
        "model": nn.Linear(4, 2),
        "batches": [((torch.randn(3, 4),), (torch.zeros(3, 2),))],
        "loss_fn": nn.functional.mse_loss,
        "precision": "fp16-mixed",
        "make_optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1),
        **changes,
    }


# --- what works ---


@pytest.mark.parametrize("signature", ["", "seed=0", "seed", "seed, extra=1", "**options"])
def test_build_may_take_a_seed_or_not(tmp_path: Path, signature: str):
    workload = load_target(write(tmp_path, BUILD.format(signature=signature))).build(3)
    assert isinstance(workload, Workload)
    inputs, targets = workload.batches[0]
    assert workload.compute_loss(inputs, targets).ndim == 0


def test_the_same_seed_builds_the_same_weights(tmp_path: Path):
    target = load_target(write(tmp_path, BUILD.format(signature="")))
    first, again, other = (target.build(seed).model.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)  # pyright: ignore[reportArgumentType]
    assert not torch.equal(first, other)  # pyright: ignore[reportArgumentType]


def test_build_may_return_a_workload(tmp_path: Path):
    text = BUILD.format(signature="").replace(
        "return model", "from floatline.workload import Workload\n    return Workload(model"
    )
    text = text.replace("0.1)\n", "0.1), evaluate=lambda m: 1.5)\n")
    workload = load_target(write(tmp_path, text)).build()
    assert workload.evaluate and workload.evaluate(workload.model) == 1.5


def test_a_module_and_a_name_in_it_are_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "some_package_xyz"
    package.mkdir()
    (package / "__init__.py").touch()
    write(package, BUILD.format(signature="") + "\nfixed = build\n", "inner.py")
    monkeypatch.chdir(tmp_path)
    for text in ("some_package_xyz.inner", "some_package_xyz.inner:fixed"):
        assert load_target(text).build().precision == "fp16-mixed"
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("text", "target", "pairs"),
    [
        ("conditioned:broken learning_rate=0.1 passes=2", "conditioned:broken", ["learning_rate=0.1", "passes=2"]),
        ("conditioned 'data_file=my data.npz'", "conditioned", ["data_file=my data.npz"]),
        ("my net.py", "my net.py", []),
        ("it's here.py", "it's here.py", []),
        ("a=b.py", "a=b.py", []),
    ],
)
def test_settings_may_stand_behind_a_target(text: str, target: str, pairs: list[str]):
    assert split_settings(text) == (target, pairs)


def test_a_file_whose_name_looks_like_settings_is_a_file(tmp_path: Path):
    path = write(tmp_path, BUILD.format(signature=""), name="net lr=1.py")
    assert load_target(path).build().precision == "fp16-mixed"


def test_settings_behind_the_name_of_a_workload_reach_it():
    settings = load_target("conditioned learning_rate=0.25", pairs=["layers=1"]).build().settings
    assert (settings["learning_rate"], settings["layers"]) == (0.25, 1)


def test_a_file_may_be_followed_by_a_name(tmp_path: Path):
    path = write(tmp_path, BUILD.format(signature="").replace("def build", "def broken"))
    assert load_target(path + ":broken").build().precision == "fp16-mixed"
    assert "neither build() nor train()" in refusal(path) and "diagnose -- python" in refusal(path)


def test_a_target_may_import_its_neighbours_also_while_it_builds(tmp_path: Path):
    write(tmp_path, "WIDTH = 4\n", "neighbour_abc.py")
    text = "from neighbour_abc import WIDTH\n" + BUILD.format(signature="")
    text = text.replace(
        "    model = ", "    import neighbour_abc as late\n    assert late.WIDTH == WIDTH\n    model = "
    )
    before = list(sys.path)
    load_target(write(tmp_path, text)).build()
    assert sys.path == before


def test_dataclasses_and_pickle_find_the_module_of_a_target(tmp_path: Path):
    text = """
    from __future__ import annotations
    import pickle
    from dataclasses import dataclass

    @dataclass
    class Config:
        width: int = 4

    assert pickle.loads(pickle.dumps(Config(5))) == Config(5)
    """
    load_target(write(tmp_path, textwrap.dedent(text) + BUILD.format(signature=""), "055-odd name.py"))


def test_a_target_named_like_a_library_does_not_hide_it(tmp_path: Path):
    load_target(write(tmp_path, BUILD.format(signature=""), "json.py"))
    import json

    assert "target" not in json.__name__ and hasattr(json, "dumps")


def test_a_training_function_is_recognised(tmp_path: Path):
    target = load_target(write(tmp_path, "def train(steps=1):\n    return steps\n"))
    assert target.builder is None
    assert target.trainer and target.trainer(2) == 2
    with pytest.raises(TargetError, match=r"has only train\(\). Add build\(\)"):
        target.build()


# --- what does not ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere.py", ["'nowhere.py' does not exist", "Use FILE.py, package.module or package.module:name"]),
        ("some/folder/nowhere.py:build", ["does not exist"]),
        ("dbnet_no_such_module", ["is not a file or a module", "Use FILE.py"]),
        ("no.such.module:build", ["is not a file or a module"]),
        ("json.no_such_part", ["is not a file or a module"]),
        ("what is this?", ["is not a file or a module"]),
        ("", ["is not a file or a module"]),
        ("json", ["neither build() nor train()"]),
        ("json:nothing", ["no function 'nothing'"]),
    ],
)
def test_a_target_that_is_not_there(text: str, said: list[str]):
    message = refusal(text)
    assert all(part in message for part in said), message


def test_a_folder_or_another_file_is_no_target(tmp_path: Path):
    assert "is a folder" in refusal(str(tmp_path))
    assert "is not a Python file" in refusal(write(tmp_path, "", "plan.yaml"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import no_such_library_xyz\ndef build(): ...\n",
            "importing it failed: ModuleNotFoundError: No module named 'no_such_library_xyz' at target.py:1",
        ),
        ("x = 1 / 0\ndef build(): ...\n", "importing it failed: ZeroDivisionError: division by zero at target.py:1"),
        ("x = 1\ndef build(:\n", "is not Python: SyntaxError: invalid syntax at target.py:2. Fix that line."),
        ("def build():\n    return '\0'\n", "is not Python: SyntaxError"),
        ("import sys\nsys.exit(3)\ndef build(): ...\n", "importing it failed: SystemExit: 3 at target.py:2"),
        ("def build():\n    raise ValueError('two\\nlines')\n", "build() failed: ValueError: two at target.py:2"),
        ("def build(path, other):\n    pass\n", "has a build() that needs path, other, so it was not run"),
        ("def build():\n    return 1, 2\n", "returned a tuple of 2. It must return a Workload or the tuple (model,"),
        ("def build():\n    return None\n", "returned a NoneType"),
        ("build = 3\n", "neither build() nor train(), so it was not run."),
        ("build = abs(3)\n", "neither build() nor train()."),
    ],
)
def test_a_target_that_fails_says_so_in_one_line(tmp_path: Path, code: str, said: str):
    assert said in refusal(write(tmp_path, code))


# What is a target, or may be one: `touch` before it shows that it was imported.
MAYBE_TARGETS = [
    "def train(steps=1): ...",
    "async def build(): ...",
    "class build: ...",
    "build = make()",
    "build: object = make()",
    "first = build = make()",
    "build, other = make(), 1",
    "(build := make())",
    "from shutil import copy as build",
    "from shutil import *",
    "if True:\n    def build(): ...",
    "try:\n    from nowhere_qqq import build\nexcept ImportError:\n    build = make()",
    "with open(__file__):\n    def build(): ...",
    "for _ in range(1):\n    def build(): ...",
    "if __name__ == '__main__':\n    print(1)\nelse:\n    def build(): ...",
    "def build(): ...\nif __name__ == '__main__':\n    build()",
    "def __getattr__(name):\n    return make",
    "def put():\n    global build\n    build = make()",
]
# A plain script, whatever it calls its data.
NO_TARGETS = [
    "",
    "def rebuild(): ...",
    "train = True",
    "train: str = 'data'",
    "train, test = [1, 2], [3]",
    "build = [make() for _ in range(2)]",
    "for train, test in ((1, 2),):\n    pass",
    "def main():\n    train = make()",
    "class Trainer:\n    def train(self): ...",
    "print(lambda: (build := 1))",
    "if __name__ == '__main__':\n    train = make()",
    "import train.data as data_qqq",
]
PLAIN = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\ndef make(): return make\n"


@pytest.mark.parametrize("code", MAYBE_TARGETS)
def test_what_may_be_a_target_is_imported(tmp_path: Path, code: str):
    with contextlib.suppress(TargetError):
        load_target(write(tmp_path, PLAIN + code, "maybe_qqq.py"))
    assert (tmp_path / "maybe_qqq.ran").exists()


@pytest.mark.parametrize("code", NO_TARGETS)
def test_a_plain_script_is_not_run_and_the_command_for_it_is_named(tmp_path: Path, code: str):
    path = write(tmp_path, PLAIN + code, "a script_qqq.py")
    said = refusal(path)
    assert "has neither build() nor train(), so it was not run." in said
    assert said.endswith(f"floatline diagnose -- python '{path}'")
    assert not (tmp_path / "a script_qqq.ran").exists()


def test_a_function_that_is_not_there_is_told_without_running_the_file(tmp_path: Path):
    path = write(tmp_path, PLAIN + "def build(): ...\n", "named_qqq.py")
    assert "there is no function 'fixed'" in refusal(f"{path}:fixed")
    assert not (tmp_path / "named_qqq.ran").exists()
    refusal(f"{path}:build")
    assert (tmp_path / "named_qqq.ran").exists()


def test_a_plain_module_is_not_imported_nor_the_package_it_lies_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "package_qqq" / "part"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        write(folder, PLAIN, "__init__.py")
    write(package, PLAIN, "plain.py")
    write(package, PLAIN + BUILD.format(signature=""), "target.py")
    monkeypatch.chdir(tmp_path)
    said = refusal("package_qqq.part.plain")
    assert said.endswith("floatline diagnose -- python -m package_qqq.part.plain")
    assert "neither build() nor train(), so it was not run." in refusal("package_qqq.part")
    assert [path.name for path in tmp_path.rglob("*.ran")] == []
    assert load_target("package_qqq.part.target").build().precision == "fp16-mixed"
    assert sorted(path.name for path in tmp_path.rglob("*.ran")) == ["__init__.ran", "__init__.ran", "target.ran"]


def test_a_failed_import_leaves_no_module_behind(tmp_path: Path):
    refusal(write(tmp_path, "1 / 0\ndef build(): ...\n", "leftover_qqq.py"))
    assert not any("leftover_qqq" in name for name in sys.modules)


def test_a_named_function_that_takes_steps_is_a_training_function(tmp_path: Path):
    path = write(tmp_path, BUILD.format(signature="") + "\ndef fixed(steps=1, probe=None):\n    return steps\n")
    target = load_target(f"{path}:fixed")
    assert target.builder is None
    assert target.trainer and target.trainer(steps=3) == 3
    assert load_target(f"{path}:build").trainer is None


def test_a_process_that_the_target_starts_finds_its_functions(tmp_path: Path):
    code = """
    import multiprocessing

    def answer(results):
        results.put(42)

    def train(steps=1):
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        process = context.Process(target=answer, args=(results,))
        process.start()
        process.join()
        return results.get(timeout=250) if process.exitcode == 0 else None
    """
    target = load_target(write(tmp_path, textwrap.dedent(code), "starts_a_process_qqq.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(target.folder))
        assert target.trainer and target.trainer() == 42


def test_two_targets_of_one_file_name_do_not_replace_each_other(tmp_path: Path):
    paths = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths.append(write(folder, f"def train(steps=1):\n    return {number}\n", "twice_qqq.py"))
    modules = {load_target(path).trainer.__module__ for path in paths}
    assert len(modules) == 2
    assert sys.modules["twice_qqq"].train() == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": lambda x: x}, "model is a function. It must be a torch.nn.Module"),
        ({"batches": []}, "batches is a list of 0"),
        ({"batches": iter([1])}, "batches is a list_iterator"),
        ({"batches": [torch.zeros(2)]}, r"batches\[0\] is a Tensor. It must be a pair"),
        ({"batches": [(1, 2, 3)]}, r"batches\[0\] is a tuple of 3"),
        ({"batches": [(torch.zeros(2), (1,))]}, r"inputs of batches\[0\] is a Tensor. It must be a tuple"),
        ({"batches": [((1,), torch.zeros(2))]}, r"targets of batches\[0\] is a Tensor"),
        ({"loss_fn": None}, "loss_fn is a NoneType. It must be callable"),
        ({"make_optimizer": "adam"}, "make_optimizer is a str. It must be callable"),
        ({"precision": "fp17"}, "precision: Plan 'fp17' is not known"),
    ],
)
def test_a_workload_of_wrong_parts_is_refused(changes: dict[str, object], said: str):
    with pytest.raises(TargetError, match=said):
        Workload(**parts(**changes))  # pyright: ignore[reportArgumentType]


def test_a_workload_of_right_parts_is_not():
    assert Workload(**parts()).evaluate is None  # pyright: ignore[reportArgumentType]
