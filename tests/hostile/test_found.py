"""Inputs that once ended in a traceback, a wrong answer or without end: each is a result or one clear line now."""

import io
import json
import sys

import numpy as np
import pytest
import torch
from tests.hostile.artefacts import ASKED, READERS, _guard, npy, pack_trace
from tests.preloaded import COMMAND, run_preloaded
from tests.report.rescues import make_rescue
from tests.report.run.runs import make_run

import floatline as fl
from floatline.base.plain_records import from_plain
from floatline.base.plain_values import flatten_tensors, unflatten_tensors
from floatline.cli.explain import _read_end
from floatline.cli.output import print_json
from floatline.errors import (
    ApprovalError,
    ComparisonError,
    GuardError,
    LedgerError,
    PlanError,
    RescueError,
    TargetError,
    TraceError,
)
from floatline.guard.checkpoints.run_files import load_checkpoint, save_checkpoint
from floatline.ledger.account import Account
from floatline.ledger.parts import read_part
from floatline.plans import Plan
from floatline.probe.trace.trace import Trace
from floatline.report.run.folders import open_runs
from floatline.report.run.page import write_run_page
from floatline.rescuing.finished_stages import plain_diagnosis, plain_patch, read_diagnosis, read_patch
from floatline.validation.metrics.recorded import as_number
from floatline.validation.signoff.records import APPROVALS, read_records
from floatline.validation.study.store import Store
from floatline.validation.verdict.terms import Terms
from floatline.workload.config import parse_pairs

VALUES = (
    "!!bool x",
    "!!timestamp x",
    "2020-99-99",
    "!!int x",
    "0x_",
    "9" * 5000,
    "&a [*a]",
    "!!python/name:os.system ''",
)


@pytest.mark.parametrize("value", VALUES)
def test_a_yaml_value_that_is_not_what_it_says_is_one_line(tmp_path, value):
    (tmp_path / "plan.yaml").write_text(f"weights: fp32\ncompute: fp32\nname: {value}\n")
    with pytest.raises(PlanError, match="is not plain YAML"):
        Plan.load(tmp_path / "plan.yaml")
    (tmp_path / APPROVALS).write_text(f"- {value}\n")
    with pytest.raises(ApprovalError, match="cannot be read"):
        read_records(tmp_path)
    with pytest.raises(TargetError, match="the value cannot be read"):
        parse_pairs([f"x={value}"])


def test_aliases_and_merges_as_people_write_them_are_read(tmp_path):
    text = "weights: &w fp32\ncompute: *w\nscaling: &s {init_scale: 256}\nclip: {<<: {max_norm: 1}}\n"
    (tmp_path / "plan.yaml").write_text(text)
    plan = Plan.load(tmp_path / "plan.yaml")
    assert (plan.compute, plan.scaling.init_scale, plan.clip.max_norm) == ("fp32", 256, 1)


@pytest.mark.parametrize(("value", "number"), [(10**400, np.inf), (-(10**400), -np.inf), (7, 7.0), (True, None)])
def test_a_whole_number_beyond_float64_is_infinite(value, number):
    assert as_number(value) == number


@pytest.fixture
def trace(tmp_path):
    return READERS["trace"].make(tmp_path)


@pytest.mark.parametrize(
    ("part", "data"),
    [
        ("op_name.npy", npy(np.array([9, 9]).tobytes(), "<i8", "(2,)")),
        ("op_name.npy", npy(np.array([], "<i8").tobytes(), "<i8", "(0,)")),
        ("inputs_lengths.npy", npy(np.array([-1, 3]).tobytes(), "<i8", "(2,)")),
        ("value_largest.npy", npy(b"x" * 16, "|S8", "(2,)")),
        ("json.npy", json.dumps({"schema": 1, "words": 5, "gradients": [], "meta": {}}).encode()),
        ("json.npy", b'{"schema": 1}'),
        ("json.npy", b"[1]"),
        ("json.npy", b"[" * 100_000),
    ],
)
def test_a_trace_whose_columns_do_not_fit_is_one_line(trace, tmp_path, part, data):
    pack_trace(trace, tmp_path)
    assert len(Trace.load(tmp_path / "step.npz").ops) == 2
    pack_trace({**trace, part: data}, tmp_path)
    with pytest.raises(TraceError, match="is not a trace"):
        Trace.load(tmp_path / "step.npz")


def test_a_checkpoint_may_name_a_tensor_once(tmp_path):
    flat, forms = flatten_tensors({"w": torch.zeros(4, 3).t()})
    assert unflatten_tensors(flat, forms)["w"].stride() == (1, 3)
    with pytest.raises(ValueError, match="second copy"):
        unflatten_tensors(flat, {**forms, "v": forms["w"]})


def test_a_checkpoint_whose_state_is_another_is_refused_in_one_line(tmp_path):
    guard = _guard()
    tensors, state = guard.state_dict()
    for wrong in ({**state, "optimizer": 5}, {**state, "python_random": [3, [], None]}, {**state, "accounts": {}}):
        path = save_checkpoint(tmp_path, 1, tensors, wrong)
        with pytest.raises(GuardError, match="cannot be taken over"):
            guard.load(path)
    guard.load(save_checkpoint(tmp_path, 2, tensors, state))
    guard.close()
    (path / "tensors.safetensors").unlink()
    with pytest.raises(GuardError, match="has no tensors.safetensors"):
        load_checkpoint(path)


def test_a_count_below_zero_is_no_account():
    fields = Account().as_json()
    assert Account.from_json(fields) == Account()
    with pytest.raises(ValueError, match="below 0"):
        Account.from_json({**fields, "attempted": -1, "applied": -1})


@pytest.mark.parametrize("norm", [-1.5, 0.0, 2.0])
def test_a_norm_below_zero_has_no_headroom(tmp_path, norm):
    ledger = fl.Ledger.create(tmp_path, metadata={"plan": {"compute": "fp16"}})
    ledger.append(loss=1.0, scale=4.0, layer_norms={"w": norm})
    ledger.close()
    (run,) = open_runs([tmp_path])
    assert (run.look().layers[0].headroom is not None) == (norm > 0)


@pytest.mark.parametrize(("name", "value"), [("cause", 3.5), ("line", "x"), ("seen", None), ("cause", "no such cause")])
def test_a_finding_of_a_rescue_that_is_none_is_one_line(name, value):
    found = make_rescue().diagnosis
    plain = plain_diagnosis(found)
    assert read_patch(read_diagnosis(plain), plain_patch(found)).findings == found.findings
    plain["findings"][0][name] = value
    with pytest.raises(RescueError, match="cannot be read"):
        read_diagnosis(plain)


def test_a_ledger_that_is_a_folder_or_a_pipe_is_refused(tmp_path):
    (tmp_path / "ledger-00000.jsonl").mkdir()
    with pytest.raises(LedgerError, match="no plain file"):
        read_part(tmp_path / "ledger-00000.jsonl")


@pytest.mark.parametrize("text", ['{"asked": 5}', '{"asked": []}', "[" * 100_000, '{"asked": {}, "found": 3}'])
def test_a_study_that_is_not_one_is_refused(tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(ComparisonError, match="is damaged|cannot be read|which is not the"):
        Store(tmp_path, asked=ASKED, resume=True).close()


def test_names_of_several_kinds_are_told_by_the_first():
    with pytest.raises(ComparisonError, match="has no field 3"):
        from_plain(Terms, {3: 1, "x": 2, None: 3})


def test_the_end_of_a_log_is_read_whole():
    text = "é" * 300_000 + "the end"
    assert _read_end(io.BytesIO(text.encode())) == text[-200_000:]
    assert _read_end(io.BytesIO(b"short")) == "short"


def test_half_a_character_in_a_name_is_printed_and_put_on_the_page(tmp_path, capsys):
    name = "a\ud800b"
    print_json({"name": name, "ö": 1})
    said = capsys.readouterr().out
    assert json.loads(said) == {"name": name, "ö": 1} and "ö" in said
    make_run(tmp_path / "run", steps=20, layers=(name,), stop=name)
    write_run_page([run.look() for run in open_runs([tmp_path / "run"])], tmp_path / "page.html")
    assert "a?b" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform == "win32", reason="its file names hold no such characters")
def test_a_name_that_a_terminal_would_obey_is_spelled_out(tmp_path):
    done = run_preloaded(["-c", COMMAND, "compare", "\x1b]0;title\x07\x1b[2J", "b"], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("floatline: '\\x1b]0;title\\x07\\x1b[2J' is not there")
    assert done.stderr.count("\n") == 1 and "\x1b" not in done.stderr
