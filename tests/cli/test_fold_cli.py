"""`floatline fold` and `floatline fit`: what they print, and with which exit code."""

import json

import pytest
from tests.integrations.test_checkpoint_folders import save
from typer.testing import CliRunner

from floatline.cli.main import app

pytest.importorskip("transformers")


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text("[[1, 5, 9, 2, 30]]")
    return str(path)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_fold_writes_a_checkpoint_and_says_what_it_did(tmp_path, tokens):
    folder, out = save(tmp_path / "model"), tmp_path / "out"
    done = run("fold", folder, "--tokens", tokens, "--out", out, "--format", "json")
    said = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (said["verdict"], said["read_back_difference"]) == ("folded", 0.0)
    assert (out / "model.safetensors").is_file()
    assert said["proof"]["fp16_before"] == "Infinity"
    again = run("fold", out, "--tokens", tokens, "--out", tmp_path / "more")
    assert again.exit_code == 0
    assert "fits FP16 as it is" in again.stdout
    assert not (tmp_path / "more").exists()


def test_fold_refuses_a_folder_that_exists(tmp_path, tokens):
    assert run("fold", tmp_path, "--tokens", tokens, "--out", tmp_path).exit_code == 2


def test_fold_ends_with_1_where_something_stands_in_the_way(tmp_path, tokens):
    folder = save(tmp_path / "model", large="model.layers.1.mlp.gate_proj.weight", planted=False)
    done = run("fold", folder, "--tokens", tokens, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "in the way: mm in model.layers.1.mlp.gate_proj" in done.stdout
    assert "cannot be scaled: silu in model.layers.1.mlp.act_fn" in " ".join(done.stdout.split())


def test_fit_prints_a_row_for_each_checkpoint(tmp_path, tokens):
    save(tmp_path / "all" / "planted")
    save(tmp_path / "all" / "plain", planted=False)
    done = run("fit", tmp_path / "all", "--tokens", tokens, "--log", tmp_path / "fit.json")
    assert done.exit_code == 0, done.output
    assert "plain" in done.stdout
    assert "as it is" in done.stdout
    assert "after folding by 2^-3" in " ".join(done.stdout.split())
    told = run("fit", tmp_path / "all", "--tokens", tokens, "--log", tmp_path / "fit.json", "--format", "json")
    assert [row["verdict"] for row in json.loads(told.stdout)["checkpoints"]] == ["as it is", "after folding"]


def test_fit_ends_with_1_where_a_checkpoint_cannot_be_tried(tmp_path, tokens):
    folder = save(tmp_path / "all" / "broken")
    (folder / "config.json").write_text("{}")
    done = run("fit", tmp_path / "all", "--tokens", tokens, "--log", tmp_path / "fit.json")
    assert done.exit_code == 1
    assert "cannot be tried" in done.stdout
