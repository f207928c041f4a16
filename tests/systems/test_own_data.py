"""Data of one's own under diagnose, validate and rescue: the file of a few lines that each system's page shows."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.slow import exhaustive, slow
from tests.systems import test_audio_lora_data, test_conditioned_data, test_dbnet_data, test_mmgcn_data

import floatline as fl
from floatline.diagnosis.target_diagnosis import diagnose
from floatline.errors import TargetError
from floatline.rescuing.rescue import find_plan
from floatline.systems import distill, mmgcn
from floatline.systems.distill.text import read_text
from floatline.workload import load_target

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```py\n(from floatline\.workload import load_target\n.*?)^```", re.MULTILINE | re.DOTALL)


def save_conditioned(folder: Path) -> None:
    test_conditioned_data.save(folder / "sequences.npz", test_conditioned_data.make_tensors())


def save_mmgcn(folder: Path) -> None:
    planted = mmgcn.find_data(mmgcn.Config(**test_mmgcn_data.QUICK, feature_scale=12.0))  # of no unit length
    test_mmgcn_data.save_mmrec(folder / "data" / "baby", planted)
    (folder / "overall.yaml").write_text(test_mmgcn_data.OVERALL.replace("DATA", "data"))


def save_dbnet(folder: Path) -> None:
    test_dbnet_data.save_icdar(folder / "icdar2015")


def save_distill(folder: Path) -> None:
    shipped = Path(distill.__file__).with_name("pride_and_prejudice.txt").read_text(encoding="utf-8")
    (folder / "mine.txt").write_text(shipped[:40_000], encoding="utf-8")


def save_audio_lora(folder: Path) -> None:
    sound = pytest.importorskip("soundfile", reason="soundfile is not installed")
    test_audio_lora_data.save_recordings(folder / "recordings", sound, voices=("m1", "f2"))


# What makes the page's own sizes small enough for a test.
SMALL: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "conditioned": (save_conditioned, ["held_out=16", "batch_size=16", "layers=1"]),
    "mmgcn": (save_mmgcn, ["batch_size=128", "passes=1"]),
    "dbnet": (
        save_dbnet,
        [
            *("image_size=64", "test_height=64", "batch_size=2", "augment=false", "passes=1", "backbone=small"),
            *("backbone_weights=null", "widths=[8,8,8]", "depth=[1,1,1]", "neck=8", "head=8"),
        ],
    ),
    "distill": (save_distill, ["num_batches=6", "batch_size=4", "teacher_path=null", "student_path=null"]),
    "audio_lora": (save_audio_lora, ["batch_size=4", "rank=4", "accumulate=1", "base_path=null"]),
}
# Each fails in 16 bits on such data, and not in FP32.
FAULTS = {
    "conditioned": ("broken", []),
    "mmgcn": ("eps", ["normalize=false"]),
    "dbnet": ("broken", ["image_size=512"]),  # more pixels with words than FP16 can count
    "distill": ("broken", []),
    "audio_lora": ("broken", []),
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes the page's file, and the data it names, into a folder that is then the current one."""
    monkeypatch.chdir(tmp_path)
    read_text.cache_clear()  # of 'mine.txt' in another folder

    def write(name: str, *, variant: str = "", pairs: Sequence[str] = (), data: bool = True) -> str:
        save, small = SMALL[name]
        if data:
            save(tmp_path)
        page = (ROOT / "docs" / "workloads" / f"{name}.md").read_text(encoding="utf-8")
        (code,) = BLOCK.findall(page)
        code = code.replace("]).build", "".join(f', "{pair}"' for pair in (*small, *pairs)) + "]).build")
        if variant:
            code = re.sub(rf'"{name}(:\w+)?"', f'"{name}:{variant}"', code)
        file = tmp_path / f"own_{name}{variant}.py"
        file.write_text(code)
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
        return str(file)

    return write


@pytest.mark.parametrize("name", SMALL)
def test_the_pages_file_is_a_target_on_the_folder_that_it_names(own, name: str) -> None:
    target = load_target(own(name))
    first, again, other = (target.build(seed) for seed in (0, 0, 1))
    assert len(first.batches) > 0 and first.settings["workload"].partition(":")[0] == name
    (one, two, three) = ([p.detach().clone() for p in made.model.parameters()] for made in (first, again, other))
    assert all(map(lambda a, b: a.equal(b), one, two)) and not all(map(lambda a, b: a.equal(b), one, three))


@pytest.mark.parametrize("name", [name for name in SMALL if name != "mmgcn"])  # its file has another file of settings
def test_settings_behind_the_name_are_those_of_the_pages_file(name: str) -> None:
    page = (ROOT / "docs" / "workloads" / f"{name}.md").read_text(encoding="utf-8")
    ((target, *pairs),) = [
        found.split() for found in re.findall(rf"^\$ floatline diagnose ({name}\b.*=.*)$", page, re.M)
    ]
    (code,) = BLOCK.findall(page)
    assert f'"{target}", pairs={pairs}'.replace("'", '"') in code


@pytest.mark.parametrize("name", SMALL)
def test_a_folder_that_is_not_there_is_one_line(own, name: str) -> None:
    file = own(name, data=False)
    with pytest.raises(TargetError) as error:
        diagnose(file, steps=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow if name != "conditioned" else ()) for name in SMALL])
def test_own_data_are_diagnosed(own, name: str) -> None:
    assert diagnose(own(name), steps=3).findings == ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=exhaustive if name == "dbnet" else slow) for name in FAULTS])
def test_a_fault_on_own_data_is_found_in_the_code_of_the_system_and_rescued(own, name: str) -> None:
    variant, pairs = FAULTS[name]
    rescue = find_plan(own(name, variant=variant, pairs=pairs), steps=6)
    assert rescue.diagnosis.primary is not None
    assert f"systems/{name}/" in rescue.diagnosis.primary.where or rescue.diagnosis.primary.where == "optimizer.step"
    assert rescue.plan is not None


@slow
@pytest.mark.parametrize("name", SMALL)
def test_own_data_are_validated(own, name: str, tmp_path: Path) -> None:
    study = fl.validate(own(name), steps=4, max_seeds=3, broken=False, measure=False, folder=tmp_path / "study")
    assert {run.arm for run in study.runs} >= {"fp32", "fp16-mixed"}
    assert not any(run.error for run in study.runs)
