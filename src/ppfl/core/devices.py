"""Where tensors are computed."""

import torch

from ..errors import SettingError


def usable_device(device: torch.device | str) -> torch.device:
    """The device, or an error of one line where this machine or this torch has none like it.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(f"device is {str(device)!r}, which cannot be used here ({reason}); use 'cpu'") from None
    return found
