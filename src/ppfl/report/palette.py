"""Colours that people with any colour vision can tell apart (Okabe and Ito, 2008)."""

from collections.abc import Sequence

_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
_SKY, _VERMILION, _YELLOW, _GREY = (
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
)  # no black: dark mode

_MODELS = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _VERMILION, _YELLOW, _GREY)
_METHODS = (
    _VERMILION,
    _BLUE,
    _GREEN,
    _PURPLE,
    _ORANGE,
    _SKY,
    _GREY,
)  # no yellow: a line would vanish on white
_DASHES = (None, "7 3", "2.5 2.5", "9 3 2 3")

# Readable on white and on black, for pictures that may be shown on either.
MIDDLE_GREY = "#7A8088"


def model_colour(position: int) -> str:
    """The colour of the canonical model with the position-th largest share; lighter each time the palette repeats.

    >>> model_colour(0), model_colour(8)
    ('#0072B2', '#73B1D5')
    """
    turn, at = divmod(position, len(_MODELS))
    keep = 0.55**turn
    channels = (int(_MODELS[at][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - keep * (255 - channel)):02X}" for channel in channels)


def mixed_colour(shares: Sequence[float]) -> str:
    """The colour of a client with these memberships: the mean of the colours of the models, weighted by its shares.

    >>> mixed_colour([1.0, 0.0]), mixed_colour([0.5, 0.5])
    ('#0072B2', '#738859')
    """
    mixed = ""
    for start in (1, 3, 5):
        channels = (int(model_colour(at)[start : start + 2], 16) for at in range(len(shares)))
        mixed += f"{round(sum(share * channel for share, channel in zip(shares, channels, strict=True))):02X}"
    return f"#{mixed}"


def method_colour(position: int) -> str:
    """The colour of the position-th method. When the palette repeats, lines are dashed (`method_dash`).

    >>> method_colour(0) == method_colour(7), method_dash(0), method_dash(7)
    (True, None, '7 3')
    """
    return _METHODS[position % len(_METHODS)]


def method_dash(position: int) -> str | None:
    """The dash pattern of the lines of the position-th method; None is a solid line."""
    return _DASHES[position // len(_METHODS) % len(_DASHES)]
