"""`ppfl glm`: a table with a client column, fitted, shown and written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..core.errors import SettingError
from ..data.table_readers import read_frame, stem
from ..runs import package_version
from ..runs.storage import write_text

if TYPE_CHECKING:  # a command that needs no scikit-learn does not wait for it
    from ..glm.table_fit import OnStep, TableFit

WIDE = 140  # columns, where no terminal says how many there are
PAGE = "report.html"


def glm_command(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A table in csv (.gz too) or parquet.")],
    client: Annotated[str, typer.Option(metavar="COLUMN", help="Whose row each is.")],
    target: Annotated[str, typer.Option(metavar="COLUMN", help="What is predicted.")],
    family: Annotated[
        str | None,
        typer.Option(help="gaussian, poisson, gamma, bernoulli or multinomial.", show_default="guessed"),
    ] = None,
    k: Annotated[
        str,
        typer.Option("-k", metavar="K[,K...]", help="Canonical models; of several, the number with the lowest BIC."),
    ] = "3",
    columns: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN[,COLUMN...]", help="Features; text is encoded.", show_default="all others"),
    ] = None,
    shared: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN[,COLUMN...]", help="Alike for everybody; 'intercept' and 'all' are known, too."),
    ] = None,
    mix: Annotated[str, typer.Option(help="What a membership mixes: weights or predictions.")] = "weights",
    penalty: Annotated[float, typer.Option(help="How strongly clients that are alike pull each other.")] = 0.0,
    affinity: Annotated[str, typer.Option(help="Who is alike: uniform, features or labels.")] = "uniform",
    ridge: Annotated[float, typer.Option(help="Holds coefficients of standardised columns.")] = 1.0,
    test_fraction: Annotated[float, typer.Option(help="Rows of each client to hold out.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    n_init: Annotated[int, typer.Option(help="Starts, of which the best is taken.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="runs/glm-<FILE>")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Fit K canonical GLMs to a table, and a membership for every client."""
    from ..glm.table_data import TableSettings
    from ..glm.table_fit import fit_table

    frame = read_frame(file, client)
    settings = TableSettings(
        client, target, family, _names(columns, frame.columns), _numbers(k), test_fraction, seed,
        _names(shared, frame.columns), mix, penalty, affinity, ridge, n_init,
    )  # fmt: skip
    with _show_steps(quiet=quiet) as on_step:
        fitted = fit_table(frame, settings, on_step)
    place = Path("runs") / f"glm-{stem(file)}" if out is None else out
    page = _write(fitted, place, file, _as_typed(context))
    if not quiet:
        _print(fitted, file)
        print(f"the report is {page}; memberships.csv, coefficients.csv and result.json are beside it")


def _print(fitted: TableFit, file: Path) -> None:
    from .glm_tables import coefficient_table, division_table, head_lines, score_table, trial_table

    console = Console(width=None if sys.stdout.isatty() else WIDE)
    for line in head_lines(fitted, stem(file)):
        console.print(line, markup=False, highlight=False)
    parts = [trial_table(fitted)] if len(fitted.candidates) > 1 else []
    parts.append(coefficient_table(fitted))
    parts += [division_table(fitted)] if fitted.best.k > 1 else []
    parts += [score_table(fitted)] if fitted.scores else []
    for part in parts:
        console.print()
        console.print(part.title, style="bold", markup=False, highlight=False)
        console.print(part.table)
        if part.note:
            console.print(part.note, markup=False, highlight=False)
    console.print()


def _write(fitted: TableFit, place: Path, file: Path, command: str) -> Path:
    """Every file whole or not at all; returns the page."""
    from ..glm.table_files import files_of
    from ..glm.table_fit import CLEAR
    from ..report import PopulationResults, render_population
    from ..report.sorted_memberships import letter
    from .glm_tables import table_notes

    table, k = fitted.table, fitted.best.k
    models = f"{k} canonical models" if k > 1 else "one model for all"
    page = render_population(
        PopulationResults(
            title=f"{table.target.name} in {stem(file)}: {models}",
            command=command,
            notes=[*table_notes(fitted), f"ppfl {package_version('ppfl')}, torch {package_version('torch')}."],
            client=fitted.settings.client,
            target=table.target.name,
            features=table.features,
            family=table.target.family,
            classes=table.target.classes,
            mix=fitted.settings.mix,
            rows=len(table.frame),
            held_out_rows=int(table.is_test.sum()),
            ids=fitted.ids,
            sizes=fitted.sizes,
            memberships=fitted.memberships,
            clear=fitted.clear,
            clear_from=CLEAR,
            average=fitted.terms.average,
            coefficients=fitted.terms.coefficients,
            candidates=fitted.candidates,
            scores=fitted.scores,
        )
    )
    about = {"command": command, "file": str(file), "ppfl": package_version("ppfl")}
    files = files_of(fitted, [letter(at) for at in range(k)], about) | {PAGE: page}
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_text(place / name, content)
    return place / PAGE


def _names(values: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Columns that were named, several at a time or one by one; a name may have a comma in it."""
    return [name for value in values or () for name in ([value] if value in known else value.split(",")) if name]


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise SettingError(f"-k is {text!r}; give a whole number such as 3, or several such as 1,2,3") from None


@contextmanager
def _show_steps(*, quiet: bool) -> Iterator[OnStep | None]:
    """A line that moves on a terminal, else a line for each step."""
    console = Console(stderr=True)
    if quiet:
        yield None
    elif console.is_terminal:
        with console.status("") as status:
            yield lambda step, at, steps: status.update(f"fitting {step} ({at} of {steps})")
    else:
        yield lambda step, at, steps: print(f"fitting {step} ({at} of {steps})", file=sys.stderr)


def _as_typed(context: typer.Context) -> str:
    """The command with all that was set, so that it can be given again."""
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
