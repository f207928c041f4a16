"""`floatline fold` and `floatline fit`: what they print, and with which exit code."""

import json

import pytest
from tests.integrations.test_checkpoint_folders import save
from tests.slow import slow
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


@slow
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


PLANTED = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, large):
        super().__init__()
        self.stem, self.block, self.norm, self.head = nn.Linear(8, 16), Block(), nn.LayerNorm(16), nn.Linear(16, 4)
        with torch.no_grad():
            self.stem.bias[3] = large

    def forward(self, x):
        return self.head(self.norm(self.block(self.stem(x))))


def forward(seed):
    return Net(98304.0), torch.randn(2, 5, 8)


def function(seed):
    return torch.sin, torch.randn(2)
"""


def test_fold_and_fit_take_the_model_and_the_inputs_of_a_target(tmp_path):
    target, out = tmp_path / "net.py", tmp_path / "out"
    target.write_text(PLANTED)
    done = run("fold", target, "--out", out)
    assert done.exit_code == 0, done.output
    assert "set those of fold.json in your code" in " ".join(done.stdout.split())
    assert (out / "model.safetensors").is_file()
    assert json.loads((out / "fold.json").read_text())["eps"]
    told = run("fit", target, "--format", "json")
    assert [row["verdict"] for row in json.loads(told.stdout)["checkpoints"]] == ["after folding"]


def test_a_checkpoint_that_takes_no_tokens_is_run_on_the_inputs_of_a_file(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    model.vit.embeddings.position_embeddings.data[0, 1, 3] = 98304.0
    model.save_pretrained(tmp_path / "all" / "vit")
    (tmp_path / "images.py").write_text(
        "import torch\n\n\ndef forward(seed):\n    return {'pixel_values': torch.randn(2, 3, 8, 8)}\n"
    )
    given = ("--inputs", tmp_path / "images.py")
    done = run("fold", tmp_path / "all" / "vit", *given, "--out", tmp_path / "out", "--format", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["read_back_difference"] == 0.0
    told = run("fit", tmp_path / "all", *given, "--log", tmp_path / "fit.json", "--format", "json")
    assert [row["verdict"] for row in json.loads(told.stdout)["checkpoints"]] == ["after folding"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["folder"], "give --tokens FILE, or --inputs FILE.py"),
        (["net.py", "--tokens", "t.json"], "a target has its own"),
        (["net.py:function"], "has no weights to fold"),
    ],
)
def test_wrong_use_of_inputs_is_told_in_a_line(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "net.py").write_text(PLANTED)
    done = run("fold", *words, "--out", tmp_path / "out")
    assert done.exit_code == 2 or done.exception is not None
    assert said in " ".join(f"{done.output} {done.exception}".replace("│", " ").split())
