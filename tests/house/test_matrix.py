"""The matrix of versions: its rows, the tests that it names, and the table that it writes."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import matrix

    return matrix


def test_every_torch_is_run_on_every_python_that_is_declared(matrix):
    declared = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "Python :: 3." in line]
    assert [line.split(" :: ")[-1].strip('",') for line in declared] == list(matrix.PYTHONS)
    plain = [(row.python, row.torch) for row in matrix.rows() if row.what in ("core", "quick")]
    assert sorted(plain) == sorted((python, torch) for python in matrix.PYTHONS for torch in matrix.TORCHES)


def test_the_oldest_versions_are_those_that_are_declared(matrix):
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={matrix.TORCHES[0].removesuffix(".0")}"' in text
    assert f'requires-python = ">={matrix.PYTHONS[0]}"' in text
    for pin in matrix.pinned("oldest"):
        name, _, version = pin.partition("==")
        name, version = name.removeprefix("pytorch-"), version.removesuffix(".0")
        assert f'"{name}>={version}"' in text, pin


def test_every_test_that_it_names_is_there(matrix):
    for row in matrix.rows():
        for name in row.tests():
            file, _, test = name.removeprefix("--deselect=").partition("::")
            assert (ROOT / file).is_file(), name
            assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text() or not test, name


def test_a_row_is_written_in_its_place_and_replaces_an_older_one(matrix, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{matrix.HEAD}\nafter\n")
    monkeypatch.setattr(matrix, "PAGE", page)
    late, early = matrix.Row("3.13", "2.13.0"), matrix.Row("3.10", "2.6.0")
    matrix.write(late, ("1", "0", "0"))
    matrix.write(early, ("2", "0", "0"))
    matrix.write(late, ("3", "1", "0"))
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    assert [line.split("|")[1:6] for line in lines if line.startswith("| 3")] == [
        [" 3.10 ", " 2.6.0 ", " core ", " 2 ", " 0 "],
        [" 3.13 ", " 2.13.0 ", " core ", " 3 ", " 1 "],
    ]
