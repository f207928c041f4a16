"""ResNet-18 and ResNet-50 as backbones, with the names that torchvision's weights have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from floatline.errors import TargetError

ResNetName = Literal["resnet18", "resnet50"]
_BLOCKS: dict[ResNetName, tuple[int, ...]] = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
# What torchvision's weights were trained with: mean and deviation of red, green and blue, from 0 to 1.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ResNetBlock(nn.Module):
    """Two convolutions of 3x3, or three where the middle one is 3x3, beside a shortcut.

    Args:
        inputs: Channels that come in.
        width: Channels inside.
        stride: Of the first 3x3 convolution.
        expansion: How many times `width` goes out: 1, or 4 for the block with three convolutions.
    """

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        kernels = (3, 3) if expansion == 1 else (1, 3, 1)
        outputs = width * expansion
        widths = [inputs, *[width] * (len(kernels) - 1), outputs]
        for i, kernel in enumerate(kernels):
            own = stride if i == kernels.index(3) else 1
            self.add_module(f"conv{i + 1}", nn.Conv2d(widths[i], widths[i + 1], kernel, own, kernel // 2, bias=False))
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(widths[i + 1]))
        self._num = len(kernels)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        inner = x
        for i in range(1, self._num + 1):
            inner = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(inner))
            inner = F.relu(inner) if i < self._num else inner
        return F.relu(inner + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Features of four stages, from a quarter of the picture's resolution on; pictures come in from -1 to 1.

    Args:
        name: Which one.
    """

    def __init__(self, name: ResNetName) -> None:
        super().__init__()
        expansion = 1 if name == "resnet18" else 4
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs, inner = 64, (64, 128, 256, 512)
        for i, (width, num) in enumerate(zip(inner, _BLOCKS[name], strict=True)):
            blocks: list[nn.Module] = []
            for block in range(num):
                blocks.append(ResNetBlock(inputs, width, 2 if i > 0 and block == 0 else 1, expansion))
                inputs = width * expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.widths = tuple(width * expansion for width in inner)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(_DEVIATION).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> list[Tensor]:
        """The stages, the finest first."""
        x = ((images + 1) / 2 - self.get_buffer("mean")) / self.get_buffer("deviation")
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        found: list[Tensor] = []
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
            found.append(x)
        return found


def load_weights(network: ResNet, path: str | Path, name: ResNetName) -> None:
    """Take weights with torchvision's names; the classifier among them is left out.

    Args:
        network: Gets them.
        path: .safetensors, or .pth as torchvision's are; of the latter tensors are read and nothing else.
        name: Which network it is, for what is said.

    Raises:
        TargetError: A file that is not there, cannot be read, or has other weights in it.
    """
    weights = {key: value for key, value in _read(Path(path)).items() if not key.startswith("fc.")}
    own = network.state_dict()
    wrong = [key for key, value in weights.items() if key not in own or own[key].shape != value.shape]
    missing = [key for key in own if key not in weights and not key.endswith("num_batches_tracked")]
    if wrong or missing:
        what = f"has no '{missing[0]}'" if missing else f"has '{wrong[0]}', which does not fit"
        raise TargetError(f"backbone_weights '{path}' {what}. Give weights of {name} with torchvision's names.")
    network.load_state_dict(weights, strict=False)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        found: Any = load_file(path) if path.suffix == ".safetensors" else _read_pth(path)
    except OSError as error:
        raise TargetError(f"backbone_weights '{path}' cannot be read: {error.strerror}. Check the path.") from None
    except Exception:  # what torch refuses to unpickle is of a class of pickle's; all say the same here
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in cast("Any", found).values()):
        raise TargetError(
            f"backbone_weights '{path}' are no weights. Give a .safetensors or .pth file of torchvision's."
        )
    return cast("dict[str, Tensor]", found)


def _read_pth(path: Path) -> object:
    return torch.load(path, map_location="cpu", weights_only=True)  # pyright: ignore[reportUnknownMemberType]
