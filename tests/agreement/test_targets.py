"""`floatline parity`: targets, plans, files of log-probs, exit codes, JSON and the page."""

import json
from types import SimpleNamespace

import pytest
import torch
from tests.slow import slow
from typer.testing import CliRunner

from floatline.agreement import compare_logprobs
from floatline.agreement.targets import give_weights, open_target
from floatline.cli.main import app
from floatline.errors import FloatlineError, ParityError
from floatline.plans import Plan

PAIR = "examples/two_attentions.py"


def run(*words: str):
    return CliRunner().invoke(app, ["parity", *words])


@slow
def test_two_targets_that_agree_exit_with_0_and_a_wrong_mask_with_1(tmp_path):
    found = run(f"{PAIR}:kernel", f"{PAIR}:off_by_one", "--forward-only", "--out", str(tmp_path), "--format", "json")
    data = json.loads(found.stdout)
    assert found.exit_code == 1, found.output
    assert (data["verdict"], data["side"], data["entry"]["module"]) == ("other-function", "B", "2.attention")
    page = (tmp_path / "report.html").read_text()
    assert "OTHER FUNCTION" in page
    assert "<svg" in page
    assert "2.attention" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "parity.json").read_text())["verdict"] == "other-function"
    found = run(f"{PAIR}:kernel", f"{PAIR}:written_out", "--forward-only")
    assert (found.exit_code, found.stdout.split()[0]) == (0, "AGREE")


@slow
def test_one_target_in_two_plans_is_what_its_formats_explain():
    found = run("examples/small_gpt.py", "examples/small_gpt.py", "--plan-a", "fp32", "--plan-b", "bf16-mixed")
    assert found.exit_code == 0, found.output
    assert "as its formats explain" in found.stdout


@slow
def test_a_target_and_what_torch_compile_makes_of_it(tmp_path):
    options = ["--compiled", "--backend", "aot_eager", "--plan-a", "fp32", "--out", str(tmp_path)]
    found = run(f"{PAIR}:kernel", *options)
    assert found.exit_code == 0, found.output
    assert not (tmp_path / "reproducer").exists()


def test_a_target_and_a_file_of_log_probs(tmp_path):
    file = tmp_path / "rollout.jsonl"
    file.write_text('{"tokens": [1, 2, 3], "logprobs": [-4.1, -30.0]}\n')
    found = run(f"{PAIR}:kernel", str(file), "--out", str(tmp_path / "out"), "--band", "0.5", "2")
    assert found.exit_code == 1, found.output
    assert "outside [0.5, 2]" in found.stdout
    assert "FP32 head" in (tmp_path / "out" / "report.html").read_text()
    file.write_text("no")
    with pytest.raises(ParityError, match="Line 1"):
        CliRunner().invoke(app, ["parity", f"{PAIR}:kernel", str(file)], catch_exceptions=False)


def test_wrong_use_gets_one_line():
    assert run(f"{PAIR}:kernel").exit_code == 2
    assert run(f"{PAIR}:kernel", f"{PAIR}:kernel", "--compiled").exit_code == 2
    with pytest.raises(ParityError, match="has no batch 7, but 1"):
        open_target(f"{PAIR}:kernel", batch=7)
    with pytest.raises(ParityError, match="Only A has '0.weight'"):
        give_weights(open_target(f"{PAIR}:kernel"), open_target("examples/small_gpt.py"))
    with pytest.raises(FloatlineError):
        open_target("no/such.py")


def test_b_gets_the_weights_of_a():
    ours, theirs = open_target(f"{PAIR}:kernel", seed=1), open_target(f"{PAIR}:kernel", seed=2)
    name = "2.attention.qkv.weight"
    assert (ours.model.state_dict()[name] != theirs.model.state_dict()[name]).any()
    give_weights(ours, theirs)
    assert (ours.model.state_dict()[name] == theirs.model.state_dict()[name]).all()


FUNCTIONS = """
import torch


def inputs(seed=0):
    torch.manual_seed(seed)
    return torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32, 8, dtype=torch.bfloat16)


def once(x, w):
    return x @ w


def other(x, w):
    return x @ w + 0.01


class Layer(torch.nn.Module):
    def forward(self, x, w):
        return x @ w


layer = Layer()
"""


def test_plain_functions_of_a_file_are_compared_on_its_inputs(tmp_path):
    file = tmp_path / "products.py"
    file.write_text(FUNCTIONS)
    assert run(f"{file}:once", f"{file}:layer").exit_code == 0
    found = run(f"{file}:once", f"{file}:other", "--format", "json")
    data = json.loads(found.stdout)
    assert (found.exit_code, data["verdict"], data["side"]) == (1, "other-function", "B")
    assert data["entry"]["file"] == str(file)
    refused = run(f"{file}:once", f"{file}:other", "--plan-a", "fp32")
    assert (refused.exit_code, "Functions run as they are" in refused.output) == (2, True)


def test_the_remedy_that_helps_most_is_handed_to_validate(tmp_path):
    from floatline.cli.parity import say_validation

    target = open_target(f"{PAIR}:kernel")
    file = tmp_path / "rollout.jsonl"
    lines = []
    with torch.no_grad():
        for row in target.given.args[0]:
            logits = target.model.half().bfloat16()(row[None, :-1]).float()
            lines.append(json.dumps({"tokens": row.tolist(), "logprobs": _pick(logits, row)}))
    file.write_text("\n".join(lines) + "\n")
    found = compare_logprobs(target.model.half(), file)
    assert {one.name for one in found.remedies if one.plan is not None} >= {"FP16 scoring", "FP32 head", "FP32 scoring"}
    head = next(one for one in found.remedies if one.name == "FP32 head")
    assert [kept.pattern for kept in head.plan.fp32_modules] == ["4"]
    (tmp_path / "out").mkdir()
    for one in found.remedies:
        chosen = SimpleNamespace(best=one)
        said = say_validation(chosen, "net.py", str(tmp_path / "out"))
        assert said.startswith("floatline validate net.py --plan") == (one.plan is not None)
    assert Plan.load(tmp_path / "out" / "plan.yaml").fp32_modules


def _pick(logits, row):
    return logits[0].log_softmax(-1).gather(-1, row[1:, None])[:, 0].tolist()
