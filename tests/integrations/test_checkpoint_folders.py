"""Checkpoints of transformers in folders: loaded, folded, written as safetensors, read back; and fitted, resumably."""

import json

import pytest
import torch
from tests.slow import slow

from floatline.errors import FoldError
from floatline.folding.scale_fold import fold
from floatline.integrations.transformers import checkpoint_fits
from floatline.integrations.transformers.checkpoint_fits import fit_checkpoints
from floatline.integrations.transformers.checkpoint_folders import load_checkpoint, open_model, save_folded

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def save(folder, kind="Llama", *, planted=True, large=None, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | settings))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        if planted:
            model.get_input_embeddings().weight[1, 5] = 98304.0
        if large:
            model.get_parameter(large)[3] = 60000.0
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([[1, 5, 9, 2, 30], [1, 7, 8, 3]]))
    return path


def logits(folder, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 5, 9, 2]])).logits


@pytest.mark.parametrize("kind", ["Llama", pytest.param("Qwen3", marks=pytest.mark.slow)])
def test_a_folded_checkpoint_is_loaded_by_transformers_and_computes_the_same_bit_for_bit(kind, tmp_path, tokens):
    checkpoint = load_checkpoint(save(tmp_path / "model", kind), tokens)
    found = fold(checkpoint.model, checkpoint.inputs, shared_eps=checkpoint.eps)
    assert found.verdict == "folded"
    assert save_folded(checkpoint, found, tmp_path / "out") == 0.0
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "model"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rms_norm_eps"] == checkpoint.model.config.rms_norm_eps * 2.0**-6
    assert config["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "fold.json").read_text())["verdict"] == "folded"


def test_a_model_comes_with_the_dtype_that_its_checkpoint_has_unless_another_is_asked_for(tmp_path, tokens):
    folder = save(tmp_path / "model")
    model, inputs = open_model(folder, tokens)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert inputs["input_ids"].tolist() == [[1, 5, 9, 2], [1, 7, 8, 3]]
    wide, _ = open_model(folder, tokens, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_code_of_a_folder_is_not_run(tmp_path, tokens):
    folder = save(tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": ["Evil"]}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(FoldError, match="has no model 'Evil'"):
        open_model(folder, tokens)
    assert not (tmp_path / "ran").exists()


def test_code_and_pickles_of_a_folder_are_left_behind(tmp_path, tokens):
    folder = save(tmp_path / "model")
    for name in ("modeling.py", "pytorch_model.bin", "tokenizer.json", "notes.md", "old.safetensors.index.json"):
        (folder / name).write_text("{}")
    checkpoint = load_checkpoint(folder, tokens)
    save_folded(checkpoint, fold(checkpoint.model, checkpoint.inputs, shared_eps=checkpoint.eps), tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    known = {"config.json", "fold.json", "generation_config.json", "model.safetensors"}
    assert written == {*known, "tokenizer.json", "notes.md"}


@pytest.mark.slow
def test_a_folded_checkpoint_generates_the_same_tokens(tmp_path, tokens):
    checkpoint = load_checkpoint(save(tmp_path / "model"), tokens)
    found = fold(checkpoint.model, checkpoint.inputs, shared_eps=checkpoint.eps)
    save_folded(checkpoint, found, tmp_path / "out")
    written = []
    for folder in (tmp_path / "model", tmp_path / "out"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        written.append(model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=12, do_sample=False, eos_token_id=None))
    assert torch.equal(*written)
    assert written[0].shape == (1, 15)


def test_what_is_read_back_otherwise_is_not_written(tmp_path, tokens):
    checkpoint = load_checkpoint(save(tmp_path / "model"), tokens)
    found = fold(checkpoint.model, checkpoint.inputs, shared_eps=checkpoint.eps)
    with torch.no_grad():
        found.model.model.layers[1].mlp.down_proj.weight.mul_(2.0)
    with pytest.raises(FoldError, match="What transformers reads back is .* apart from .* so nothing was written"):
        save_folded(checkpoint, found, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tokens.json"}


@slow
def test_epsilons_of_one_setting_stay_equal(tmp_path, tokens):
    checkpoint = load_checkpoint(save(tmp_path / "model", "Qwen3"), tokens)
    assert set(checkpoint.eps.values()) == {("rms_norm_eps",)}
    found = fold(checkpoint.model, checkpoint.inputs, shared_eps=checkpoint.eps)
    assert set(found.rewrite.eps.values()) == {-6}
    assert found.rewrite.weights["model.layers.0.self_attn.q_proj.weight"] == -3  # q_norm has the same epsilon
    alone = fold(checkpoint.model, checkpoint.inputs)
    assert "model.layers.0.self_attn.q_proj.weight" not in alone.rewrite.weights


def test_an_epsilon_that_is_in_no_setting_stands_in_the_way(tmp_path, tokens):
    checkpoint = load_checkpoint(save(tmp_path / "model"), tokens)
    found = fold(checkpoint.model, checkpoint.inputs, shared_eps={})
    assert found.verdict == "in the way"
    assert "stands in no setting of the config" in found.obstacles[0].why


@pytest.mark.slow
def test_an_untied_head_is_written_and_read_back(tmp_path, tokens):
    checkpoint = load_checkpoint(save(tmp_path / "model", tie_word_embeddings=True), tokens)
    found = fold(checkpoint.model, checkpoint.inputs, shared_eps=checkpoint.eps, untie=True)
    assert found.untied == ("lm_head.weight",)
    assert save_folded(checkpoint, found, tmp_path / "out") == 0.0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


BAD = {
    "no config": (lambda folder, _: (folder / "config.json").unlink(), "has no config.json"),
    "no weights": (lambda folder, _: (folder / "model.safetensors").unlink(), "has no .safetensors file"),
    "broken weights": (lambda folder, _: (folder / "model.safetensors").write_bytes(b"x"), "cannot be loaded"),
    "no architecture": (lambda folder, _: (folder / "config.json").write_text("{}"), "names no architecture"),
    "code of its own": (
        lambda folder, _: (folder / "config.json").write_text('{"architectures": ["MyModel"]}'),
        "has no model 'MyModel'. Its code is not run from the folder.",
    ),
    "no model": (
        lambda folder, _: (folder / "config.json").write_text('{"architectures": ["logging"]}'),
        "has no model 'logging'",
    ),
    "empty tokens": (lambda _, tokens: tokens.write_text("[[]]"), "are empty"),
    "no list": (lambda _, tokens: tokens.write_text('{"a": 1}'), "are no JSON list of whole numbers"),
    "no numbers": (lambda _, tokens: tokens.write_text("[[true]]"), "are no JSON list of whole numbers"),
    "unknown token": (lambda _, tokens: tokens.write_text("[32]"), "hold 32, but the model has ids from 0 to 31"),
    "no tokens": (lambda _, tokens: tokens.unlink(), "cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_gets_one_line(name, tmp_path, tokens):
    folder = save(tmp_path / "model")
    spoil, said = BAD[name]
    spoil(folder, tokens)
    with pytest.raises(FoldError) as caught:
        load_checkpoint(folder, tokens)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_text_needs_a_tokenizer(tmp_path):
    folder = save(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("some words " * 4)
    with pytest.raises(FoldError, match="has no tokenizer.json"):
        load_checkpoint(folder, text)
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"some": 1, "words": 2, "[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load_checkpoint(folder, text).inputs["input_ids"].tolist() == [[1, 2] * 4]


def test_a_folder_that_exists_is_not_written_over(tmp_path, tokens):
    checkpoint = load_checkpoint(save(tmp_path / "model"), tokens)
    found = fold(checkpoint.model, checkpoint.inputs, shared_eps=checkpoint.eps)
    with pytest.raises(FoldError, match="exists. Name a new folder"):
        save_folded(checkpoint, found, tmp_path / "model")


def test_rows_that_the_log_has_are_not_run_again(tmp_path, tokens, monkeypatch):
    save(tmp_path / "all" / "a")
    save(tmp_path / "all" / "b", planted=False)
    (tmp_path / "all" / "b" / "config.json").write_text("{}")
    options = {"margin": 4.0, "log": tmp_path / "fit.json", "progress": lambda _: None}
    rows = fit_checkpoints(tmp_path / "all", tokens, **options)
    assert [(row["checkpoint"], row["verdict"]) for row in rows] == [("a", "after folding"), ("b", "cannot be tried")]

    calls = []
    monkeypatch.setattr(checkpoint_fits, "_fit_one", lambda place, *_: calls.append(place.name) or {"verdict": "new"})
    assert fit_checkpoints(tmp_path / "all", tokens, **options) == rows
    assert calls == []
    save(tmp_path / "all" / "b", planted=False)
    assert [row["verdict"] for row in fit_checkpoints(tmp_path / "all", tokens, **options)] == ["after folding", "new"]
    assert calls == ["b"]
    fit_checkpoints(tmp_path / "all", tokens, **(options | {"margin": 8.0}))
    assert calls == ["b", "a", "b"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "floatline fit 1", "rows": 3}', '{"kind": "other"}'])
def test_another_file_is_no_log(text, tmp_path, tokens):
    save(tmp_path / "model")
    (tmp_path / "fit.json").write_text(text)
    with pytest.raises(FoldError, match="is no log of floatline fit"):
        fit_checkpoints(tmp_path, tokens, margin=4.0, log=tmp_path / "fit.json", progress=lambda _: None)


def test_a_folder_without_checkpoints_says_so(tmp_path, tokens):
    with pytest.raises(FoldError, match="holds no checkpoint"):
        fit_checkpoints(tmp_path, tokens, margin=4.0, log=tmp_path / "fit.json", progress=lambda _: None)
