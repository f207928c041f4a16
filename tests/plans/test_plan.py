"""Plans: what they hold, how they are read and written, and what is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from floatline.errors import PlanError
from floatline.formats import FP16
from floatline.plans import Clip, KeptFunction, KeptModule, Plan, Rewrite, Scaling
from floatline.plans.presets import ALIASES, PLANS, resolve_plan

MIXED = {"weights": "fp32", "compute": "fp16"}


def load(tmp_path: Path, text: str) -> Plan:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return Plan.load(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(PlanError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- the named plans ---


def test_the_named_plans_are_these():
    assert list(PLANS) == [
        *("fp32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true"),
        *("safe", "balanced", "ultra-conservative", "compact"),
    ]


def test_every_named_plan_says_why():
    for plan in PLANS.values():
        assert {"weights", "compute", "scaling"} <= set(plan.reasons), plan.name
        assert all(plan.reasons.values())
        if plan.clip:
            assert plan.reasons["clip"]


def test_only_plans_that_compute_in_fp16_scale_the_loss():
    for plan in PLANS.values():
        assert (plan.scaling is not None) == (plan.compute == "fp16"), plan.name


def test_scaling_starts_at_65536_and_has_a_floor_and_a_cap():
    assert Scaling().model_dump() == {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "floor": 1.0,
        "cap": 2.0**24,
        "hysteresis": 1,
    }


def test_the_number_in_the_reason_for_scaling_is_fp16s():
    assert "2.98e-08" in PLANS["fp16-mixed"].reasons["scaling"]
    assert f"{FP16.zero_at:.2e}" == "2.98e-08"


def test_safe_clips_at_5_by_norm_and_accumulates_2():
    safe = PLANS["safe"]
    assert safe.clip == Clip(max_norm=5.0, norm_type=2.0)
    assert safe.accumulate == 2
    assert (safe.weights, safe.compute) == ("fp32", "fp16")


def test_ultra_conservative_differs_from_balanced_in_more_than_its_name():
    calm, balanced = PLANS["ultra-conservative"], PLANS["balanced"]
    assert calm.clip == balanced.clip == Clip(max_norm=0.5)
    assert calm.scaling and balanced.scaling
    assert calm.scaling.growth_interval == 5 * balanced.scaling.growth_interval
    assert calm.accumulate > balanced.accumulate


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *((16, "fp16-mixed"), ("16-mixed", "fp16-mixed"), ("16-true", "fp16-true"), (32, "fp32")),
        *(("32-true", "fp32"), ("bf16", "bf16-mixed"), ("bf16-true", "bf16-true"), ("FP16-Mixed", "fp16-mixed")),
    ],
)
def test_lightnings_names_are_understood(name: str | int, plan: str):
    assert resolve_plan(name) == PLANS[plan]


def test_every_alias_leads_to_a_plan():
    assert set(ALIASES.values()) <= set(PLANS)


def test_fp64_is_refused_with_the_reference_to_use():
    with pytest.raises(PlanError, match=r"'64-true' is FP64.*Use 'fp32'"):
        resolve_plan("64-true")


def test_a_wrong_name_gets_the_nearest_plans():
    with pytest.raises(PlanError, match=r"'fp16-mixd' is not known. Did you mean 'fp16-mixed'"):
        resolve_plan("fp16-mixd")


def test_a_plan_is_its_own_resolution():
    plan = Plan(weights="fp32", compute="bf16")
    assert resolve_plan(plan) is plan


def test_changing_a_resolved_plan_does_not_change_the_named_one():
    resolve_plan("fp32").reasons["weights"] = "gone"
    assert PLANS["fp32"].reasons["weights"] != "gone"


def test_a_plan_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        PLANS["fp32"].accumulate = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_torch_dtypes_are_taken_for_format_names():
    assert Plan(weights=torch.float32, compute=torch.bfloat16) == Plan(weights="fp32", compute="bf16")  # pyright: ignore[reportArgumentType]


# --- YAML ---

_numbers = st.floats(min_value=1e-6, max_value=1e6)
_texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
_clips = st.one_of(
    st.none(),
    st.builds(Clip, max_norm=_numbers, norm_type=st.one_of(_numbers, st.just(float("inf")))),
    st.builds(Clip, max_value=_numbers),
)
_plans = st.builds(
    Plan,
    name=_texts,
    weights=st.just("fp32"),
    compute=st.sampled_from(["fp32", "fp16", "bf16"]),
    scaling=st.one_of(st.none(), st.builds(Scaling, init_scale=st.floats(1, 2**24))),
    clip=_clips,
    accumulate=st.integers(1, 10**6),
    fp32_modules=st.lists(st.builds(KeptModule, pattern=_texts, reason=_texts), max_size=3).map(tuple),
    reasons=st.dictionaries(st.sampled_from(["weights", "clip", "name"]), _texts),
)


@settings(max_examples=60, deadline=None)
@given(plan=_plans)
def test_a_saved_plan_loads_as_the_same_plan(plan: Plan, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    plan.save(path)
    assert Plan.load(path) == plan


def test_every_named_plan_survives_a_round_trip(tmp_path: Path):
    for plan in PLANS.values():
        plan.save(tmp_path / "plan.yaml")
        assert Plan.load(tmp_path / "plan.yaml") == plan


def test_a_saved_plan_leaves_open_what_was_not_set_of_the_scaling(tmp_path: Path):
    for named in ({}, {"growth_interval": 5000}, {"init_scale": 65536.0}):
        Plan(weights="fp32", compute="fp16", scaling=Scaling(**named)).save(tmp_path / "plan.yaml")
        read = Plan.load(tmp_path / "plan.yaml").scaling
        assert read is not None
        assert read.model_fields_set == set(named)


def test_a_failed_write_leaves_the_old_plan_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plan.yaml"
    PLANS["fp32"].save(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match=r"plan.yaml': No space left on device"):
        PLANS["safe"].save(path)
    assert Plan.load(path) == PLANS["fp32"]
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_saved_plan_has_the_permissions_of_any_new_file(tmp_path: Path):
    (tmp_path / "other").touch()
    PLANS["fp32"].save(tmp_path / "plan.yaml")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "plan.yaml")]
    assert modes[0] == modes[1]


def test_a_folder_that_does_not_exist_is_no_place_to_save(tmp_path: Path):
    with pytest.raises(PlanError, match="No such file or directory"):
        PLANS["fp32"].save(tmp_path / "nowhere" / "plan.yaml")


def test_the_name_of_a_plan_is_the_files_where_it_has_none(tmp_path: Path):
    assert load(tmp_path, "weights: fp32\ncompute: fp16\n").name == "mine"


def test_yaml_numbers_with_an_exponent_are_numbers(tmp_path: Path):
    plan = load(tmp_path, "weights: fp32\ncompute: fp16\nclip: {max_norm: 1e-3}\n")
    assert plan.clip == Clip(max_norm=0.001)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is empty", "weights and compute"]),
        ("# only a comment\n", ["is empty"]),
        ("- fp16\n", ["holds a list", "map keys to values"]),
        ("fp16-mixed\n", ["holds a str"]),
        ("weights: fp32\ncompute: fp16\nacumulate: 2\n", ["'acumulate' is not known", "'accumulate'"]),
        ("weights: fp32\ncompute: fp16\nscaling: {growth_facter: 2}\n", ["scaling.growth_facter", "'growth_factor'"]),
        ("weights: fp32\ncompute: fp16\nfp32_modules: [{patern: head}]\n", ["patern' is not known", "'pattern'"]),
        ("weights: fp32\ncompute: fp16\nreasons: {clpi: x}\n", ["'clpi' is not known", "'clip'"]),
        ("weights: fp32\n", ["'compute' is missing", "fp32, fp16 or bf16"]),
        ("weights: fp32\ncompute: fp61\n", ["'fp61' is not a known format", "'fp16'"]),
        ("weights: fp32\ncompute: fp8\n", ["'fp8' is not a training dtype", "Use fp32, fp16 or bf16"]),
        ("weights: fp32\ncompute: e5m2\n", ["'e5m2' is not a training dtype", "Use fp32, fp16 or bf16"]),
        ("weights: fp32\ncompute:\n", ["'None' is not a known format"]),
        ("weights: fp16\ncompute: bf16\n", ["weights fp16 with compute bf16", "compute fp16"]),
        ("weights: fp32\ncompute: fp16\naccumulate: two\n", ["accumulate is 'two'", "whole number"]),
        ("weights: fp32\ncompute: fp16\naccumulate: 0\n", ["accumulate is 0", "1 or more"]),
        ("weights: fp32\ncompute: fp16\naccumulate: true\n", ["accumulate is True"]),
        ("weights: fp32\ncompute: fp16\naccumulate: 1.5\n", ["accumulate is 1.5"]),
        ("weights: fp32\ncompute: fp16\nclip: {max_norm: -1}\n", ["clip.max_norm is -1", "above 0"]),
        ("weights: fp32\ncompute: fp16\nclip: {max_norm: big}\n", ["clip.max_norm is 'big'", "above 0"]),
        ("weights: fp32\ncompute: fp16\nclip: {max_norm: .nan}\n", ["clip.max_norm is nan"]),
        ("weights: fp32\ncompute: fp16\nclip: 5.0\n", ["clip is 5.0", "max_norm"]),
        ("weights: fp32\ncompute: fp16\nclip: {}\n", ["neither max_norm nor max_value", "exactly one"]),
        ("weights: fp32\ncompute: fp16\nclip: {max_norm: 1, max_value: 1}\n", ["both max_norm and max_value"]),
        ("weights: fp32\ncompute: fp16\nscaling: true\n", ["scaling is True", "a mapping"]),
        ("weights: fp32\ncompute: fp16\nscaling: {floor: 1048576}\n", ["init_scale 65536 lies outside"]),
        ("weights: fp32\ncompute: fp16\nscaling: {backoff_factor: 1}\n", ["backoff_factor is 1", "between 0 and 1"]),
        ("weights: fp32\ncompute: fp16\nfp32_modules: head\n", ["fp32_modules is 'head'", "a list"]),
        ("weights: fp32\ncompute: fp16\nfp32_modules: [head]\n", ["fp32_modules.0 is 'head'", "pattern"]),
        ("weights: fp32\ncompute: fp16\nname: 3\n", ["name is 3", "a text"]),
        ("weights: [fp32\n", ["not plain YAML", "line 2"]),
        ("weights: !!python/object/apply:os.system ['true']\n", ["not plain YAML", "python/object"]),
        ("[" * 20_000, ["not plain YAML"]),
    ],
)
def test_a_bad_plan_gets_one_line_with_the_value_and_what_to_do(tmp_path: Path, text: str, parts: list[str]):
    message = refusal(tmp_path, text)
    assert "mine.yaml" in message
    for part in parts:
        assert part in message


def test_a_bomb_of_yaml_aliases_is_refused_in_a_short_line(tmp_path: Path):
    rows = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    text = "\n".join(rows) + "\nweights: *a29\ncompute: fp16\n"
    assert len(refusal(tmp_path, text)) < 500
    assert len(refusal(tmp_path, text.replace("weights: *a29", "weights: fp32\naccumulate: *a29"))) < 500


def test_yaml_cannot_run_code(tmp_path: Path):
    mark = tmp_path / "mark"
    refusal(tmp_path, f"weights: !!python/object/apply:pathlib.Path.touch ['{mark}']\n")
    assert not mark.exists()


def test_missing_files_folders_and_other_encodings_are_refused(tmp_path: Path):
    with pytest.raises(PlanError, match=r"none.yaml' does not exist. Give a YAML file or the name of a plan"):
        resolve_plan(tmp_path / "none.yaml")
    with pytest.raises(PlanError, match="is a folder"):
        resolve_plan(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes("name: Größe\n".encode("latin-1"))
    with pytest.raises(PlanError, match=r"not UTF-8 text \(byte 8\)"):
        resolve_plan(tmp_path / "latin.yaml")


def test_a_wrong_plan_in_python_raises_the_same_error():
    with pytest.raises(PlanError, match=r"^accumulate is 0. It must be a whole number, 1 or more.$"):
        Plan(weights="fp32", compute="fp16", accumulate=0)


# --- modules kept in FP32 ---


def model() -> nn.Module:
    block = nn.ModuleDict({"norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4)})
    return nn.ModuleDict({"encoder": block, "head": nn.Linear(4, 2)})


def keeping(*patterns: str) -> Plan:
    return Plan(name="mine", **MIXED, fp32_modules=tuple(KeptModule(pattern=p) for p in patterns))  # pyright: ignore[reportArgumentType]


def test_patterns_find_the_modules_they_keep():
    assert keeping("*.norm", "head").check_modules(model()) == ["encoder.norm", "head"]
    assert keeping("encoder.*").check_modules(model()) == ["encoder.norm", "encoder.proj"]
    assert keeping().check_modules(model()) == []


def test_a_pattern_without_a_module_names_the_nearest():
    with pytest.raises(PlanError, match=r"'encoder.nrom'.*no such module. Did you mean 'encoder.norm'"):
        keeping("head", "encoder.nrom").check_modules(model())


def test_a_pattern_like_nothing_lists_a_few_modules():
    with pytest.raises(PlanError, match=r"Known: encoder, encoder.norm, encoder.proj, head\."):
        keeping("zzz").check_modules(model())


# --- functions, rewrites and updates -----------------------------------------------------------------------------

WHOLE = Plan(
    name="whole",
    weights="fp16",
    compute="fp16",
    update="kahan",
    fp32_modules=(KeptModule(pattern="type:*Norm", reason="sums"),),
    fp32_functions=(KeptFunction(function="loss"), KeptFunction(function="losses.py:31", reason="squares")),
    rewrites=(
        Rewrite(kind="log-sigmoid", function="losses.py:focal", reason="1 - p rounds to 0"),
        Rewrite(kind="mask-constant", module="decoder.*.attention"),
    ),
)


def test_a_plan_with_everything_survives_a_round_trip(tmp_path: Path):
    WHOLE.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == WHOLE


def test_a_plan_without_them_is_as_before(tmp_path: Path):
    (tmp_path / "plan.yaml").write_text("weights: fp32\ncompute: fp16\n", encoding="utf-8")
    plan = Plan.load(tmp_path / "plan.yaml")
    assert (plan.update, plan.fp32_functions, plan.rewrites) == (None, (), ())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"update": "exakt"}, "update is 'exakt'. It must be null, exact, stochastic, kahan, nearest."),
        ({"rewrite": []}, "key 'rewrite' is not known. Did you mean 'rewrites'"),
        ({"rewrites": [{"kind": "log-sigmoid"}]}, "neither module nor function is given. Give exactly one."),
        (
            {"rewrites": [{"kind": "log-sigmoid", "module": "a", "function": "b"}]},
            "both module and function are given. Give exactly one.",
        ),
        ({"rewrites": [{"kind": "log", "module": "a"}]}, "It must be one of log-sigmoid, log-softmax"),
        ({"rewrites": [{"kinds": "log", "module": "a"}]}, "kinds' is not known. Did you mean 'kind'"),
        ({"fp32_functions": [{"functions": "a"}]}, "functions' is not known. Did you mean 'function'"),
        ({"fp32_functions": ["loss"]}, "fp32_functions.0 is 'loss'. It must be a list of mappings with function"),
    ],
)
def test_wrong_entries_get_one_line(fields: dict[str, object], words: str):
    with pytest.raises(PlanError) as caught:
        Plan(**MIXED, **fields)  # pyright: ignore[reportArgumentType]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
