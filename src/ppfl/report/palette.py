"""Colours that people with any colour vision tell apart (Okabe and Ito, 2008)."""

_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
_SKY, _VERMILION, _YELLOW, _GREY = "#56B4E9", "#D55E00", "#F0E442", "#999999"  # grey: black is lost at night

_MODELS = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _VERMILION, _YELLOW, _GREY)
_METHODS = (_VERMILION, _BLUE, _GREEN, _PURPLE, _ORANGE, _SKY, _GREY, _YELLOW)

# Readable on white and on black, for pictures that do not know where they will be shown.
MIDDLE_GREY = "#7A8088"


def model_colour(position: int) -> str:
    """Of the canonical model with the position-th largest share; lighter each time the palette is used up.

    >>> model_colour(0), model_colour(8)
    ('#0072B2', '#73B1D5')
    """
    return _cycle(_MODELS, position)


def method_colour(position: int) -> str:
    """Of the position-th method."""
    return _cycle(_METHODS, position)


def _cycle(colours: tuple[str, ...], position: int) -> str:
    turn, at = divmod(position, len(colours))
    keep = 0.55**turn
    channels = (int(colours[at][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - keep * (255 - channel)):02X}" for channel in channels)
