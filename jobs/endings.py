"""How a command ends before its end: with one line for people and an exit code for programs, on any
machine and at any moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from schemas.errors import HeadcountError, printable

OUR_PACKAGES = ("schemas", "workers", "jobs", "queries", "reproduce", "models")
"""One of these that cannot be imported is a mistake here, not a missing library."""

GOES_ON = ("scan", "resume", "compact", "reproduce")
"""Commands that go on where they were stopped."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a terminal, a scheduler and a lost connection send to end a command."""

CLEANING_SECONDS = 20.0
"""A command that was stopped ends its processes in this time, or leaves them behind."""

TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
SCARCE = TOO_MANY_FILES | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
"""What the system says where space or files run out, and where something is not allowed."""

DEBUG = "HEADCOUNT_DEBUG"
"""The variable that shows the stack trace of an error that is ours."""


class Stopped(BaseException):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Stop:
    """What was asked of this process so far."""

    number: int | None = None
    """The signal that came first."""
    has_processes = False
    """Whether this process has started others, which must be ended with it."""


def processes_start() -> None:
    """Say that other processes are about to be started: from here on a command that is stopped
    unwinds, so that they end.
    """
    _Stop.has_processes = True


@contextlib.contextmanager
def ended_in_lines() -> Iterator[None]:
    """Turn everything that ends a command into lines on stderr and an exit code."""
    _open_standard_streams()
    handlers = listen_to_signals()
    hook, sys.unraisablehook = sys.unraisablehook, _unraisable
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (KeyboardInterrupt, Stopped) as stop:
        _end_stopped(stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    except SystemExit as left:
        # What the command line library makes of an interrupt, and Ray of SIGTERM while it starts.
        if left.code == 128 + signal.SIGINT:
            _end_stopped(signal.SIGINT)
        if left.code == signal.SIGTERM:
            _end_stopped(signal.SIGTERM)
        raise
    except BrokenPipeError:
        # Whoever reads has enough, as `head` has.
        _close_stdout()
        sys.exit(1)
    except Exception as error:
        if _Stop.number is not None:
            # A library made something else of the interrupt.
            _end_stopped(_Stop.number)
        if os.environ.get(DEBUG) and not isinstance(error, HeadcountError):
            raise
        _close_stdout_if_it_fails()
        for line in lines_of(error):
            _say(f"error: {printable(line)}")
        sys.exit(2)
    finally:
        _Stop.number = None
        sys.unraisablehook = hook
        if not _Stop.has_processes:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def listen_to_signals() -> dict[signal.Signals, signal.Handlers]:
    """Have signals that end a command unwind it. Returns the handlers before.

    Those that the shell that started this process wants ignored stay ignored. Ray takes SIGTERM for
    itself when it starts, so this is called again after that.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    before: dict[signal.Signals, signal.Handlers] = {}
    for number in STOPPING:
        handler = signal.getsignal(number)
        if handler is signal.SIG_IGN or handler is None:
            continue
        before[number] = handler  # pyright: ignore[reportArgumentType]
        signal.signal(number, _stop)
    return before


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind the command, or leave at once where unwinding would be noisy and has nothing to do."""
    _Stop.number = number
    if not _Stop.has_processes and _importing(frame):
        _leave(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Stopped(number)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: libraries turn an interrupt there into errors of theirs."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeat an interrupt that came where Python can raise nothing, and would print it and go on."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt | Stopped):
        if not _Stop.has_processes:
            _leave(_Stop.number or signal.SIGINT)
        again = _Stop.number or signal.SIGINT
        threading.Timer(0.01, signal.raise_signal, [again]).start()
        return
    sys.__unraisablehook__(unraisable)


def _end_stopped(number: int) -> NoReturn:
    """Say that the command was stopped and exit; what it started ends with it."""
    _say(_stopped_line())
    for other in STOPPING:
        # A second interrupt must not cut short what ends Ray's processes.
        signal.signal(other, signal.SIG_IGN)
    if _Stop.has_processes:
        late = threading.Timer(CLEANING_SECONDS, os._exit, [128 + number])
        late.daemon = True
        late.start()
    _close_stdout_if_it_fails()
    sys.exit(128 + number)


def _leave(number: int) -> NoReturn:
    """Exit without unwinding."""
    show_cursor = "\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{show_cursor}{_stopped_line()}\n".encode())
    os._exit(128 + number)


def _stopped_line() -> str:
    if sys.argv[1:2] and sys.argv[1] in GOES_ON:
        command = "the same command without --new" if "--new" in sys.argv else "the same command"
        return f"stopped; a {sys.argv[1]} goes on where it stopped with {command}"
    return "stopped"


def lines_of(error: Exception) -> list[str]:
    """What a user is told of an error."""
    if isinstance(error, HeadcountError):
        return str(error).splitlines()
    if isinstance(error, ModuleNotFoundError):
        library = (error.name or "").partition(".")[0]
        if library and library not in OUR_PACKAGES:
            return [
                f"{library} is not installed; it comes with the extra 'scan', which measuring "
                "needs. In headcount's folder: pip install -e '.[scan]'"
            ]
    if isinstance(error, MemoryError):
        return ["the memory of this machine ran out; scan with a smaller batch_size or n_ctx"]
    if (advice := _machine_advice(error)) is not None:
        return [advice]
    return [_bug_line(error)]


def _machine_advice(error: Exception) -> str | None:
    """What to do where the machine refused, and not our code; none if it is no such error."""
    cause: BaseException | None = error
    # A library may have wrapped what the system said.
    while cause is not None and not (isinstance(cause, OSError) and cause.errno in SCARCE | DENIED):
        cause = cause.__cause__ or cause.__context__
    cause = cause or error
    if not isinstance(cause, OSError):
        return None
    from schemas.places import reason

    name = f"{cause.filename}: " if cause.filename is not None else ""
    problem = f"{name}{reason(cause)}"
    if cause.errno in TOO_MANY_FILES:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{problem}; this process may open {most} files: allow more with ulimit -n 1024"
    if cause.errno in SCARCE:
        where = "" if name else ", on the disk or in the file that stdout goes to"
        return f"{problem}{where}; free space there, or set TMPDIR to a directory with space"
    if cause.errno in DENIED:
        return f"{problem}; allow it, or set HOME and TMPDIR to directories that can be written"
    return problem


def _bug_line(error: Exception) -> str:
    """One line for an error that nobody foresaw; its trace is kept in a file."""
    trace = "".join(traceback.format_exception(error))
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="headcount-error-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(trace)
    except OSError:
        return f"this is a mistake in headcount ({what}); {DEBUG}=1 shows where it arose"
    return f"this is a mistake in headcount ({what}); where it arose is in {file.name}"


def _open_standard_streams() -> None:
    """Let stdout and stderr take whatever is printed: a stream that is closed swallows it, and one
    in ASCII shows what it cannot write as \\u….
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Open as long as the process is.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure") and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _close_stdout_if_it_fails() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _close_stdout()


def _close_stdout() -> None:
    """Throw away what could not be written, which Python would try again and complain about."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
