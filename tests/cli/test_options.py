"""Every option of every command, with invalid values: it runs, or is refused in one line that names the option.

For a file the line has its path.
"""

import argparse
import re

import pytest

from cumla.__main__ import main, make_parser
from cumla.cli.options import Between, ListOf

INT32_MAX = 2**31 - 1
VALUES = (
    "0", "-1", "1.5", "nan", "inf", "", " ", "x", "1e3", "0x10", str(INT32_MAX), str(2**31), str(2**64), str(10**30),
    "9" * 5000, "1,", ",", "\N{ARABIC-INDIC DIGIT THREE}",
)  # fmt: skip
SEEDS = 2**47


class RunError(Exception):
    """Raised where a command would start its work."""


def commands():
    (subparsers,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for parser in subparsers.choices.values():
        parser.load()
    return subparsers.choices


def arguments():
    """Commands and their arguments, without flags."""
    for command, parser in commands().items():
        for action in parser._actions:
            if action.nargs != 0:
                option = action.option_strings[-1] if action.option_strings else action.dest
                yield pytest.param(command, option, id=f"{command} {option}")


def numbers():
    for command, parser in commands().items():
        for action in parser._actions:
            if isinstance(action.type, (Between, ListOf)):
                bounds = action.type if isinstance(action.type, Between) else action.type.part
                yield pytest.param(command, action.option_strings[-1], bounds, id=f"{command} {action.dest}")


@pytest.fixture(autouse=True)
def nothing_is_run(monkeypatch, tmp_path):
    def begin(*args, **keywords):
        raise RunError

    of_commands = ("check.run", "warmup.run", "export.run", "info.run")
    for function in (*of_commands, "bench.measure", "replay.replay", "replay.replay_on_ranks"):
        monkeypatch.setattr(f"cumla.cli.{function}", begin)
    monkeypatch.setattr("cumla.cli.replay.limit_blas_threads", lambda: None)
    monkeypatch.chdir(tmp_path)


def refusal(capsys, *argv):
    """The line with which a command refuses arguments; None if it accepts them."""
    try:
        status = main(argv)
    except RunError:
        return None
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2, line
    return line


@pytest.mark.parametrize(("command", "option"), list(arguments()))
def test_any_value_is_taken_or_refused_by_name(capsys, command, option):
    for value in VALUES:
        given = [f"{option}={value}"] if option.startswith("-") else ["--", value]
        line = refusal(capsys, command, *given)
        assert line is None or option in line or value[:20] in line, (value, line)


@pytest.mark.parametrize(("command", "option", "bounds"), list(numbers()))
def test_numbers_have_two_ends(capsys, command, option, bounds):
    """Arrays are indexed by 32 bits: no array can have a larger size."""
    assert bounds.maximum <= (SEEDS if option == "--seed" else INT32_MAX)
    for value in (bounds.minimum - 1, bounds.maximum + 1, 2**63, 10**30):
        line = refusal(capsys, command, f"{option}={value}")
        assert line.startswith(f"cumla: error: argument {option}: got '{value}', expected an integer from ")
        assert f"from {bounds.minimum} to {bounds.maximum} " in line
    parse = make_parser().parse_args
    for value in (bounds.minimum, bounds.maximum):
        parsed = getattr(parse([command, f"{option}={value}"]), option.lstrip("-").replace("-", "_"))
        assert parsed in (value, [value])


def test_whole_numbers_are_parsed_within_bounds_alone():
    """An option whose default or whose reader is numeric has a type with lower and upper limits, as its help says."""
    found = 0
    for command, parser in commands().items():
        for action in parser._actions:
            default = action.default[0] if isinstance(action.default, list) else action.default
            is_number = isinstance(default, int) and not isinstance(default, bool)
            if is_number or action.metavar in ("N", "TOKENS", "N,N,...") or action.type is int:
                assert isinstance(action.type, (Between, ListOf)), (command, action.dest)
                bounds = getattr(action.type, "part", action.type)
                assert re.search(rf"from {bounds.minimum} |{bounds.minimum} to {bounds.maximum} ", action.help)
                found += 1
    assert found > 15
