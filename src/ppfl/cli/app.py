"""`ppfl`: its commands, and how its errors look."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from .. import __version__
from ..errors import PPFLError, RankError
from .experiments import check_command, compare_command, demo_command, init_command, run_command, tune_command
from .federation import federation_app
from .glm import glm_command
from .reproduce import reproduce_command
from .results import export_command, predict_command, report_command, show_command
from .site import site_app
from .terminal import PlainGroup, safe_output, say

app = typer.Typer(
    cls=PlainGroup,
    help="Population personalized federated learning: K shared models, and a membership for every client.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo_command, "init": init_command, "check": check_command, "run": run_command,
    "compare": compare_command, "tune": tune_command, "glm": glm_command, "show": show_command,
    "report": report_command, "predict": predict_command, "export": export_command, "reproduce": reproduce_command,
}  # fmt: skip
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(federation_app, name="federation")
app.add_typer(site_app, name="site")


def run_command_line(arguments: Sequence[str] | None) -> None:
    """Bad input ends in one line and exit code 2, never in a traceback."""
    with safe_output():
        try:
            app(args=None if arguments is None else list(arguments), prog_name="ppfl")
        except PPFLError as error:
            from ..server import is_first_process

            if is_first_process() or isinstance(error, RankError):  # of many that fail alike, one says so
                say(f"error: {' '.join(str(error).split())}", error=True)
            sys.exit(2)
        except OSError as error:  # of a path that no file system has, a disk that is gone
            path = error.filename if isinstance(error.filename, str) else "a file"
            say(f"error: {path[:200]} cannot be used ({error.strerror or error}); check the path", error=True)
            sys.exit(2)
        except UnicodeEncodeError as error:  # click asks for a file of that name, and no file can have it
            say(f"error: {str(error.object)[:200]!r} cannot be the name of a file; check the path", error=True)
            sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"ppfl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...
