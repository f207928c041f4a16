"""audio_lora on own recordings and a base of one's own: wav and flac at any rate, shards, and what is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.slow import slow

from floatline.errors import TargetError
from floatline.training.trainer import Trainer
from floatline.workload import OnDemand

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("espeakng_loader", reason="espeakng_loader is not installed")

from floatline.systems.audio_lora import Config, build  # noqa: E402
from floatline.systems.audio_lora import __main__ as command  # noqa: E402
from floatline.systems.audio_lora.hf import train  # noqa: E402
from floatline.systems.audio_lora.model import build_base, make_model  # noqa: E402
from floatline.systems.audio_lora.recordings import read_samples, resample_recording  # noqa: E402
from floatline.systems.audio_lora.speech import Utterance, speak  # noqa: E402
from floatline.systems.audio_lora.tokens import read_tokens  # noqa: E402

WORDS = ("go", "no", "up", "stop", "yes", "two")


def sine(rate: int, frequency: float, seconds: float = 1.01) -> torch.Tensor:
    time = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    return torch.sin(2 * math.pi * frequency * time + 0.3)


@pytest.mark.parametrize("rate", [8000, 11025, 16001, 22050, 44100, 48000, 96000])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.88])
def test_a_sine_comes_out_of_resampling_as_the_same_sine(rate: int, share: float) -> None:
    frequency = share * min(rate, 16_000) / 2
    found = resample_recording(sine(rate, frequency).float(), rate)
    wanted = sine(16_000, frequency, len(found) / 16_000)
    assert len(found) == pytest.approx(1.01 * 16_000, abs=1)
    assert float((found - wanted).abs()[320:-320].max()) < 1e-4
    other = sine(16_000, frequency * 1.001, len(found) / 16_000)
    assert float((found - other).abs()[320:-320].max()) > 1e-3


@pytest.mark.parametrize("frequency", [8001.0, 9000.0, 20_000.0])
def test_what_16_khz_cannot_hold_is_gone(frequency: float) -> None:
    found = resample_recording(sine(48_000, frequency).float(), 48_000)
    assert float(found[320:-320].abs().max()) < 1e-4
    folded = sine(48_000, frequency)[::3]  # what leaving out samples does
    assert float(folded.abs().max()) > 0.5


@pytest.fixture
def sound():
    return pytest.importorskip("soundfile", reason="soundfile is not installed")


def save_recordings(folder: Path, sound, *, voices=("m1", "f2", "m3", "f4")) -> list[Path]:
    """Words of several voices: wav and flac, at several rates, with one channel and with two."""
    folder.mkdir(parents=True)
    utterances = tuple(Utterance(word, voice, 220, 50) for voice in voices for word in WORDS)
    kinds = [(".wav", 16_000, 1), (".flac", 48_000, 2), (".wav", 8000, 1), (".flac", 44_100, 1)]
    paths = []
    for number, (utterance, samples) in enumerate(zip(utterances, speak(utterances), strict=True)):
        suffix, rate, channels = kinds[number % len(kinds)]
        count = round(len(samples) * rate / 16_000)
        spectrum = torch.zeros(count // 2 + 1, dtype=torch.complex64)
        own = torch.fft.rfft(samples)[: len(spectrum)]
        spectrum[: len(own)] = own
        heard = torch.fft.irfft(spectrum, n=count) * (count / len(samples))
        paths.append(folder / f"{number:03d}_{utterance.word}{suffix}")
        sound.write(str(paths[-1]), heard.clamp(-1, 1).repeat(channels, 1).T.numpy(), rate)
        paths[-1].with_suffix(".txt").write_text(f"{utterance.word}\n")
    return paths


@slow
def test_a_folder_of_wav_and_flac_trains(tmp_path: Path, sound) -> None:
    save_recordings(tmp_path / "own", sound)
    config = Config(audio=str(tmp_path / "own"), batch_size=4, holdout=0.25, learning_rate=8e-3)
    workload = build(config)
    assert isinstance(workload.batches, OnDemand) and len(workload.batches) == 18 // 4
    (ids, _, features, mask), _ = workload.batches[0]
    assert features.shape == (4, 40, 64) and 0 < int(mask.sum(1).min()) <= 64 and len(ids) == 4
    result = Trainer(workload, folder=None, steps=8).run()
    assert result.applied >= 7 and result.metric is not None
    assert result.last_loss is not None and result.first_loss is not None
    assert result.last_loss < 0.8 * result.first_loss


def test_all_rates_and_channels_sound_the_same(tmp_path: Path, sound) -> None:
    wanted = sine(16_000, 440.0).float() * 0.5
    for rate in (8000, 44_100):
        one = sine(rate, 440.0).float() * 0.5
        for suffix, channels in ((".wav", 1), (".flac", 2)):
            path = tmp_path / f"{rate}{suffix}"
            sound.write(str(path), one.repeat(channels, 1).T.numpy(), rate)
            found = read_samples(path)
            size = min(len(found), len(wanted))
            assert float((found - wanted[:size])[320 : size - 320].abs().max()) < 2e-4  # 16 bits of the file


@pytest.mark.parametrize("name", ["metadata.jsonl", "own.jsonl"])
def test_lines_of_json_say_what_is_said_and_what_is_held_out(tmp_path: Path, sound, name: str) -> None:
    paths = save_recordings(tmp_path / "own", sound, voices=("m1", "f2"))
    keys = ("file_name", "transcription") if name == "metadata.jsonl" else ("audio", "text")
    rows = [
        {keys[0]: path.name, keys[1]: path.stem[4:], "split": "test" if i % 3 == 0 else "train"}
        for i, path in enumerate(paths)
    ]
    (tmp_path / "own" / name).write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    for path in paths:
        path.with_suffix(".txt").unlink()
    place = tmp_path / "own" if name == "metadata.jsonl" else tmp_path / "own" / name
    workload = build(Config(audio=str(place), batch_size=8))
    assert len(workload.batches) == 1
    asked = int((workload.batches[0][1][0] != -100).sum())
    assert asked == sum(len(row[keys[1]]) + 1 for row in rows if row["split"] == "train")


def damage(paths: list[Path], sound, how: str) -> None:
    first, text = paths[0], paths[0].with_suffix(".txt")
    if how == "no text":
        text.unlink()
    elif how == "empty text":
        text.write_text(" \n")
    elif how == "no letters":
        text.write_text("go, go")
    elif how == "no sound":
        first.write_bytes(b"RIFF nothing")
    elif how == "empty":
        sound.write(str(first), torch.zeros(0).numpy(), 16_000)
    elif how == "long":
        sound.write(str(first), torch.zeros(80_000).numpy(), 16_000)
    elif how == "line":
        (first.parent / "metadata.jsonl").write_text('{"file_name": "a.wav"}\n')
    elif how == "gone":
        (first.parent / "metadata.jsonl").write_text('{"file_name": "a.wav", "text": "go"}\n')
    else:
        for path in first.parent.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no text", "go.wav' has no text"),
        ("empty text", "go.wav' has an empty text"),
        ("no letters", "has ',': the shipped base writes a to z"),
        ("no sound", "go.wav' cannot be read"),
        ("empty", "go.wav' is empty"),
        ("long", "go.wav' lasts 5.00 s, and the base hears 0.64 s"),
        ("line", "metadata.jsonl, line 1: '"),
        ("gone", "a.wav' does not exist"),
        ("nothing", "has no recordings (.wav"),
    ],
)
def test_bad_recordings_are_one_line(tmp_path: Path, sound, how: str, said: str) -> None:
    paths = save_recordings(tmp_path / "own", sound, voices=("m1",))
    damage(paths, sound, how)
    with pytest.raises(TargetError) as error:
        build(Config(audio=str(tmp_path / "own"), batch_size=2))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_long_recording_is_cut_where_that_is_asked_for(tmp_path: Path, sound) -> None:
    damage(save_recordings(tmp_path / "own", sound, voices=("m1",)), sound, "long")
    workload = build(Config(audio=str(tmp_path / "own"), batch_size=5, cut_audio=True, holdout=0.2))
    assert int(workload.batches[0][0][3].sum(1).max()) == 64


def test_recordings_without_soundfile_are_one_line(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    (tmp_path / "a.txt").write_text("go")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(TargetError, match=r"need soundfile.*pip install 'floatline\[workloads\]'"):
        build(Config(audio=str(tmp_path)))


@slow
def test_the_teams_command_runs_with_gpus_0_and_says_where_there_is_none(monkeypatch, capsys, tmp_path: Path) -> None:
    team = [
        "--config",
        "paper_r64",
        "--gpus",
        "0",
        "--batch-size",
        "8",
        "--gradient-accumulation",
        "8",
        "--epochs",
        "3",
    ]
    monkeypatch.setattr(
        sys, "argv", ["audio_lora", *team, "--max-steps", "1", "--output", str(tmp_path), "num_batches=8"]
    )
    command.main()
    said = capsys.readouterr()
    assert "1 attempted, 1 applied" in said.out
    if not torch.cuda.is_available():
        assert "there is no GPU 0 here; it trains on the CPU" in said.err


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@slow
def test_checkpoints_lie_on_the_way_and_a_run_goes_on_from_one(tmp_path: Path) -> None:
    config = Config(batch_size=4, num_batches=4)
    train(config, tmp_path / "whole", max_steps=4, save_steps=2)
    assert {path.name for path in (tmp_path / "whole").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    (tmp_path / "again").mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "again" / "checkpoint-2")
    train(config, tmp_path / "again", max_steps=4, save_steps=2, resume=True)
    whole, again, fresh = (adapters(tmp_path / name) for name in ("whole", "again", "again/checkpoint-2"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not all(torch.equal(whole[name], fresh[name]) for name in whole)
    with pytest.raises(TargetError, match="no checkpoint to go on from"):
        train(config, tmp_path / "nothing", max_steps=4, resume=True)


BIG = Config(
    base="random", mel_bins=40, audio_positions=32, audio_width=256, audio_layers=4, text_width=1024, text_layers=12,
    text_heads=8, audio_heads=8, vocabulary=32,
)  # fmt: skip

# The memory that loading takes at most, in a process of its own: what is no file's, looked at every millisecond.
MEASURE = """
import sys, threading, time
import torch
from floatline.systems.audio_lora import Config
from floatline.systems.audio_lora.model import build_base, _load

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

most, done = [0], []
def watch():
    while not done:
        most[0] = max(most[0], anonymous())
        time.sleep(0.001)

before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
if sys.argv[2] == "streamed":
    model, _ = build_base(Config(base_path=sys.argv[1]))
else:  # as it was: FP32 first
    model = _load(sys.argv[1], torch.float32)
    for weight in model.parameters():
        weight.data = weight.data.half()
done.append(1)
thread.join()
size = sum(p.numel() * p.element_size() for p in model.parameters())
print((most[0] - before) / size, size, {p.dtype for p in model.parameters()} == {torch.float16})
"""


def save_sharded(folder: Path) -> None:
    torch.manual_seed(0)
    make_model(BIG).to(torch.bfloat16).save_pretrained(folder, max_shard_size="40MB")
    assert (folder / "model.safetensors.index.json").is_file() and len(list(folder.glob("model-*.safetensors"))) > 4


@slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read memory from")
def test_a_sharded_base_is_loaded_without_a_second_copy(tmp_path: Path) -> None:
    save_sharded(tmp_path / "base")
    ratios = {}
    for how in ("streamed", "FP32 first"):
        ran = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path / "base"), how], capture_output=True, text=True, check=True
        )
        ratio, size, half = ran.stdout.split()[-3:]
        assert half == "True" and int(size) > 250e6
        ratios[how] = float(ratio)
    assert ratios["streamed"] < 1.5
    assert ratios["FP32 first"] > 1.8


@slow
def test_a_sharded_base_has_the_weights_that_were_saved_and_is_not_copied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = make_model(Config()).half()
    saved.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 1
    config = Config(base_path=str(tmp_path / "base"), num_batches=1, batch_size=4)
    loaded, _ = build_base(config)
    theirs = dict(saved.named_parameters())
    assert all(torch.equal(p, theirs[name]) and p.dtype == torch.float16 for name, p in loaded.named_parameters())
    assert {b.dtype for name, b in loaded.named_buffers() if "inv_freq" in name} == {torch.float32}
    train(config, tmp_path / "out", max_steps=1)
    assert not (tmp_path / "out" / "base").exists()
    kept = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert kept["base_model_name_or_path"] == str(tmp_path / "base")


def test_a_shard_that_is_missing_is_one_line(tmp_path: Path) -> None:
    make_model(Config()).half().save_pretrained(tmp_path / "base", max_shard_size="100KB")
    sorted((tmp_path / "base").glob("model-*.safetensors"))[0].unlink()
    with pytest.raises(TargetError, match="cannot be loaded") as error:
        build_base(Config(base_path=str(tmp_path / "base")))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_damaged_tokenizer_is_one_line_with_its_file(tmp_path: Path) -> None:
    model = make_model(Config())
    assert read_tokens(str(tmp_path / "none"), model.config, question="").encode("a")  # without a file it spells
    (tmp_path / "tokenizer.json").write_text('{"version"')
    with pytest.raises(TargetError, match=r"base_path: '.*tokenizer\.json' is no tokenizer: ") as error:
        read_tokens(str(tmp_path), model.config, question="")
    assert "\n" not in str(error.value)
