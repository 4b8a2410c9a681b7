"""The command line: `hermes`."""

from __future__ import annotations

import os
import sys
from errno import EPIPE
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


INTERRUPTED = 130
"""The exit code of a command that was ended by Ctrl-C."""

PIPE_CLOSED = 141
"""The exit code of a command whose output nobody reads any more, as by SIGPIPE in a shell."""


def assemble() -> typer.Typer:
    """Return the application with all its commands; each module adds its own by `register`."""
    import typer

    from hermes_ops.cli import (
        completion,
        log_commands,
        pool_commands,
        simulation_commands,
        stack_commands,
        storage_commands,
        sweep_commands,
        usage_commands,
    )

    completion.install_zsh_script()
    app = typer.Typer(name="hermes", no_args_is_help=True, pretty_exceptions_enable=False)
    shown = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    )

    @app.callback(
        help="Hyper-parameter sweeps on a shared GPU budget: convergence decides who trains."
    )
    def options(version: bool = shown) -> None:
        """Take the options that come before a command."""

    stack_commands.register(app)
    storage_commands.register(app)
    sweep_commands.register(app)
    log_commands.register(app)
    pool_commands.register(app)
    simulation_commands.register(app)
    usage_commands.register(app)
    return app


def _show_version(wanted: bool) -> None:
    """Print the version and exit where it is asked for."""
    if wanted:
        import typer

        from hermes_ops import __version__

        typer.echo(f"hermes {__version__}")
        raise SystemExit(0)


def main() -> None:
    """Run the command line; an error that is meant for the user is printed without a trace."""
    from hermes_ops.cli.completion import BASH_REQUEST, answer_bash
    from hermes_ops.errors import HermesError

    variable, by_bash = BASH_REQUEST
    try:
        if os.environ.get(variable) == by_bash:
            answer_bash(assemble(), os.environ)
        else:
            assemble()()
    except KeyboardInterrupt:  # before a command has begun; typer handles one in a command
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as left:  # typer and rich turn a closed pipe into exit code 1
        if isinstance(left.__context__, OSError) and left.__context__.errno == EPIPE:
            raise SystemExit(PIPE_CLOSED) from None
        raise
    except HermesError as error:
        from hermes_ops.cli.tables import without_controls

        print(without_controls(f"hermes: {error}"), file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None
    except OSError as error:
        if (message := _path_message(error)) is None:
            raise
        print(f"hermes: {message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None


def _path_message(error: OSError) -> str | None:
    """Return which path cannot be read or written, and the remedy; None if it is not known."""
    from hermes_ops.trial.disk_space import DISK_ERRNOS, write_remedy

    if error.errno in DISK_ERRNOS:
        place = error.filename or "a file"
        return f"{place} cannot be written ({error.strerror}): {write_remedy(error)}"
    if error.filename is None:
        return None
    return f"{error.filename}: {error.strerror}: correct the path, or its permissions"
