"""Commands for finished runs and saved fits: `show`, `report`, `predict` and `export`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SettingError
from .program import program
from .terminal import say, show

if TYPE_CHECKING:
    from ..report import Comparison
    from ..sites.model_files import FindName
    from ..sites.personal_models import PersonalModels

CLIENTS = 20  # rows of the table of clients
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, a folder of runs, or of a comparison.")]


def show_command(
    path: RunPath,
    client: Annotated[str | None, typer.Option(help="Show this client alone.", show_default=False)] = None,
) -> None:
    """Show how a run went and who the clients are; of a comparison, its methods."""
    from ..report.run_tables import client_table, round_table
    from ..report.theme import evenly, plural

    found = _runs_in([path])
    if client is not None:
        table = client_table(found)
        rows = tuple(row for row in table.rows if row[0] == client)
        if not rows:
            raise SettingError(f"there is no client {client!r}; ids look like {table.rows[0][0]!r}")
        show(table._replace(rows=rows))
        return
    folder = shlex.quote(str(found.methods[0].first.folder))
    if len(found.methods) > 1:
        show(found.table)
        say(f"look at one run with: {program()} show {folder}")
        return
    run = found.methods[0].first
    from ..report.text import run_line

    say(run_line(run))
    show(round_table(run)._replace(title="Rounds"))
    clients = client_table(found)
    shown = evenly(len(clients.rows), CLIENTS)
    note = () if len(shown) == len(clients.rows) else (
        f"{len(shown)} of {plural(len(clients.rows), 'client')}, evenly from all; one with --client ID.",
    )  # fmt: skip
    show(clients._replace(rows=tuple(clients.rows[at] for at in shown), notes=note))
    if others := [str(other.folder) for other in found.methods[0].runs[1:]]:
        say(f"other runs here: {', '.join(others)}")


def report_command(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or comparisons.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="the folder of the first")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The title of the page.", show_default=False)] = None,
    figures: Annotated[
        str, typer.Option(metavar="svg,png,pdf", help="Write every chart in these formats too.", show_default=False)
    ] = "",
    tables: Annotated[
        str, typer.Option(metavar="csv,md,tex", help="Write every table in these formats too.", show_default=False)
    ] = "",
) -> None:
    """Write a report, one page that works without a network, of runs that are finished or not."""
    from ..report import export

    found = _runs_in(paths)
    place = paths[0] if out is None else out
    wanted = [[part for part in text.split(",") if part] for text in (figures, tables)]
    written = export(found, place, *wanted) if any(wanted) else []
    say(f"the report is {found.report(place, title or paths[0].resolve().name)}")
    if written:
        say(f"{len(written)} charts and tables are in {place}")


def _runs_in(paths: list[Path]) -> Comparison:
    """The runs in these folders; those of a comparison by the names of their methods."""
    from ..report import Comparison
    from ..runs import find_runs, load_run

    folders = [folder for path in paths for folder in find_runs(path)]
    records = [load_run(folder) for folder in folders]
    methods = [folder.resolve().parent.name for folder in folders]
    return Comparison.of(records, methods if len({*methods}) > 1 else None)


ModelsPath = Annotated[
    Path, typer.Argument(metavar="MODELS", help="The folder of a finished run, a saved fit, or a site's site.toml.")
]
RunOption = Annotated[
    str | None, typer.Option(help="Of a site's runs, which one.", show_default="the one evaluated last")
]


def _models(path: Path, run: str | None) -> tuple[PersonalModels, FindName | None, str]:
    """The models of clients, what finds a client by the name that is given, and the column that has these names."""
    if path.suffix != ".toml":
        from ..fitted import load

        return load(path).personal, None, "client"
    from ..federation.site_settings import load_site
    from ..federation.site_tools import load_site_models

    settings = load_site(path)
    found = load_site_models(settings, path.parent.resolve(), run)
    return found.personal, found.name_of, str(getattr(settings.data, "client", "client"))


def predict_command(
    models: ModelsPath,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="New rows, csv or parquet, with a column of clients.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write, as csv.")],
    client_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The column that says whose model is used.", show_default="client"),
    ] = None,
    run: RunOption = None,
) -> None:
    """Predict new rows of a table, each with the model of its own client."""
    from ..sites.model_files import predict_table

    found, name_of, column = _models(models, run)
    count = predict_table(found, data, client_column or column, out, name_of)
    say(f"{count:,} predictions are in {out}")


def export_command(
    models: ModelsPath,
    clients: Annotated[
        list[str] | None, typer.Option("--client", help="A client; may be repeated.", show_default="all")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to: one file per client.")] = Path(
        "models"
    ),
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX, which gives predictions.")] = False,
    run: RunOption = None,
) -> None:
    """Write clients' own models to files: weights as safetensors or whole models as ONNX, and their memberships."""
    from ..sites.model_files import export_models

    found, name_of, _ = _models(models, run)
    written = export_models(found, out, clients or (), onnx=onnx, name_of=name_of)
    how = "ONNX, with an input called x" if onnx else "weights; read them with safetensors.torch.load_file"
    say(f"the models of {len(written):,} clients are in {out} ({how})")
