"""dbnet on a user's own pictures and weights: ICDAR 2015 as it is downloaded, ResNets, and what is refused."""

from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.slow import slow

from floatline.errors import TargetError
from floatline.systems import dbnet
from floatline.systems.dbnet.icdar import load_icdar, read_labels
from floatline.systems.dbnet.resnet import ResNet, load_weights
from floatline.systems.dbnet.scenes import IGNORED, Scene, draw_scenes
from floatline.systems.dbnet.views import augment, crop, fit_height, fit_square, turn
from floatline.training.trainer import Trainer
from floatline.workload import OnDemand, load_target

WIDTH, HEIGHT = 160, 90


def save_icdar(folder: Path, *, num: int = 3) -> list[Scene]:
    """ICDAR 2015 as its four archives unpack: JPEGs of 16 by 9 in colour, labels with a byte order mark and quotes."""
    drawn = draw_scenes(2 * num, size=WIDTH, words=5, text_height=(12, 18), seed=5)
    places = {
        "ch4_training_images": "ch4_training_localization_transcription_gt",
        "ch4_test_images": "Challenge4_Test_Task1_GT",
    }
    for (images, labels), scenes in zip(places.items(), (drawn[:num], drawn[num:]), strict=True):
        (folder / images).mkdir(parents=True)
        (folder / labels).mkdir()
        for number, scene in enumerate(scenes, 1):
            grey = scene.image[:HEIGHT].astype(np.uint8)
            colour = np.stack([grey, 255 - grey, grey // 2], -1)
            Image.fromarray(colour).save(folder / images / f"img_{number}.jpg", quality=95)
            rows = ["10,10,40,10,40,20,10,20,###"] + [
                ",".join(str(round(value)) for value in polygon.flatten()) + f',"{text}, ""and"" more"'
                for polygon, text in zip(scene.polygons, scene.texts, strict=True)
            ]
            text = "\ufeff" + "\r\n".join(rows) + "\r\n"
            (folder / labels / f"gt_img_{number}.txt").write_bytes(text.encode())
    return drawn[:num]


TINY = {"image_size": 96, "test_height": 64, "batch_size": 2, "neck": 8, "head": 8, "total_steps": 8}
TINY |= {"widths": (8, 8, 8), "depth": (1, 1, 1), "learning_rate": 0.02}


def test_icdar_2015_is_read_as_it_is_downloaded(tmp_path: Path) -> None:
    drawn = save_icdar(tmp_path)
    config = dbnet.Config(**TINY, icdar_folder=str(tmp_path), colour=True)
    train, held_out = dbnet.find_scenes(config)
    assert (len(train), len(held_out)) == (3, 3)
    first = train[0]
    assert first.image.shape == (96, 96, 3) and first.image.dtype == np.uint8
    # 160 by 90 becomes 96 by 54, and black is below it.
    assert first.image[53].any() and not first.image[54:].any()
    assert first.texts[0] == IGNORED and first.ignored[0] and not all(first.ignored)
    corners = np.array([[10, 10], [40, 10], [40, 20], [10, 20]])
    np.testing.assert_allclose(first.polygons[0], (corners + 0.5) * 0.6 - 0.5, rtol=1e-6)
    red, green = (first.image[:54, :, i].astype(float).mean() for i in (0, 1))
    assert red + green == pytest.approx(255, abs=4)  # the test wrote 255 - red as green
    wanted = drawn[0].image[:HEIGHT].mean()
    assert red == pytest.approx(wanted, abs=4) and abs(green - wanted) > 8
    assert held_out[0].image.shape == (64, 128, 3)  # 64 / 90 of 160 is 114, filled up to a multiple of 32


def test_grey_pictures_have_one_channel_and_colour_has_three(tmp_path: Path) -> None:
    save_icdar(tmp_path)
    for colour, channels in ((False, 1), (True, 3)):
        workload = dbnet.build(dbnet.Config(**TINY, icdar_folder=str(tmp_path), colour=colour))
        (images,), targets = workload.batches[0]
        assert images.shape == (2, channels, 96, 96) and all(target.shape == (2, 96, 96) for target in targets)
        assert images.min() >= -1 and images.max() <= 1


@pytest.mark.parametrize("layout", [("train_images", "train_gts", "img_7.jpg.txt"), ("train", "train", "gt_img_7.txt")])
def test_other_layouts_are_known(tmp_path: Path, layout: tuple[str, str, str]) -> None:
    images, labels, name = layout
    (tmp_path / images).mkdir()
    (tmp_path / labels).mkdir(exist_ok=True)
    cv2.imwrite(str(tmp_path / images / "img_7.jpg"), np.zeros((32, 64, 3), np.uint8))
    (tmp_path / labels / name).write_text("1,2,30,2,30,12,1,12,word")
    (scene,) = load_icdar(tmp_path, "train", fit=lambda scene: scene)
    assert scene.texts == ["word"] and scene.image.shape == (32, 64)


def test_pictures_are_in_the_order_of_their_numbers_and_cameras_do_not_turn_them(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in (1, 2, 10):
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by a quarter
        Image.new("RGB", (64 + number, 32)).save(tmp_path / "train" / f"img_{number}.jpg", exif=exif)
        (tmp_path / "train" / f"gt_img_{number}.txt").write_text("")
    shapes = [scene.image.shape for scene in load_icdar(tmp_path, "train", fit=lambda scene: scene)]
    assert shapes == [(32, 65), (32, 66), (32, 74)]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("1,2,3,4,5,6,7,8,###", "###"),
        ('1,2,3,4,5,6,7,8,"###"', "###"),
        ("1,2,3,4,5,6,7,8,a, b", "a, b"),
        (r'1,2,3,4,5,6,7,8,"say \"hi\""', 'say "hi"'),
        ('1,2,3,4,5,6,7,8,"', '"'),
        ("1,2,3,4,5,6,7,8,", ""),
    ],
)
def test_texts_lose_their_quotes_and_keep_their_commas(tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / "gt.txt").write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n")
    ((corners, found),) = read_labels(tmp_path / "gt.txt")
    assert corners.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]] and found == text


@pytest.mark.parametrize("line", ["1,2,3", "1,2,3,4,5,6,7,8", "a,2,3,4,5,6,7,8,word", "1,2,3,4,5,6,7,nan,word"])
def test_a_bad_label_is_one_line(tmp_path: Path, line: str) -> None:
    save_icdar(tmp_path)
    path = tmp_path / "ch4_training_localization_transcription_gt" / "gt_img_2.txt"
    path.write_text(f"{line}\n")
    with pytest.raises(TargetError, match=r"gt_img_2\.txt, line 1: '") as error:
        dbnet.build(dbnet.Config(**TINY, icdar_folder=str(tmp_path)))
    assert "\n" not in str(error.value)


def damage(folder: Path, how: str) -> None:
    images = folder / "ch4_training_images"
    if how == "packed":
        images.rename(folder / "elsewhere")
        (folder / "ch4_training_images.zip").write_bytes(b"PK")
    elif how == "gone":
        images.rename(folder / "elsewhere")
    elif how == "empty":
        for path in images.iterdir():
            path.unlink()
    elif how == "unlabelled":
        (folder / "ch4_training_localization_transcription_gt" / "gt_img_1.txt").unlink()
    elif how == "latin":
        (folder / "ch4_training_localization_transcription_gt" / "gt_img_1.txt").write_bytes(b"1,2,3,4,5,6,7,8,caf\xe9")
    else:
        for path in images.iterdir():
            path.write_bytes(b"no picture")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("packed", "ch4_training_images.zip' is still packed"),
        ("gone", "none of 'ch4_training_images', 'train_images', 'train'"),
        ("empty", "has no pictures"),
        ("unlabelled", "img_1.jpg' has no label file"),
        ("latin", "gt_img_1.txt' cannot be read"),
        ("broken", ".jpg' cannot be read"),
    ],
)
def test_a_bad_folder_is_one_line_with_its_path(tmp_path: Path, how: str, said: str) -> None:
    save_icdar(tmp_path)
    damage(tmp_path, how)
    with pytest.raises(TargetError) as error:
        dbnet.build(dbnet.Config(**TINY, icdar_folder=str(tmp_path)))
    assert said in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def marked(width: int = 120, height: int = 80) -> Scene:
    """A white word on black: where the word is can be seen."""
    word = np.array([[40, 30], [80, 30], [80, 45], [40, 45]], np.float32)
    image = np.zeros((height, width), np.uint8)
    cv2.fillPoly(image, [word.astype(np.int32)], 255)
    return Scene(image, [word], ["word"])


def overlap(scene: Scene) -> float:
    """Share of what is white that the word's polygon covers, and of the polygon that is white: the smaller one."""
    inside = np.zeros(scene.image.shape[:2], np.uint8)
    cv2.fillPoly(inside, [np.round(scene.polygons[0]).astype(np.int32)], 1)
    white = scene.image > 127
    both = (white & (inside > 0)).sum()
    return float(min(both / white.sum(), both / inside.sum()))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("degrees", [0.0, 7.0, -10.0])
def test_words_move_with_the_picture(degrees: float, flip: bool) -> None:
    turned = turn(marked(), degrees, flip=flip)
    assert overlap(turned) > 0.9
    area = cv2.contourArea(turned.polygons[0], oriented=True)
    assert area == pytest.approx(40 * 15, rel=1e-3)  # clockwise, as before


def test_a_word_that_was_not_moved_would_be_seen() -> None:
    turned = turn(marked(), 10.0, flip=False)
    assert overlap(Scene(turned.image, marked().polygons, ["word"])) < 0.9


FITS = [partial(fit_square, size=64), partial(fit_square, size=256), partial(fit_height, height=32)]


@pytest.mark.parametrize("fit", FITS)
def test_sizes_keep_the_aspect_and_the_words(fit) -> None:
    fitted = fit(marked())
    assert overlap(fitted) > 0.8
    size = np.ptp(fitted.polygons[0], axis=0)
    assert size[0] / size[1] == pytest.approx(40 / 15, rel=0.02)


def test_crops_cut_no_word_and_have_one() -> None:
    scenes = draw_scenes(6, size=128, words=5, text_height=(10, 16), seed=9)
    shapes = set()
    for i, scene in enumerate(scenes):
        part = crop(scene, np.random.default_rng(i))
        shapes.add(part.image.shape)
        height, width = part.image.shape
        assert not all(part.ignored)
        for polygon in part.polygons:
            assert polygon.min() >= -1 and polygon[:, 0].max() <= width and polygon[:, 1].max() <= height
    assert len(shapes) > 3


def test_a_word_on_the_edge_is_ignored_and_one_outside_is_left_out() -> None:
    edges = [np.array([[x, 10], [x + 20, 10], [x + 20, 20], [x, 20]], np.float32) for x in (-15, 50, 118, 200)]
    scene = fit_square(Scene(np.zeros((120, 120), np.uint8), edges, ["most outside", "in", "cut", "out"]), 120)
    assert scene.texts == [IGNORED, "in", IGNORED]


def brightness(batches: list[torch.Tensor]) -> torch.Tensor:
    """Of each picture, sorted: the same for the same pictures in another order."""
    return torch.cat(batches).sum((1, 2, 3)).sort().values


def test_augmented_batches_differ_from_pass_to_pass_and_come_again(tmp_path: Path) -> None:
    save_icdar(tmp_path, num=4)
    config = dbnet.Config(**TINY, icdar_folder=str(tmp_path), colour=True, augment=True, passes=2)
    batches = dbnet.build(config, seed=1).batches
    assert isinstance(batches, OnDemand) and len(batches) == 4
    again = dbnet.build(config, seed=1).batches
    for first, second in zip(batches, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True))
    images = [batch[0][0] for batch in batches]
    assert not torch.equal(brightness(images[:2]), brightness(images[2:]))
    assert not torch.equal(images[0], dbnet.build(config, seed=2).batches[0][0][0])
    plain = dbnet.build(config.model_copy(update={"augment": False}), seed=1).batches
    assert torch.equal(*(brightness([plain[i][0][0] for i in pair]) for pair in ((0, 1), (2, 3))))


def test_augmented_scenes_have_the_size_that_is_asked_for() -> None:
    for seed in range(8):
        scene = augment(marked(), np.random.default_rng(seed), 64)
        assert scene.image.shape == (64, 64) and overlap(scene) > 0.6


# torchvision's names and shapes, written down from its own files.
RESNET18_SAMPLE = {
    "conv1.weight": (64, 3, 7, 7),
    "bn1.running_var": (64,),
    "layer1.1.conv2.weight": (64, 64, 3, 3),
    "layer2.0.conv1.weight": (128, 64, 3, 3),
    "layer2.0.downsample.0.weight": (128, 64, 1, 1),
    "layer2.0.downsample.1.bias": (128,),
    "layer4.1.bn2.weight": (512,),
}
RESNET50_SAMPLE = {
    "layer1.0.conv1.weight": (64, 64, 1, 1),
    "layer1.0.downsample.0.weight": (256, 64, 1, 1),
    "layer2.0.conv2.weight": (128, 128, 3, 3),
    "layer3.5.conv3.weight": (1024, 256, 1, 1),
    "layer4.2.bn3.running_mean": (2048,),
}


@pytest.mark.parametrize(
    ("name", "num", "sample"), [("resnet18", 11_176_512, RESNET18_SAMPLE), ("resnet50", 23_508_032, RESNET50_SAMPLE)]
)
def test_resnets_have_torchvisions_names_and_sizes(name: str, num: int, sample: dict) -> None:
    state = ResNet(name).state_dict()
    assert {key: tuple(state[key].shape) for key in sample} == sample
    # torchvision's counts, 11,689,512 and 25,557,032, without the classifier's.
    assert sum(p.numel() for p in ResNet(name).parameters()) == num
    assert not any(key.startswith(("fc", "mean", "deviation")) for key in state)


def rename(key: str) -> str:
    """transformers' name of a ResNet's weight from torchvision's."""
    bn = {"weight": "weight", "bias": "bias", "running_mean": "running_mean", "running_var": "running_var"}
    parts = key.split(".")
    leaf = parts[-1]
    if parts[0] in ("conv1", "bn1"):
        return f"embedder.embedder.{'convolution' if parts[0] == 'conv1' else 'normalization'}.{leaf}"
    start = f"encoder.stages.{int(parts[0][5:]) - 1}.layers.{parts[1]}"
    if parts[2] == "downsample":
        return f"{start}.shortcut.{'convolution' if parts[3] == '0' else 'normalization'}.{leaf}"
    kind = "convolution" if parts[2].startswith("conv") else "normalization"
    return f"{start}.layer.{int(parts[2][-1]) - 1}.{kind}.{bn.get(leaf, leaf)}"


@pytest.mark.parametrize(
    ("name", "kind", "depths", "sizes"),
    [
        ("resnet18", "basic", [2, 2, 2, 2], [64, 128, 256, 512]),
        pytest.param("resnet50", "bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048], marks=slow),
    ],
)
def test_resnets_compute_what_transformers_does(name: str, kind: str, depths: list[int], sizes: list[int]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    own = ResNet(name).eval()
    for module in own.modules():  # fresh statistics would hide a norm in the wrong place
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.2, 0.2)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    config = transformers.ResNetConfig(layer_type=kind, depths=depths, hidden_sizes=sizes, embedding_size=64)
    theirs = transformers.ResNetModel(config).eval()
    missing = theirs.load_state_dict({rename(key): value for key, value in own.state_dict().items()}, strict=False)
    assert not missing.unexpected_keys and not missing.missing_keys
    pixels = torch.rand(1, 3, 64, 96)
    normal = (pixels - own.mean) / own.deviation
    with torch.no_grad():
        found = own(pixels * 2 - 1)
        wanted = theirs(normal, output_hidden_states=True).hidden_states[1:]
    assert [tuple(each.shape[-2:]) for each in found] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_of_a_file_are_taken_without_their_classifier(tmp_path: Path, suffix: str) -> None:
    torch.manual_seed(3)
    weights = {**ResNet("resnet18").state_dict(), "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    path = tmp_path / f"resnet18-f37072fd{suffix}"
    torch.save(weights, path) if suffix == ".pth" else save_file(weights, path)
    config = dbnet.Config(
        **{**TINY, "image_size": 64, "held_out": 1, "num_images": 2}, colour=True, backbone="resnet18",
        backbone_weights=str(path),
    )  # fmt: skip
    model = dbnet.build(config, seed=7).model
    assert torch.equal(model.backbone.layer2[0].conv1.weight, weights["layer2.0.conv1.weight"])
    other = dbnet.build(config.model_copy(update={"backbone_weights": None}), seed=7).model
    assert not torch.equal(other.backbone.layer2[0].conv1.weight, weights["layer2.0.conv1.weight"])


class Hostile:
    def __reduce__(self):
        return (Path.touch, (Path("was_here"),))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b"nothing"), "are no weights"),
        (lambda path: torch.save({"conv1.weight": Hostile()}, path), "are no weights"),
        (lambda path: torch.save([1, 2], path), "are no weights"),
        (lambda path: torch.save({}, path), "has no 'conv1.weight'"),
        (lambda path: torch.save(ResNet("resnet50").state_dict(), path), "does not fit"),
        (lambda path: torch.save({**ResNet("resnet18").state_dict(), "neck": torch.ones(1)}, path), "has 'neck'"),
    ],
)
def test_other_files_are_one_line_and_nothing_is_run(tmp_path: Path, monkeypatch, content, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    content(tmp_path / "weights.pth")
    with pytest.raises(TargetError) as error:
        load_weights(ResNet("resnet18"), tmp_path / "weights.pth", "resnet18")
    assert said in str(error.value) and "weights.pth" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "was_here").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["backbone=resnet18"], "Set colour=true"),
        (["backbone_weights=x.pth"], "Set backbone=resnet18"),
        (["test_height=100"], "no multiple of 32"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(settings: list[str], said: str) -> None:
    with pytest.raises(TargetError, match=said):
        load_target("dbnet", pairs=settings)


@slow
def test_the_papers_settings_read_a_folder_and_train(tmp_path: Path) -> None:
    save_icdar(tmp_path)
    small = [f"icdar_folder={tmp_path}", "image_size=64", "test_height=64", "batch_size=2", "neck=8", "head=8"]
    workload = load_target("dbnet:icdar2015", pairs=[*small, "total_steps=6", "learning_rate=0.01"]).build()
    result = Trainer(workload, plan="fp32", folder=None, steps=6).run()
    assert result.applied == 6 and result.metric is not None and 0 <= result.metric <= 1
    assert result.last_loss is not None and result.first_loss is not None and result.last_loss < result.first_loss
