"""What a command line shows when something goes wrong: one line and an exit status, never a stack trace.

Setting the environment variable ``CIRCUITS_TRACEBACK`` shows the trace after all, for whoever looks for a fault.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

FAULT = 1
BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
BROKEN_PIPE = 141  # 128 + SIGPIPE


def guarded(program: str, work: Callable[[], int | None]) -> int:
    """Run `work` and turn whatever it raises into one line on standard error and an exit status."""
    try:
        status = work()
        if sys.stdout is not None:  # closed by the caller, as in `circuits heads >&-`
            sys.stdout.flush()
        return status or 0
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `circuits heads | head`
        _abandon_stdout()
        return BROKEN_PIPE
    except Exception as error:
        if os.environ.get("CIRCUITS_TRACEBACK"):
            raise
        return _report(program, error)


def describe(error: Exception) -> str:
    """The message of an exception in one line, without the quotes of a KeyError or the number of an OSError."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, KeyError) and error.args:
        return one_line(str(error.args[0]))
    return one_line(str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """The text with every run of white space, line breaks included, as one space."""
    return " ".join(text.split())


def accept_every_character() -> None:
    r"""Let the streams of this process write what their encoding lacks as ``\u0394``, not fail on it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(program: str, error: Exception) -> int:
    if isinstance(error, ValueError | TypeError | KeyError | IndexError | OSError):
        print(f"{program}: {describe(error)}", file=sys.stderr)
        return BAD_INPUT
    kind = type(error).__name__
    print(f"{program}: {kind}: {describe(error)} (CIRCUITS_TRACEBACK=1 shows where)", file=sys.stderr)
    return FAULT


def _abandon_stdout() -> None:
    """Send what is still buffered nowhere, or the interpreter complains again when it exits."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # a stdout that is no file, as under a test
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
