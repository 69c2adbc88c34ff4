"""`ppfl predict` and `ppfl export`: clients' own models, of a finished run, a saved fit or a site's store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SettingError
from .terminal import say

if TYPE_CHECKING:
    from ..federation.site_tools import SiteModels

SITE_FILE = ".toml"
RunOption = Annotated[str | None, typer.Option(help="Of a site's runs, which one.", show_default="the latest")]


def export_command(
    path: Annotated[
        Path, typer.Argument(metavar="MODELS", help="The folder of a finished run, a saved fit, or site.toml.")
    ],
    client: Annotated[str | None, typer.Option(help="The id of the client.", show_default="all, at a site")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="<client>.safetensors")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX, which gives predictions.")] = False,
    run: RunOption = None,
) -> None:
    """Write one client's own model to a file, its weights or the whole model as ONNX; or those of a site's clients."""
    if path.suffix == SITE_FILE:
        from ..sites import export_models

        models, place = _site_models(path, run), Path("models") if out is None else out
        chosen = () if client is None else (client,)
        written = export_models(models.personal, place, chosen, onnx=onnx, name_of=models.name_of)
        say(f"the models of {len(written)} clients are in {place}; they are of run {models.run}")
        return
    if client is None:
        raise SettingError("name the client whose model is written: --client ID")
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


def predict_command(
    path: Annotated[Path, typer.Argument(metavar="SITE", help="The config of a site, site.toml.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="New rows, csv or parquet, with a column of clients.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the predictions, as csv.")],
    client_column: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Whose model is used.", show_default="as in the config")
    ] = None,
    run: RunOption = None,
) -> None:
    """At a site: predict new rows, each with the model of its own client."""
    from ..federation.site_settings import load_site
    from ..sites import predict_table

    models = _site_models(path, run)
    column = client_column or str(getattr(load_site(path).data, "client", "client"))
    count = predict_table(models.personal, data, column, out, models.name_of)
    say(f"{count} predictions are in {out}; the models are of run {models.run}")


def _site_models(file: Path, run: str | None) -> SiteModels:
    from ..federation.site_settings import load_site
    from ..federation.site_tools import load_site_models

    return load_site_models(load_site(file), file.parent.resolve(), run)
