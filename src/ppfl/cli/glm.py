"""`ppfl glm`: a table with a client column, fitted, shown and written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ..errors import SettingError
from .terminal import make_console, printable, say

if TYPE_CHECKING:  # importing scikit-learn takes a second, which other commands need not wait for
    from ..glm.table import OnStep, TableFit


def glm_command(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A table in csv (.gz, .bz2, .xz, .zst and .zip too) or parquet.")],
    client: Annotated[str, typer.Option(metavar="COLUMN", help="The client of every row.", show_default=False)] = "",
    target: Annotated[str, typer.Option(metavar="COLUMN", help="The column to predict.", show_default=False)] = "",
    formula: Annotated[
        str | None,
        typer.Option(
            help="Instead of --client, --target, --columns and --shared: 'reaction ~ days + (days | subject)'. After "
            "the bar is the client column, before it the terms whose coefficients vary between clients."
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="Distribution of the target, such as gaussian, gamma, poisson, bernoulli or multinomial; a name that "
            "does not exist lists all.",
            show_default="guessed",
        ),
    ] = None,
    k: Annotated[
        str, typer.Option("-k", metavar="K[,K...]", help="Number of canonical models, several to choose from, or auto.")
    ] = "auto",
    choose: Annotated[
        str,
        typer.Option(
            help="How K is chosen: held_out (the smallest K that predicts held-out rows of its clients well), "
            "prediction (the K that predicts them best) or bic."
        ),
    ] = "held_out",
    residual: Annotated[
        str,
        typer.Option(
            help="Normal effects of each client around the canonical models, as in a mixed model: none, intercept, "
            "diagonal or full; auto chooses with K, and is none for one K."
        ),
    ] = "auto",
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN[,COLUMN...]",
            help="Features; text is encoded. '' for none: clients differ in their intercepts only.",
            show_default="all other columns",
        ),
    ] = None,
    shared: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN[,COLUMN...]",
            help="Columns with one coefficient for all clients; also 'intercept' or 'all'.",
        ),
    ] = None,
    mix: Annotated[str, typer.Option(help="What a membership mixes: weights or predictions.")] = "weights",
    penalty: Annotated[float, typer.Option(help="How strongly similar clients are pulled together.")] = 0.0,
    affinity: Annotated[str, typer.Option(help="Which clients are similar: uniform, features or labels.")] = "uniform",
    ridge: Annotated[float, typer.Option(help="L2 penalty on the coefficients of standardised columns.")] = 1.0,
    test_fraction: Annotated[float, typer.Option(help="Share of each client's rows to hold out.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    n_init: Annotated[int, typer.Option(help="Number of starts; all but the first are random. The best is used.")] = 1,
    sep: Annotated[str, typer.Option(help="What separates the cells of a csv file: one character, or tab.")] = ",",
    decimal: Annotated[str, typer.Option(help="The decimal point in a csv file.")] = ".",
    out: Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="runs/glm-<FILE>")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Fit K canonical GLMs and one membership per client to a table."""
    from ..data.table_files import file_stem, read_table
    from ..glm.table import TableSettings, fit_table
    from ..io.files import folder_name

    named = TableSettings(client, target, formula=formula)  # checks them before a large file is read
    frame = read_table(file, client=named.client, sep="\t" if sep in ("tab", "\\t") else sep, decimal=decimal)
    settings = TableSettings(
        client, target, family, None if columns is None else _split_names(columns, frame.columns), _parse_ks(k),
        test_fraction, seed, _split_names(shared, frame.columns), mix, penalty, affinity, ridge, n_init, formula,
        choose, None if residual == "none" else residual,
    )  # fmt: skip
    with _show_steps(quiet=quiet) as on_step:
        fitted = fit_table(frame, settings, on_step)
    folder = Path("runs") / folder_name(f"glm-{file_stem(file)}", "file") if out is None else out
    page = _write(fitted, folder, file, _command_line(context))
    if not quiet:
        _print(fitted, file)
        say(f"the report is {page}; memberships.csv, coefficients.csv and result.json are in the same folder")


def _print(fitted: TableFit, file: Path) -> None:
    from ..data.table_files import file_stem
    from ..report import glm_page
    from ..report.terminal import show

    for line in (glm_page.headline(fitted, file_stem(file)), *glm_page.notes(fitted)):
        say(line)
    show(*glm_page.tables(fitted))


def _write(fitted: TableFit, folder: Path, file: Path, command: str) -> Path:
    """Write all files, each of them completely or not at all, and return the report."""
    from ..data.table_files import file_stem
    from ..glm.table import file_contents
    from ..io.files import make_folder, write_text
    from ..report.glm_page import write_glm_report
    from ..report.theme import model_names
    from ..runs import package_version

    about = {"command": command, "file": str(file), "ppfl": package_version("ppfl")}
    make_folder(folder)
    for name, content in file_contents(fitted, model_names(fitted.best.k), about).items():
        write_text(folder / name, content)
    return write_glm_report(fitted, folder, file_stem(file), command)


def _split_names(values: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Column names, separated by commas or given one at a time; a known name may contain a comma."""
    return [name for value in values or () for name in ([value] if value in known else value.split(",")) if name]


def _parse_ks(text: str) -> list[int] | str:
    try:
        return text if text == "auto" else sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise SettingError(f"-k is {text!r}; give a whole number such as 3, several such as 1,2,3, or auto") from None


@contextmanager
def _show_steps(*, quiet: bool) -> Iterator[OnStep | None]:
    """A status line on a terminal, else one line per step."""
    console = make_console(error=True)
    if quiet:
        yield None
    elif console.is_terminal:
        with console.status("") as status:
            yield lambda *step: status.update(Text(printable(_step_line(*step))))
    else:
        yield lambda *step: say(_step_line(*step), error=True)


def _step_line(step: str, number: int, steps: int) -> str:
    return f"fitting {step} ({number} of {steps})"


def _command_line(context: typer.Context) -> str:
    """The command with all its options, to run it again."""
    parts = ["ppfl", "glm"]
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        value = context.params.get(name)
        if source is None or source.name != "COMMANDLINE" or name == "quiet":
            continue
        values = value if isinstance(value, list | tuple) else [value]
        option = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
        parts += [part for item in values for part in (*option, str(item))]
    return shlex.join(parts)
