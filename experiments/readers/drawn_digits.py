"""Coloured digits drawn from strokes: a domain of images that needs no files and no fonts."""

from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ppfl.core.draws import uniform
from ppfl.data.files import check_limit
from ppfl.errors import DataError

SIZE = 28  # pixels
_HALF = 6.0  # a template covers [-6, 6] x [-6, 6]; in these units a digit is 4 wide and 6 high
_FINE = 96  # pixels of a template, several for each pixel of an image
_CHUNK = 512  # images drawn together, to limit memory

# Two shapes of each digit. A stroke is a list of points; each point is a column (0 to 4) and a row (0 to 6).
_GLYPHS = (
    (
        ("10 30 41 45 36 16 05 01 10",),
        ("11 20 26",),
        ("01 10 30 41 42 06 46",),
        ("01 10 30 41 42 33 23", "23 33 44 45 36 16 05"),
        ("36 30 04 44",),
        ("40 00 03 12 32 43 45 36 16 05",),
        ("41 30 10 01 05 16 36 45 44 33 13 04",),
        ("00 40 16",),
        ("10 30 41 42 33 13 02 01 10", "13 33 44 45 36 16 05 04 13"),
        ("05 16 36 45 41 30 10 01 02 13 33 42",),
    ),
    (
        ("00 40 46 06 00",),
        ("02 20 26", "16 36"),
        ("00 40 43 03 06 46",),
        ("00 40 22 33 44 45 36 16 05",),
        ("00 03 43", "40 46"),
        ("40 00 03 43 46 06",),
        ("30 11 04 05 16 36 45 44 33 13 04",),
        ("00 40 26", "23 43"),
        ("00 40 43 03 00", "03 43 46 06 03"),
        ("46 40 00 03 43",),
    ),
)
_ROUNDINGS = (0, 3)  # how often corners are cut: never (sharp corners), or three times (nearly a curve)
STYLES = len(_GLYPHS) * len(_ROUNDINGS)


def drawn_digits(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images (count, 3, 28, 28) in [0, 1] and labels: digits in several styles, rotated, slanted and stretched.

    Stroke and background have colours of different lightness that change over the image. Strokes differ in width and
    sharpness, parts of other digits may be visible at the sides, and there is noise. An image depends only on the
    seed and its position, not on the number of images.

    >>> x, y = drawn_digits(5)
    >>> x.shape, y.dtype, torch.equal(drawn_digits(3)[0], x[:3])
    (torch.Size([5, 3, 28, 28]), torch.int64, True)
    """
    if count < 1:
        raise DataError(f"{count} digits to draw; ask for at least 1")
    size = count * 3 * SIZE * SIZE * torch.float32.itemsize
    check_limit("bytes", size, f"{count:,} digits need {size:,} bytes", "draw fewer, or ")
    parts = [_drawn(at, seed) for at in torch.split(torch.arange(count), _CHUNK)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


class _RandomNumbers:
    """Random numbers for the images at these positions, independent for each purpose."""

    def __init__(self, seed: int, at: Tensor) -> None:
        self.seed, self.at = seed, at

    def between(self, low: float, high: float, purpose: str, *shape: int) -> Tensor:
        """Uniform numbers (n, *shape)."""
        inner = torch.arange(torch.Size(shape).numel())
        drawn = uniform(self.seed, "drawn digits", purpose, self.at[:, None], inner)
        return (low + (high - low) * drawn).float().reshape(len(self.at), *shape)

    def below(self, end: int, purpose: str) -> Tensor:
        """Integers (n,) from 0 to end - 1."""
        return self.between(0, end, purpose).long().clamp_(max=end - 1)


def _drawn(at: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    random = _RandomNumbers(seed, at)
    y = random.below(10, "label")
    ink = _ink(random, y)
    light = random.between(0, 1, "light", 1, 1, 1)
    gap = random.between(0.25, 0.75, "gap", 1, 1, 1)
    ground = _shade(random, light, "ground")
    # the lightness of stroke and background differs by at least a quarter, also if it wraps around
    stroke = _shade(random, (light + gap) % 1, "stroke")
    noise = random.between(-1, 1, "noise", 3, SIZE, SIZE) * random.between(0, 0.15, "noisiness", 1, 1, 1)
    return (ground + ink * (stroke - ground) + noise).clamp_(0, 1), y


def _ink(random: _RandomNumbers, y: Tensor) -> Tensor:
    """How much of each pixel is covered by strokes (n, 1, 28, 28); half of the images have a neighbour on each side."""
    style = random.below(STYLES, "style")
    width = random.between(0.3, 0.7, "width", 1, 1, 1)
    softness = random.between(0.3, 1.0, "softness", 1, 1, 1)
    pitch = random.between(4.8, 6.0, "pitch")
    turned, centre = _affine(random)

    def digit(label: Tensor, aside: Tensor) -> Tensor:
        place = torch.cat([turned, (centre - torch.stack([aside, 0 * aside], 1))[:, :, None]], 2) / _HALF
        grid = F.affine_grid(place, [len(y), 1, SIZE, SIZE], align_corners=False)
        away = F.grid_sample(_templates()[style, label][:, None], grid, padding_mode="border", align_corners=False)
        return ((width - away) / softness + 0.5).clamp_(0, 1)

    ink = digit(y, torch.zeros(len(y)))
    for side, name in ((-1, "left"), (1, "right")):
        there = random.below(2, f"{name} is there")[:, None, None, None]
        ink = torch.maximum(ink, there * digit(random.below(10, name), side * pitch))
    return ink


def _affine(random: _RandomNumbers) -> tuple[Tensor, Tensor]:
    """Random maps from image coordinates in [-1, 1] to template units: matrices (n, 2, 2) and shifts (n, 2)."""
    angle, slant = random.between(-0.3, 0.3, "angle"), random.between(-0.3, 0.3, "slant")
    size = random.between(3.7, 4.8, "size")
    wide = size * random.between(0.8, 1.25, "stretch")
    rows = [angle.cos() * wide, slant * size - angle.sin() * size, angle.sin() * wide, angle.cos() * size]
    return torch.stack(rows, 1).reshape(-1, 2, 2), random.between(-0.6, 0.6, "shift", 2)


def _shade(random: _RandomNumbers, light: Tensor, name: str) -> Tensor:
    """A colour of this lightness (n, 3, 28, 28) with a small gradient in a random direction."""
    tint = random.between(-0.3, 0.3, f"{name} tint", 3, 1, 1)
    along, down = random.between(-0.1, 0.1, f"{name} slope", 2, 1, 1).unbind(1)
    line = torch.linspace(-1, 1, SIZE)
    slope = (along * line + down * line[:, None])[:, None]
    return (light + tint - tint.mean(1, keepdim=True) + slope).clamp_(0, 1)


@cache
def _templates() -> Tensor:
    """Distance of every template pixel from the strokes (styles, 10, 96, 96), for any stroke width and softness."""
    line = (torch.arange(_FINE) + 0.5) * (2 * _HALF / _FINE) - _HALF
    pixels = torch.stack(torch.meshgrid(line, line, indexing="xy"), 2).reshape(-1, 2)
    fields = [_distance(pixels, strokes, cuts) for glyphs in _GLYPHS for cuts in _ROUNDINGS for strokes in glyphs]
    return torch.stack(fields).reshape(STYLES, 10, _FINE, _FINE)


def _distance(pixels: Tensor, strokes: tuple[str, ...], cuts: int) -> Tensor:
    nearest = torch.full((len(pixels),), torch.inf)
    for stroke in strokes:
        points = torch.tensor([[int(place[0]) - 2.0, int(place[1]) - 3.0] for place in stroke.split()])
        for _ in range(cuts):
            points = _cut_corners(points)
        for start, end in pairwise(points):
            way = end - start
            share = (((pixels - start) @ way) / way.dot(way)).clamp_(0, 1)
            nearest = torch.minimum(nearest, (pixels - start - share[:, None] * way).norm(dim=1))
    return nearest


def _cut_corners(points: Tensor) -> Tensor:
    """Replace each corner by two points beside it (Chaikin); the ends stay, and a closed stroke stays closed.

    >>> _cut_corners(torch.tensor([[0.0, 0.0], [4.0, 0.0], [4.0, 4.0]])).tolist()
    [[0.0, 0.0], [3.0, 0.0], [4.0, 1.0], [4.0, 4.0]]
    """
    before, after = points[:-1], points[1:]
    cut = torch.stack([0.75 * before + 0.25 * after, 0.25 * before + 0.75 * after], 1).flatten(0, 1)
    if torch.equal(points[0], points[-1]):
        return torch.cat([cut, cut[:1]])
    return torch.cat([points[:1], cut[1:-1], points[-1:]])
