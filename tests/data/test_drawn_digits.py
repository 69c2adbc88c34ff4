"""Drawn digits depend on the seed only, have all labels equally often, and are legible."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ppfl.core.errors import DataError
from ppfl.data import drawn_digits
from ppfl.data.drawn_digits import STYLES, _templates


def test_an_image_depends_on_its_seed_and_position_only():
    x, y = drawn_digits(600, seed=1)  # more than one chunk
    again, labels = drawn_digits(530, seed=1)
    assert torch.equal(again, x[:530]) and torch.equal(labels, y[:530])
    assert not torch.equal(drawn_digits(530, seed=2)[0], again)
    assert len({image.numpy().tobytes() for image in x}) == 600


def test_images_are_coloured_and_labels_are_balanced():
    x, y = drawn_digits(2000)
    assert (x.dtype, x.shape[1:]) == (torch.float32, (3, 28, 28))
    assert x.min() >= 0 and x.max() <= 1
    assert (y.bincount(minlength=10) - 200).abs().max() < 5 * 200**0.5  # five standard deviations
    assert ((x[:, 0] - x[:, 1]).flatten(1).abs().mean(1) > 0.01).float().mean() > 0.9


def test_all_digits_have_different_strokes():
    ink = (_templates() < 0.5).flatten(2).float()
    assert ink.shape[:2] == (STYLES, 10)
    common = ink @ ink.transpose(1, 2)
    size = ink.sum(2)
    overlap = common / (size[:, :, None] + size[:, None] - common)
    assert (overlap - torch.eye(10)).max() < 0.95


def test_digits_are_legible():
    """The nearest image by shape, light on dark or dark on light, mostly has the same label; chance is a tenth."""
    x, y = drawn_digits(2400)
    shapes = _shapes(x)
    similarity = (shapes[2000:] @ shapes[:2000].T).abs()
    assert (y[:2000][similarity.argmax(1)] == y[2000:]).float().mean() > 0.75


def _shapes(x: Tensor) -> Tensor:
    light = F.avg_pool2d(x.mean(1, keepdim=True), 2)[:, 0]
    light = light - light.flatten(1).median(1).values[:, None, None]
    return F.normalize(light[:, 2:-2, 3:-3].flatten(1))


def test_drawing_zero_digits_is_refused():
    with pytest.raises(DataError, match="0 digits to draw; ask for at least 1"):
        drawn_digits(0)
