"""The audio_lora workload: speech, features, masks, training in every precision, what breaks and what it loses."""

import math
from pathlib import Path

import pytest
import torch
from tests.slow import slow

from floatline.diagnosis.target_diagnosis import diagnose
from floatline.errors import GuardError, TargetError
from floatline.probe.runs.runs import run_target
from floatline.probe.steps.other_precision import as_fp32
from floatline.probe.watch.steps import share_of_dead_moments
from floatline.training.trainer import Trainer
from floatline.workload import load_target

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("espeakng_loader", reason="espeakng_loader is not installed")

from floatline.systems.audio_lora import VARIANTS, Config, build  # noqa: E402
from floatline.systems.audio_lora.batches import (  # noqa: E402
    IGNORED,
    AudioCollator,
    add_noise,
    log_mel,
    make_examples,
    num_audio_tokens,
)
from floatline.systems.audio_lora.model import BASE_WEIGHTS, build_base, is_exact  # noqa: E402
from floatline.systems.audio_lora.speech import (  # noqa: E402
    BASE_WORDS,
    HELD_OUT_VOICES,
    TRAIN_VOICES,
    WORDS,
    Utterance,
    draw_utterances,
    speak,
)
from floatline.systems.audio_lora.tokens import spell  # noqa: E402

BASELINE = 1 / len(WORDS)
QUICK = {"num_batches": 16, "learning_rate": 8e-3}  # enough to learn


@pytest.fixture(scope="module")
def workload():
    return build(Config(**QUICK))


def test_the_same_list_is_spoken_with_the_same_bits_whatever_came_before():
    asked = tuple(Utterance(word, voice, 180, 50) for word in ("seven", "go") for voice in ("m1", "f2", "zac"))
    first = speak(asked)
    speak((Utterance("water", "f3", 170, 40),))
    speak.cache_clear()
    again = speak(asked)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert len({piece.numpy().tobytes() for piece in first}) == len(asked)
    assert all(0.1 < len(piece) / 16_000 < 0.8 for piece in first)


def test_speech_that_cannot_be_made_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("espeakng_loader.get_data_path", lambda: str(tmp_path / "nothing"))
    with pytest.raises(TargetError, match="No speech was made: .*Install espeakng-loader again"):
        speak((Utterance("one", "m1", 181, 50),))


def test_every_voice_is_one_that_espeak_has():
    import espeakng_loader

    have = {path.name for path in (Path(espeakng_loader.get_data_path()) / "voices" / "!v").iterdir()}
    assert {*TRAIN_VOICES, *HELD_OUT_VOICES} <= have  # it takes an unknown one for its usual voice, and says nothing
    assert "nobody" not in have


def test_held_out_voices_are_never_trained_on_nor_were_the_words_by_the_base():
    assert not set(TRAIN_VOICES) & set(HELD_OUT_VOICES)
    assert not set(WORDS) & set(BASE_WORDS)


def test_the_data_are_those_of_their_seed():
    one, two = (draw_utterances(WORDS, TRAIN_VOICES, takes=1, seed=seed) for seed in (0, 1))
    assert one == draw_utterances(WORDS, TRAIN_VOICES, takes=1, seed=0)
    assert one != two
    assert len(one) == len(WORDS) * len(TRAIN_VOICES)


def test_features_are_those_of_whispers_extractor():
    samples = torch.sin(torch.arange(32_000) * 0.05) * torch.linspace(0, 0.5, 32_000)
    theirs = transformers.WhisperFeatureExtractor(feature_size=40, chunk_length=2)
    wanted = torch.as_tensor(theirs(samples.numpy(), sampling_rate=16_000)["input_features"][0])
    torch.testing.assert_close(log_mel(samples, bins=40), wanted, atol=1e-4, rtol=0)
    assert not torch.allclose(log_mel(samples * 0.5, bins=40), wanted, atol=1e-2)


def test_noise_has_the_power_that_was_asked_for():
    samples = torch.sin(torch.arange(50_000) * 0.1)
    noise = add_noise(samples, 20.0, torch.Generator().manual_seed(0)) - samples
    assert 10 * math.log10(samples.square().mean() / noise.square().mean()) == pytest.approx(20, abs=0.1)


def test_the_collator_pads_masks_and_labels_only_the_answer():
    tokens = spell()
    short = {"features": torch.rand(40, 21), "word": "go"}
    long = {"features": torch.rand(40, 90), "word": "seven"}
    batch = AudioCollator(tokens, positions=32)([short, long])
    assert batch["input_features"].shape == (2, 40, 64)
    assert batch["feature_attention_mask"].sum(1).tolist() == [21, 64]  # the longer one is cut
    assert (batch["input_ids"] == tokens.audio).sum(1).tolist() == [num_audio_tokens(21), num_audio_tokens(64)]
    said = batch["labels"] != IGNORED
    assert said.sum(1).tolist() == [3, 6]  # the letters and the end
    assert tokens.decode(batch["input_ids"][1][said[1]].tolist()) == "seven"
    assert torch.equal(batch["labels"][said], batch["input_ids"][said])
    assert batch["attention_mask"].sum(1).tolist() == [num_audio_tokens(n) + 1 + k for n, k in ((21, 3), (64, 6))]


def test_what_is_padded_does_not_reach_the_answer():
    base, tokens = build_base(Config(base_weights="fp32"))
    base.eval()
    collate = AudioCollator(tokens, positions=32)
    asked = tuple(Utterance(word, "m1", 180, 50) for word in ("go", "seven"))
    one, two = make_examples(asked, bins=40, seed=None, noise_db=0)
    with torch.no_grad():
        alone = base(**collate([one])).logits
        together = base(**collate([one, two])).logits[:1, : alone.shape[1]]
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@slow
def test_one_pass_tells_what_greedy_decoding_writes(workload):
    base, tokens = build_base(Config(base_weights="fp32"))
    base.eval()
    collate = AudioCollator(tokens, positions=32)
    asked = tuple(Utterance(word, "m1", 180, 50) for word in ("house", "water", "seven", "two"))
    found = []
    for example in make_examples(asked, bins=40, seed=None, noise_db=0):
        batch = collate([example])
        with torch.no_grad():
            exact = is_exact(base(**batch).logits.argmax(-1), batch["labels"])
        question = {name: value for name, value in batch.items() if name != "labels"}
        length = int((batch["labels"][0] == IGNORED).sum())
        for name in ("input_ids", "attention_mask"):
            question[name] = question[name][:, :length]
        written = base.generate(**question, max_new_tokens=8, do_sample=False)[0, length:].tolist()
        answer = batch["labels"][0, length:].tolist()
        assert bool(exact) == (written[: len(answer)] == answer)
        found.append(bool(exact))
    assert set(found) == {True, False}  # the base knows 'house' and 'water', and not the words of the task


@slow
def test_the_base_is_frozen_in_half_and_the_adapters_are_fp32(workload):
    trained = [p for p in workload.model.parameters() if p.requires_grad]
    frozen = [p for p in workload.model.parameters() if not p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert {p.dtype for p in frozen} == {torch.float16}
    assert workload.model.network.is_gradient_checkpointing


@slow
def test_seeds_share_base_and_words_and_differ_in_adapters_and_noise():
    one, two, again = (build(Config(num_batches=2), seed=seed) for seed in (0, 1, 0))
    weights = [dict(each.model.named_parameters()) for each in (one, two, again)]
    frozen = [name for name, p in weights[0].items() if not p.requires_grad]
    first = next(name for name in weights[0] if "lora_A" in name)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in frozen)
    assert not torch.equal(weights[0][first], weights[1][first])
    assert torch.equal(weights[0][first], weights[2][first])
    assert not torch.equal(one.batches[0][0][2], two.batches[0][0][2])
    assert torch.equal(one.batches[0][0][2], again.batches[0][0][2])


def test_shipped_weights_are_the_same_when_a_diagnosis_builds_in_fp32(workload):
    with as_fp32():
        built = build(Config(num_batches=1))
    name = next(name for name, p in workload.model.named_parameters() if not p.requires_grad)
    assert torch.equal(built.model.get_parameter(name), workload.model.get_parameter(name).float())


@slow
@pytest.mark.parametrize(
    ("variant", "plan"),
    [("fp32_adapters", "fp32"), ("fp32_adapters", "fp16-mixed"), ("native_fp16", None), ("bf16", None)],
)
def test_it_learns_in_every_precision(variant, plan):
    result = Trainer(build(Config(**QUICK, **VARIANTS[variant])), plan=plan, folder=None, steps=16).run()
    assert result.applied >= 14
    assert result.metric > 2 * BASELINE


def test_the_base_alone_does_not_know_the_words(workload):
    fresh = build(Config(num_batches=1))
    assert fresh.evaluate(fresh.model.float().eval()) <= BASELINE


@slow
def test_fp16_adapters_under_a_loss_scaler_raise_and_are_named():
    found = diagnose("audio_lora:broken", steps=2)
    assert (found.verdict, found.primary.cause.id) == ("precision", "fp16-params-with-scaler")
    assert found.primary.op == "torch.amp.GradScaler.unscale_"
    assert found.primary.file.endswith("audio_lora/model.py")  # the line that asks PEFT, not PEFT's own
    assert "lora_A" in found.primary.module
    assert found.primary.seen.startswith("28 trainable parameters are float16")
    failure = run_target(load_target("audio_lora:broken"), steps=1).exception
    assert failure.message == "Attempting to unscale FP16 gradients."


def test_the_trainer_casts_fp16_adapters_to_what_the_plan_says():
    workload = build(Config(**VARIANTS["broken"], num_batches=2))
    assert {p.dtype for p in workload.model.parameters()} == {torch.float16}
    result = Trainer(workload, folder=None, steps=2).run(evaluate=False)
    assert result.applied == 2
    assert {p.dtype for p in workload.model.parameters() if p.requires_grad} == {torch.float32}


@slow
def test_half_adapters_without_a_master_are_refused_in_one_line():
    with pytest.raises(
        GuardError, match=r"rounds small updates of 16-bit weights to nothing. Use floatline.optim.AdamW"
    ):
        Trainer(load_target("audio_lora:no_scaler").build(), folder=None, steps=1)


@pytest.mark.parametrize(
    ("dtype", "gradient", "dead"), [(torch.float16, 1e-3, 1.0), (torch.float16, 0.1, 0.0), (torch.float32, 1e-3, 0.0)]
)
def test_fused_adamw_keeps_no_second_moment_of_small_gradients_in_half(dtype, gradient, dead):
    weight = torch.nn.Parameter(torch.full((8,), 0.1, dtype=dtype))
    optimizer, steps = torch.optim.AdamW([weight], lr=5e-3, weight_decay=0, fused=True), []
    for _ in range(9):
        before, weight.grad = weight.detach().clone(), torch.full_like(weight, gradient)
        optimizer.step()
        steps.append(float((weight.detach() - before).abs().max()))
    assert share_of_dead_moments(optimizer) == dead
    assert steps[-1] / steps[0] == pytest.approx(3 if dead else 1, rel=0.1)  # the root of the number of steps


def test_a_missing_speaker_is_one_line(monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.startswith("floatline.systems.audio_lora")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(
        TargetError, match=r"needs espeakng_loader. Install it with: pip install 'floatline\[workloads\]'"
    ):
        load_target("audio_lora")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base_path": "no/such"}, r"has no \.safetensors file"),
        ({"rank": 0}, "rank"),
        ({"takes": 0}, "takes"),
    ],
)
def test_wrong_settings_say_what_to_do(settings, says):
    with pytest.raises(TargetError, match=says):
        build(Config(**settings))


def test_the_shipped_file_is_small():
    assert BASE_WEIGHTS.stat().st_size < 1_000_000
