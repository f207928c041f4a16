"""What a run really computes in, measured in one of its steps: the manifest, its verdict, and what was believed."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.manifests.expectation import Expectation
    from floatline.manifests.judge import ManifestLine
    from floatline.manifests.live import manifest
    from floatline.manifests.manifest import Manifest

__all__ = ["Expectation", "Manifest", "ManifestLine", "manifest"]

__getattr__ = offer(
    __name__,
    {"Expectation": "expectation", "Manifest": "manifest", "ManifestLine": "judge", "manifest": "live"},
)
