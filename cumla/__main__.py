"""The command line: `cumla replay`, `check`, `bench`, `warmup`, `export` and `info` (or `python -m cumla ...`)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from . import __doc__ as summary
from . import __version__
from .cli.options import CommandParser, Parser
from .errors import InputError, RunError
from .kernels.cpu.threads import num_cores

COMMANDS = {  # files of cli/
    "replay": "replay a request trace through the paged cache and the attention layers",
    "check": "compare every backend that can run here with the reference",
    "bench": "time the operations on this machine, compare and draw results",
    "warmup": "compile, test and store on disk the kernels that serving a model needs",
    "export": "compiled kernels and their launches in one file, for engines without Python",
    "info": "versions, devices and backends, and how to install what is missing",
}


def make_parser() -> Parser:
    parser = Parser(prog="cumla", description=summary)
    parser.add_argument("--version", action="version", version=f"cumla {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


def main(argv: Sequence[str] | None = None, parser: Parser | None = None) -> int:
    """Run a command. Returns the exit status; errors that a user can fix are one line on stderr.

    Args:
        parser: sets `run`, a function of the parsed options; None: `cumla`'s own
    """
    needs_less = "smaller sizes need less"
    _replace_closed_streams()
    if sys.stdout is None:  # closed by the caller: `>&-`
        return _fail("cannot write: stdout is closed", 1)
    try:
        args = (make_parser() if parser is None else parser).parse_args(argv)
        needs_less = getattr(args, "needs_less", needs_less)
        _check_environment()
        status: int = args.run(args)
        sys.stdout.flush()  # while a failure can still be reported
        return status
    except InputError as error:
        return _fail(str(error), 2)
    except RunError as error:
        return _fail(str(error), 1)
    except MemoryError:
        return _fail(f"out of memory; {needs_less}", 1)
    except KeyboardInterrupt:
        print("cumla: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # stdout: commands handle errors of their own files
        return _stdout_is_gone(error)


def _replace_closed_streams() -> None:
    """Open the null device as stdin and stderr where the caller closed them (`<&-`, `2>&-`).

    Otherwise lines of progress would be printed to stdout.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _check_environment() -> None:
    """Check the environment variables that would otherwise raise an error in the middle of a command, or silence it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and not int(columns):  # unknown, as for shutil; Rich would print nothing
        del os.environ["COLUMNS"]
    try:
        num_cores()
    except ValueError as error:
        raise InputError(str(error)) from None


def _stdout_is_gone(error: OSError) -> int:
    """The exit status for a closed pipe, silently, or a full disk, with an error line. Raises any other error."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        raise error
    with contextlib.suppress(OSError, ValueError):  # otherwise Python would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if error.errno == errno.EPIPE else _fail(f"cannot write: {error.strerror}", 1)


def _fail(message: str, status: int) -> int:
    """Print one line; a terminal gets it wrapped between words."""
    line = f"cumla: error: {message}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
