"""Runs one command and turns whatever comes of it into an exit code; no traceback reaches a person."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from serve_app.cli.screen import CommandFailed, Exit, remark

DEBUG_VARIABLE = "SERVE_APP_DEBUG"
"""Set, it lets tracebacks through."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `docs/cli.md` has the exit codes."""
    from serve_app.cli.tree import NAME, command  # imports typer, which who uses a part of this room need not have

    _open_streams()
    try:
        found = command().main(args=arguments, prog_name=NAME, standalone_mode=False)
        return int(found or 0)
    except CommandFailed as failure:
        return _failed(failure)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except (BrokenPipeError, SystemExit):
        return _left_by_reader(Exit.DONE)
    except OSError as error:
        print(f"serve_app: {error}", file=sys.stderr)
        return _left_by_reader(Exit.FAILED)
    except Exception as error:
        return _failed_otherwise(error)


def _failed(failure: CommandFailed) -> int:
    if DEBUG_VARIABLE in os.environ:
        raise failure
    remark(f"serve_app: {failure}")
    return failure.code


def _failed_otherwise(error: Exception) -> int:
    """Tell of a command line that cannot be read, a person's end of input, or a fault of ours."""
    import typer
    from typer.exceptions import TyperException

    if isinstance(error, TyperException):  # it names the nearest word, and where all of them are listed
        show = getattr(error, "show", None) or (lambda: print(f"serve_app: {error}", file=sys.stderr))
        show()
        return Exit.MISUSED
    if isinstance(error, typer.Abort):
        return Exit.INTERRUPTED
    if DEBUG_VARIABLE in os.environ:
        raise error
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    remark(f"serve_app: {told}. This should not happen; {DEBUG_VARIABLE}=1 shows where it did.")
    return Exit.FAULT


def _open_streams() -> None:
    """Open streams that a shell closed (`>&-`) on nothing, and write out characters that one cannot have."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _left_by_reader(code: Exit) -> int:
    """Drop what is still buffered: whoever read us has gone, as `head` does, or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
