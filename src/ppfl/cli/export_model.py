"""`ppfl export`: one client's model as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SettingError
from .terminal import say


def export_command(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run, or a saved fit.")],
    client: Annotated[str, typer.Option(help="The id of the client.")],
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="<client>.safetensors")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX, which gives predictions.")] = False,
) -> None:
    """Write one client's own model to a file: its weights, or the whole model as ONNX."""
    from ..fitted import load
    from ..io.files import folder_name
    from ..networks.peft_files import save_weights

    fitted = load(path)
    model = fitted.model(client)  # first: a client that is not known should leave nothing behind
    ending = ".onnx" if onnx else ".safetensors"
    place = Path(f"{folder_name(client, 'client')}{ending}") if out is None else out
    if place.exists():
        raise SettingError(f"{place} exists; choose another --out, or move it away")
    if onnx:
        fitted.export_onnx(client, place)
        say(f'written to {place}: predictions of client {client!r}; its input is called "x"')
    else:
        save_weights(place, model)
        say(f"written to {place}: the weights of client {client!r}; read them with safetensors.torch.load_file")
