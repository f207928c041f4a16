"""The files of a target: its own, and what it imports from the project."""

import pytest

from floatline.validation.study.code_files import changed_file, command_code, target_code


@pytest.fixture
def project(tmp_path, monkeypatch):
    files = {
        "train.py": "import torch, model\nfrom parts import head\n\ndef build():\n    from parts.deep import late\n",
        "model.py": "import os\nimport model  # itself\n",
        "parts/__init__.py": "",
        "parts/head.py": "from . import neck\nfrom .deep.late import x\n",
        "parts/neck.py": "",
        "parts/deep/__init__.py": "",
        "parts/deep/late.py": "from .. import head\nx = 1\n",
        "unused.py": "",
        ".venv/lib/site-packages/torch.py": "",
        "broken.py": "def (",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


OWN = {
    "model.py",
    "parts/__init__.py",
    "parts/deep/__init__.py",
    "parts/deep/late.py",
    "parts/head.py",
    "parts/neck.py",
    "train.py",
}


@pytest.mark.parametrize("target", ["train.py", "train.py:build", "train", "train:build"])
def test_a_target_is_its_file_and_what_that_imports(project, target):
    assert set(target_code(target, project)) == OWN


def test_a_target_that_is_no_file_has_no_code(project):
    assert target_code("no_such_module:build", project) == {}
    assert target_code("no such thing at all", project) == {}


def test_a_file_that_is_not_python_is_hashed_all_the_same(project):
    assert set(target_code("broken.py", project)) == {"broken.py"}


def test_a_command_is_its_words_that_are_files(project):
    assert set(command_code("python train.py --config unused.py seed={seed}", project, project)) == OWN | {"unused.py"}
    assert command_code("python 'open quote", project, project) == {}


def test_a_change_in_any_file_is_seen(project):
    code = target_code("train.py", project)
    assert changed_file(code, project) == ""
    (project / "parts" / "neck.py").write_text("x = 2\n")
    assert changed_file(code, project) == "parts/neck.py was changed"
    (project / "model.py").unlink()
    assert changed_file(code, project) == "model.py is gone"
