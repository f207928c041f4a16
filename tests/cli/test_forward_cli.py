"""`floatline diagnose --forward`: exit codes, JSON, and wrong use in one line."""

import json

import pytest
from tests.slow import slow
from typer.testing import CliRunner

from floatline.cli.main import app

TARGETS = """
import torch
from torch import nn


def forward(seed):
    return nn.Linear(8, 8), torch.randn(4, 8)


def broken(seed):
    return (lambda x: x.exp().log()), 30 * torch.ones(4)
"""


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(TARGETS)
    return str(path)


def invoke(*words):
    return CliRunner().invoke(app, ["diagnose", "--forward", *words])


def test_a_healthy_pass_exits_with_0_and_shows_its_outputs(target):
    result = invoke(target)
    assert result.exit_code == 0
    assert result.stdout.startswith("healthy")
    assert "FP16, output" in result.stdout
    assert "times nearer to FP32 than BF16 here" in result.stdout


@slow
def test_a_broken_one_exits_with_1_and_its_json_is_one_object(target):
    result = invoke(f"{target}:broken", "--format", "json")
    assert result.exit_code == 1
    fields = json.loads(result.stdout)
    assert (fields["verdict"], fields["findings"][0]["cause"]) == ("precision", "exp-overflow")
    assert [row["arm"] for row in fields["outputs"]] == ["fp16", "bf16", "floor"]


def test_the_trace_is_kept_where_that_is_asked_for(target, tmp_path):
    assert invoke(target, "--trace", str(tmp_path / "pass.npz")).exit_code == 0
    assert (tmp_path / "pass.npz").stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs one thing to look at"),
        (["net.py", "--model", "here", "--tokens", "t"], "needs one thing to look at"),
        (["--model", "here"], "go together"),
        (["net.py", "--once"], "--forward looks at outputs"),
        (["--fix", "--model", "here", "--tokens", "t"], "--diff are for a target"),
        (["net.py", "--as", "cuda"], "--as is for a script"),
    ],
)
def test_wrong_use_is_told_and_exits_with_2(words, said):
    result = invoke(*words)
    assert result.exit_code == 2
    assert said in " ".join(f"{result.output} {result.exception}".replace("│", " ").split())


def test_a_model_without_forward_is_wrong_use_too():
    result = CliRunner().invoke(app, ["diagnose", "--model", "here"])
    assert result.exit_code == 2
    assert "Give --forward, too" in " ".join(f"{result.output} {result.exception}".replace("│", " ").split())


@slow
def test_a_model_directory_is_looked_at_on_the_tokens_of_a_file(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    (tmp_path / "tokens.json").write_text("[1, 2, 3, 4, 5]\n")
    result = invoke("--model", str(tmp_path / "model"), "--tokens", str(tmp_path / "tokens.json"), "--format", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["outputs"][0]["matches"][0]["name"] == "logits"
