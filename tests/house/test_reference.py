"""Reference workloads are targets by name: variants, presets, files and pairs of settings, kept for a resume."""

import json
from pathlib import Path

import pytest
import yaml
from tests.slow import slow

from floatline.errors import GuardError, TargetError
from floatline.training.trainer import Trainer
from floatline.workload import load_target
from floatline.workload.config import merge, parse_pairs
from floatline.workload.target import find_reference, reference_names

TINY = ("width=8", "heads=1", "layers=1", "num_batches=4", "batch_size=4", "held_out=8", "length=4")


def settings_of(*args, **kwargs) -> dict:
    return find_reference(*args, **kwargs).config.model_dump()


def test_the_reference_workloads_are_found_by_name():
    assert {"conditioned", "distill", "mmgcn"} <= set(reference_names())
    assert find_reference("examples/small_gpt.py") is None
    assert find_reference("conditioned.py") is None  # a file of the user's own


def test_a_variant_a_preset_a_file_and_pairs_win_in_this_order(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("width: 24\nheads: 3\n")
    assert settings_of("conditioned")["mask"] == "lowest"
    assert settings_of("conditioned:broken")["mask"] == "constant"
    assert settings_of("conditioned:broken", preset="fixed")["mask"] == "lowest"
    assert settings_of("conditioned", preset="h200", config=file)["width"] == 24
    found = settings_of("conditioned", preset="h200", config=file, pairs=["width=12", "learning_rate=1e-4"])
    assert (found["width"], found["heads"], found["learning_rate"]) == (12, 3, 1e-4)


def test_pairs_reach_inside_and_are_read_as_yaml_reads_them():
    assert parse_pairs(["a.b=1", "a.c=true", "d=text"]) == {"a": {"b": 1, "c": True}, "d": "text"}
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}


BAD = {
    "variant": (["conditioned:brokn"], {}, "no variant 'brokn'. Did you mean 'broken'?"),
    "preset": (["conditioned"], {"preset": "huge"}, "no variant 'huge'"),
    "key": (["conditioned"], {"pairs": ["widht=3"]}, "Setting 'widht' is not known. Did you mean 'width'?"),
    "value": (["conditioned"], {"pairs": ["width=wide"]}, "Setting 'width' is 'wide'"),
    "nonsense": (["conditioned"], {"pairs": ["width"]}, "'width' is not key=value"),
    "yaml": (["conditioned"], {"pairs": ["width=[1"]}, "the value cannot be read"),
    "file": (["conditioned"], {"config": "no/such.yaml"}, "Config 'no/such.yaml' does not exist"),
    "other": (["examples/small_gpt.py"], {"pairs": ["width=3"]}, "takes no settings, but width=3 was given"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_settings_get_one_line(name):
    args, kwargs, said = BAD[name]
    with pytest.raises(TargetError) as caught:
        load_target(*args, **kwargs)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_workload_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("workload: distill\n")
    with pytest.raises(TargetError, match="is of workload 'distill', not 'conditioned'"):
        load_target("conditioned", config=tmp_path / "config.yaml")


def train(folder: Path, *pairs: str, resume: bool = False, **options):
    workload = load_target("conditioned", pairs=[*TINY, *pairs]).build(0)
    return Trainer(workload, folder=folder, steps=options.pop("steps", 12), resume=resume, **options).run()


def test_a_run_keeps_its_settings_and_goes_on_with_no_others(tmp_path):
    train(tmp_path / "run", steps=4)
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (kept["workload"], kept["width"]) == ("conditioned", 8)
    assert train(tmp_path / "run", resume=True, steps=6).attempted == 6
    with pytest.raises(GuardError, match=r"has learning_rate [\d.]+, which is not the 0.1 given now"):
        train(tmp_path / "run", "learning_rate=0.1", resume=True, steps=8)


@slow
def test_the_best_of_the_evaluations_is_kept_and_survives_a_resume(tmp_path):
    whole = train(tmp_path / "whole", evaluate_every=2)
    train(tmp_path / "parts", evaluate_every=2, steps=6)
    parts = train(tmp_path / "parts", evaluate_every=2, resume=True)
    assert whole.best is not None
    assert parts.best == whole.best
    kept = [place.name for place in (tmp_path / "parts" / "best").glob("checkpoint-*")]
    assert kept == [f"checkpoint-{whole.best.step:08}"]
    told = [json.loads(line) for part in sorted((tmp_path / "whole").glob("*.jsonl")) for line in part.open()]
    values = [record["values"]["metric"] for record in told if record.get("event") == "evaluation"]
    assert len(values) == 6
    assert min(values) == pytest.approx(whole.best.metric)


def test_without_evaluations_there_is_no_best(tmp_path):
    assert train(tmp_path / "run", steps=2).best is None
    assert not (tmp_path / "run" / "best").exists()


def test_every_epoch_has_its_account(tmp_path):
    result = train(tmp_path / "run", steps=10)  # 4 batches an epoch
    assert [(number, account.attempted) for number, account in result.epochs] == [(0, 4), (1, 4), (2, 2)]
    assert sum(account.num_overflows for _, account in result.epochs) == result.skipped["overflow"]
