"""A model directory and a file of tokens: read without running anything of theirs, or refused in one line."""

import json

import pytest
import torch

from floatline.errors import TargetError
from floatline.integrations.checkpoints import load_checkpoint, read_tokens

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    transformers.Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def test_a_checkpoint_comes_with_the_dtype_that_it_has(folder, tmp_path):
    file = tmp_path / "tokens.json"
    file.write_text("[[1, 2, 3], [4, 5, 6]]")
    model, inputs = load_checkpoint(folder, file)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert inputs["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("text", "rows"),
    [("[1, 2, 3]", [[1, 2, 3]]), ("1 2 3\n4 5 6 7\n", [[1, 2, 3], [4, 5, 6]]), ("[[9]]", [[9]])],
)
def test_tokens_are_json_or_a_prompt_a_line_cut_to_the_shortest(text, rows, tmp_path):
    file = tmp_path / "tokens"
    file.write_text(text)
    assert read_tokens(file).tolist() == rows


@pytest.mark.parametrize("text", ["", "[]", "[[]]", "{}", "some words", "[null]", "[[1], 2]", "[1.5, {}]"])
def test_what_holds_no_tokens_is_refused_in_one_line(text, tmp_path):
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(TargetError, match="hold no token ids") as refused:
        read_tokens(file)
    assert "\n" not in str(refused.value)


def test_ids_beyond_the_table_and_folders_without_a_model_are_refused(folder, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("[1, 77]")
    with pytest.raises(TargetError, match="ids from 1 to 77; the model has 0 to 49"):
        load_checkpoint(folder, file)
    with pytest.raises(TargetError, match=r"no config\.json"):
        load_checkpoint(tmp_path, file)
    with pytest.raises(TargetError, match="cannot be read"):
        load_checkpoint(folder, tmp_path / "none")


def test_code_of_the_folder_is_not_run(folder, tmp_path):
    evil = tmp_path / "evil"
    evil.mkdir()
    fields = json.loads((folder / "config.json").read_text()) | {
        "model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    }  # fmt: skip
    (evil / "config.json").write_text(json.dumps(fields))
    (evil / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    file = tmp_path / "tokens"
    file.write_text("[1]")
    with pytest.raises(TargetError, match="cannot be loaded"):
        load_checkpoint(evil, file)
    assert not (tmp_path / "ran").exists()
