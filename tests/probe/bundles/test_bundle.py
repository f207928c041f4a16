"""A step in a folder: what comes back is what was captured, and what is damaged or foreign is refused in one line."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.slow import slow
from torch import nn

import floatline as fl
from floatline.causes import find_cause
from floatline.errors import FloatlineError, ReplayError
from floatline.findings import Finding
from floatline.probe.bundles.bundle import open_target, read_bundle, restore_step, write_bundle
from floatline.probe.bundles.bundle_replay import replay_bundle
from floatline.probe.runs.target_steps import capture_target
from floatline.probe.steps.capture import capture_step
from floatline.workload import load_target

TARGET = """
import random

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 1)
        self.factor = factor

    def forward(self, x):
        x = self.drop(self.norm(self.body(x))) * (1 + 0.1 * random.random())
        return self.head(x) * self.factor


def build(seed=0, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(16, 8, generator=generator) for _ in range(3)]
    batches = [((x,), (x.sum(1, keepdim=True),)) for x in rows]
    loss = lambda y, t: (y.float() - t).square().mean()
    return Net(factor), batches, loss, "fp16-mixed", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)


def broken(seed=0):
    return build(seed, factor=1e6)


def train(steps=4):
    model, batches, loss, _, make = build()
    optimizer = make(model)
    for (x,), (t,) in (batches * 2)[:steps]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss(model(x) * 1e6, t).backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    file = tmp_path_factory.mktemp("target") / "netfile.py"
    file.write_text(TARGET)
    return str(file)


@pytest.fixture
def bundle(target, tmp_path):
    return write_bundle(load_target(target), tmp_path / "bundle", step=5, seed=3, with_data=True)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("with_data", [False, True])
def test_a_bundle_gives_the_bits_of_the_step(target, tmp_path, with_data):
    step = capture_target(load_target(target), step=5, seed=3)
    expected = step.replay(update=True)
    folder = step.save(tmp_path / "bundle", with_data=with_data)
    assert sorted(p.name for p in folder.iterdir()) == [
        "bundle.json",
        *(["data.safetensors"] * with_data),
        "state.safetensors",
    ]
    read = read_bundle(folder)
    assert read.has_data == with_data
    again = restore_step(read, open_target(read)).replay(update=True)
    assert again.loss == expected.loss
    assert_equal(again.raw, expected.raw)
    assert_equal(again.after, expected.after)


def test_the_captured_step_is_that_of_the_run(target):
    from floatline.probe.runs.runs import run_target

    loaded = load_target(target)
    losses = run_target(loaded, steps=7, seed=3).losses
    for number in (0, 5, 6):
        assert capture_target(loaded, step=number, seed=3).replay().loss == losses[number]


@slow
def test_the_bundle_is_the_same_in_another_process(bundle, target):
    here = replay_bundle(bundle).rows[0]
    code = "import sys\nfrom floatline.probe.bundles.bundle_replay import replay_bundle\n"
    code += "print(repr(replay_bundle(sys.argv[1]).rows[0].loss))"
    run = subprocess.run([sys.executable, "-c", code, str(bundle)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == repr(here.loss)


def test_a_bundle_holds_its_origin_and_its_findings(target, tmp_path):
    finding = Finding(find_cause("product-overflow"), "seen", "fix", "head")
    folder = write_bundle(load_target(f"{target}:broken"), tmp_path / "b", step=1, seed=2, findings=[finding])
    read = read_bundle(folder)
    assert (read.kind, read.origin.step, read.origin.seed, read.origin.batch) == ("build", 1, 2, 1)
    assert read.origin.target.endswith("netfile.py:broken")
    assert read.findings[0]["cause"] == "product-overflow"
    assert read.versions["torch"] == torch.__version__
    report = replay_bundle(folder, islands=["head"], scale=1.0)
    assert [row.finite for row in report.rows] == [False, False, True]
    assert report.notes == ("the bundle holds no data: the batch is the target's own",)


def test_a_train_target_is_run_again_from_its_seed(target, tmp_path):
    folder = write_bundle(load_target(f"{target}:train"), tmp_path / "b", step=2)
    report = replay_bundle(folder, precision="bf16")
    assert [row.finite for row in report.rows] == [False, True, True]
    assert "run again from seed 0 to step 2" in report.notes[0]
    with pytest.raises(ReplayError, match="scales its loss itself"):
        replay_bundle(folder, scale=2.0)


def test_code_that_has_changed_is_said(bundle, target, tmp_path):
    other = tmp_path / "netfile.py"
    other.write_text(TARGET + "\n# changed\n")
    report = replay_bundle(bundle, target=str(other))
    assert report.notes == ("the code of netfile.py is not what it was when the bundle was written",)
    assert replay_bundle(bundle).notes == ()


def test_states_of_floatlines_optimizers_come_back(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(torch.bfloat16)
    optimizer = fl.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(8, 4).to(torch.bfloat16)

    def compute_loss(batch):
        (x,), _ = batch
        return model(x).float().square().mean()

    for _ in range(3):
        compute_loss(([x], [])).backward()
        optimizer.step()
        optimizer.zero_grad()
    step = capture_step(model, optimizer, compute_loss, ([x], []), plan="bf16-true")
    folder = step.save(tmp_path / "b", with_data=True)
    (tmp_path / "linear.py").write_text(
        "import torch, floatline as fl\nfrom torch import nn\n"
        "def build():\n"
        "    return nn.Linear(4, 2), [((torch.zeros(1, 4),), ())], lambda y: y.float().square().mean(), 'bf16-true', "
        "lambda m: fl.optim.AdamW(m.parameters(), lr=0.5)\n"
    )
    read = read_bundle(folder)
    again = restore_step(read, open_target(read, str(tmp_path / "linear.py"))).replay(update=True)
    assert_equal(again.after, step.replay(update=True).after)


def test_a_folder_that_holds_something_is_not_written_to(target, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    step = capture_target(load_target(target), step=0)
    with pytest.raises(ReplayError, match="exists already"):
        step.save(tmp_path / "full")
    (tmp_path / "empty").mkdir()
    assert read_bundle(step.save(tmp_path / "empty")).kind == "build"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"]


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path):
    model = nn.Linear(2, 1)
    step = capture_step(model, None, lambda b: model(b[0]).mean(), (torch.ones(1, 2), object()), plan="fp32")
    with pytest.raises(ReplayError, match="is a object, which a bundle cannot hold"):
        step.save(tmp_path / "b", with_data=True)
    assert list(tmp_path.iterdir()) == []
    assert step.save(tmp_path / "b").is_dir()


def edit(bundle, change):
    file = bundle / "bundle.json"
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: (b / "bundle.json").unlink(), "is no replay bundle"),
        (lambda b: (b / "bundle.json").write_text("{"), "is not JSON"),
        (lambda b: (b / "bundle.json").write_text("[" * 100_000), "is not JSON"),
        (lambda b: (b / "bundle.json").write_text("[]"), "holds no object"),
        (lambda b: edit(b, lambda f: f.update(schema=2)), "has schema 2; this floatline reads 1"),
        (lambda b: edit(b, lambda f: f.update(schema="x")), "no schema"),
        (lambda b: edit(b, lambda f: f["files"].update({"../../evil": {}})), "names a file '../../evil'"),
        (lambda b: edit(b, lambda f: f.pop("origin")), "origin"),
        (lambda b: edit(b, lambda f: f["origin"].update(step="one")), "origin cannot be read"),
        (lambda b: edit(b, lambda f: f["origin"].update(strange=1)), "strange"),
        (lambda b: edit(b, lambda f: f.update(plan={"weights": "fp3"})), "damaged"),
        (lambda b: edit(b, lambda f: f.update(kind="other")), "kind"),
        (lambda b: (b / "state.safetensors").unlink(), "state.safetensors is missing"),
        (lambda b: (b / "state.safetensors").write_bytes(b"x"), "1 bytes"),
        (lambda b: flip(b / "state.safetensors"), "checksum"),
    ],
)
def test_a_damaged_or_foreign_bundle_is_refused(bundle, damage, words):
    damage(bundle)
    with pytest.raises(ReplayError, match=words) as error:
        read_bundle(bundle)
    assert "\n" not in str(error.value)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_strides_that_reach_beyond_the_file_are_refused(bundle):
    edit(
        bundle,
        lambda f: f["forms"]["state.safetensors"].update(
            {"model.body.weight": {"key": "model.body.weight", "strides": [1 << 40, 1]}}
        ),
    )
    with pytest.raises(ReplayError, match="strides that do not fit"):
        read_bundle(bundle)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(bundle):
    file = bundle / "state.safetensors"

    def rewrite(change):
        tensors = dict(load_file(file))
        change(tensors)
        save_file(tensors, file)
        import hashlib

        facts = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "bytes": file.stat().st_size}
        edit(bundle, lambda f: f["files"].update({"state.safetensors": facts}))

    rewrite(lambda t: t.update({"model.head.bias": torch.zeros(7)}))
    with pytest.raises(ReplayError, match=r"'head.bias' is \(7,\) in the bundle and \(1,\)"):
        replay_bundle(bundle)
    rewrite(lambda t: t.pop("model.head.bias"))
    with pytest.raises(ReplayError, match=r"model has 'head.bias', and the bundle has none"):
        replay_bundle(bundle)
    rewrite(lambda t: t.update({"model.head.bias": torch.zeros(1), "model.tail.bias": torch.zeros(1)}))
    with pytest.raises(ReplayError, match=r"holds 'tail.bias'.*Did you mean 'head.bias'"):
        replay_bundle(bundle)


STRANGE = (None, True, -1, 1e300, "x", [], {}, [[1]], {"$tuple": [1]}, {"$what": 1})


@slow
def test_whatever_the_fields_hold_the_answer_is_one_line(bundle, target):
    loaded = load_target(target)
    whole = (bundle / "bundle.json").read_text()
    places = [(key,) for key in json.loads(whole)]
    places += [
        ("origin", "islands"),
        ("random", "python"),
        ("random", "numpy"),
        ("optimizer", "state"),
        ("autocast", "devices"),
    ]
    places += [("optimizer", "class"), ("optimizer", "groups"), ("plan", "$items"), ("files", "state.safetensors")]
    refused = 0
    for place in places:
        for strange in STRANGE:
            fields = json.loads(whole)
            inner = fields if len(place) == 1 else fields[place[0]]
            inner[place[-1]] = strange
            (bundle / "bundle.json").write_text(json.dumps(fields))
            try:
                restore_step(read_bundle(bundle), loaded)
            except FloatlineError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 100


def test_code_inside_the_bundle_is_not_run_unless_it_is_given(bundle, tmp_path, monkeypatch):
    (bundle / "evil.py").write_text(TARGET)
    edit(bundle, lambda f: f["origin"].update(target=str(bundle / "evil.py")))
    with pytest.raises(ReplayError, match="lies in the bundle itself"):
        replay_bundle(bundle)
    assert replay_bundle(bundle, target=str(bundle / "evil.py")).rows[0].finite


def test_a_bundle_without_a_target_asks_for_one(tmp_path):
    model = nn.Linear(2, 1)
    step = capture_step(model, None, lambda b: model(b).mean(), torch.ones(1, 2), plan="fp32")
    with pytest.raises(ReplayError, match="names no target"):
        replay_bundle(step.save(tmp_path / "b"))


PLANNED = """
import torch
from torch import nn

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def far(out, goal):
    return ((out - goal) * 400).square().mean() / 160000  # leaves FP16 unless the plan says otherwise


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        return self.mix(x)


def build():
    net = Net()
    return net, [((X,), (X.half(),))], far, "PLAN", lambda m: torch.optim.SGD(m.parameters(), 0.1)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_a_captured_step_computes_as_its_plan_says(tmp_path, kept):
    functions = [{"function": "loss", "reason": "squares"}] if kept else []
    plan = fl.Plan.model_validate(
        {"weights": "fp16", "compute": "fp16", "fp32_functions": functions, "fp32_modules": [{"pattern": "mix"}]}
    )
    plan.save(tmp_path / "plan.yaml")
    file = tmp_path / "planned.py"
    file.write_text(PLANNED.replace("PLAN", str(tmp_path / "plan.yaml")))
    loaded = load_target(str(file))
    step = capture_target(loaded, step=1)
    replay = step.replay(trace=True)
    assert replay.finite is kept
    products = {op.outputs[0].dtype for op in replay.trace.ops if op.name == "aten.addmm"}
    assert products == {"float32"}  # the module is an island of the plan
    read = read_bundle(step.save(tmp_path / "bundle", with_data=True))
    again = restore_step(read, open_target(read)).replay()
    assert repr(again.loss) == repr(replay.loss)
    assert_equal(again.raw, replay.raw) if kept else None
