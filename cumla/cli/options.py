"""Options of the commands: types with bounds, a parser whose errors are one line, and parsers of commands."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError
from ..replay.trace import INT32_MAX

MAX_HEADS = 128
MAX_BATCH = 4096
MAX_SIZE = 2**20  # the largest array size that an option takes
MAX_SEED = 2**47  # 16 more bits still fit in a 64-bit integer


class HelpFormatter(argparse.HelpFormatter):
    """Keeps paragraphs apart, each wrapped to the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(HelpFormatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


class Store(argparse.Action):
    """Stores a value, and the option in `passed`: whether an option applies is known once all are parsed."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        if option is not None:
            namespace.passed = (*namespace.passed, self.option_strings[-1])


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all errors of cumla's commands."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **kwargs)
        self.register("action", None, Store)
        self.set_defaults(passed=())

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        """For --help and --version. argparse ignores errors of writing."""
        print(message, end="", file=file, flush=True)


class CommandParser(Parser):
    """The parser of a command. Its file is imported, and says its options, when the command is parsed."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._loaded = False

    def load(self) -> None:
        """Add the options."""
        if not self._loaded:
            self._loaded = True
            importlib.import_module(f"cumla.cli.{self.prog.split()[-1]}").add_options(self)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self.load()
        return super().parse_known_args(args, namespace)


class OneOf:
    """An argparse type: one of some names. (`choices` would also have to contain the empty list of no arguments.)"""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __call__(self, text: str) -> str:
        if text not in self.names:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {', '.join(self.names)}")
        return text


class Between:
    """An argparse type: an integer within bounds."""

    def __init__(self, minimum: int, maximum: int) -> None:
        self.minimum, self.maximum = minimum, maximum

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = self.minimum - 1
        if not self.minimum <= value <= self.maximum:
            raise argparse.ArgumentTypeError(
                f"got {text!r:.80}, expected an integer from {self.minimum} to {self.maximum}"
            )
        return value


class ListOf:
    """An argparse type: a comma list of integers within bounds."""

    def __init__(self, part: Between) -> None:
        self.part = part

    def __call__(self, text: str) -> list[int]:
        return [self.part(part) for part in text.split(",")]


def add_model(parser: argparse.ArgumentParser, kinds: Iterable[str]) -> argparse._ArgumentGroup:
    """Add the options that say which model's calls are meant, and return their group."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--config", type=Path, metavar="FILE",
        help="config.json of a DeepSeek V2, V3, V3.2, V4 or V4.1, GLM-5, Mistral Large 4 or Hy4 model; - for stdin",
    )  # fmt: skip
    add_number(model, "--ranks", 1, MAX_SIZE, "ranks that share the heads of --config", default=1)
    model.add_argument("--kind", choices=tuple(kinds), default="v4", help="without --config (default: v4)")
    add_number(model, "--heads", 1, MAX_HEADS, "query heads of a rank, without --config", default=64)
    add_number(model, "--topk", 1, MAX_SIZE, "rows a token selects, without --config", default=512)
    return model


def add_number(
    group: argparse._ActionsContainer, option: str, least: int, most: int, what: str = "", *, unit: str = "N",
    default: Any = None, shown: str = "",
) -> None:  # fmt: skip
    """Add an option that takes an integer within bounds, or a comma list of them if that is the default.

    Args:
        what: help text before the bounds and the default
        shown: text in place of the default
    """
    number, many = Between(least, most), isinstance(default, list)
    bounds = f"{least} to {most}" if most < INT32_MAX else f"from {least}"
    shown = shown or f"(default: {','.join(map(str, default)) if many else default})"
    group.add_argument(
        option, type=ListOf(number) if many else number, default=default,
        metavar=f"{unit},{unit},..." if many else unit,
        help=f"{what}, {bounds} {shown}" if what else f"{bounds} {shown}",
    )  # fmt: skip
