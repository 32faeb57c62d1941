"""The `circuits` command.

A command is a module of this package and one line in `COMMANDS`. The module defines:

- ``HELP``: what it does, in one line;
- ``EXAMPLES``: command lines that work as they stand;
- ``add_arguments(parser)``: its own arguments (the shared ones are in `options`);
- ``run(args)``: do it; returns None or an exit status. What is slow to import (torch, pandas, rich) is imported here.

Bad input is raised as a ValueError, TypeError, KeyError, IndexError or OSError by whoever notices it, and becomes one
line on standard error and exit status 2.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast, runtime_checkable

from analysis.cli.errors import BAD_INPUT, accept_every_character, guarded, one_line

COMMANDS: tuple[str, ...] = (
    "report",
    "params",
    "heads",
    "ranks",
    "composition",
    "circuit",
    "attribution",
    "paths",
    "ablate",
    "patch",
    "verify",
    "models",
    "train",
)


@runtime_checkable
class Command(Protocol):
    """What a module of a command defines."""

    HELP: str
    EXAMPLES: Sequence[str]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, args: argparse.Namespace) -> int | None:
        """Do the work; None is success."""


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line that points to the help."""
        self.exit(BAD_INPUT, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, without the program's name, and return its exit status."""
    if argv is None:  # this process is the command, so its streams are ours
        accept_every_character()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        return guarded("circuits", lambda: print(overview()))
    if words[0] == "--version":
        return guarded("circuits", lambda: print(version()))
    name = words[0]
    if name not in COMMANDS:
        print(f"circuits: {unknown(name)}", file=sys.stderr)
        return BAD_INPUT
    try:
        return guarded(f"circuits {name}", lambda: _run(name, words[1:]))
    except SystemExit as done:  # argparse has printed the help, or what is wrong
        return int(done.code or 0)


def _run(name: str, words: Sequence[str]) -> int | None:
    command = find(name)
    return command.run(parser_of(name, command).parse_args(words))


def find(name: str) -> Command:
    """The module of a command."""
    return cast(Command, importlib.import_module(f"{__name__}.{name}"))


def parser_of(name: str, command: Command) -> argparse.ArgumentParser:
    """The argument parser of a command, its examples below the arguments."""
    parser = Parser(
        prog=f"circuits {name}",
        description=command.HELP,
        epilog="\n".join(["examples:", *(f"  {line}" for line in command.EXAMPLES)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return parser


def overview() -> str:
    """What `circuits --help` prints: every command with its line."""
    width = max((len(name) for name in COMMANDS), default=0)
    return "\n".join(
        [
            "usage: circuits COMMAND [arguments]",
            "",
            "The circuits of GPT-style transformers: measured, drawn and accounted for exactly.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {find(name).HELP}" for name in COMMANDS),
            "",
            "`circuits COMMAND --help` shows the arguments of a command, with examples.",
            "Every command takes --json for output that a program can read.",
        ]
    )


def unknown(name: str) -> str:
    """The message for a command that does not exist, with the nearest that do."""
    kind = "option" if name.startswith("-") else "command"
    close = difflib.get_close_matches(name, COMMANDS, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else f"the commands are {', '.join(COMMANDS)}"
    return f"there is no {kind} {name!r}; {hint}"


def version() -> str:
    """The version of the distribution."""
    from circuits import __version__

    return f"qkov {__version__}"
