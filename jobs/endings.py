"""How a command ends that fails or is stopped: with a line for people, and a code for programs.

Exit codes: 2 for an error, 128 + the signal's number if a signal stopped the command, 1 if the
reader of stdout closed it.

Why lines: people read them, logs keep them and programs compare them, while a stack trace tells a
user nothing. An interrupt may come anywhere: during an import, inside a library that turns it into
an error of its own, or where Python can raise nothing. So one place catches everything.
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

from headcount.schemas.errors import HeadcountError, printable

CONTINUABLE = ("scan", "resume", "compact", "reproduce")
"""Commands that the same command continues after they were stopped."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command: from a terminal, from a scheduler, and after a lost connection."""

FINISHING_SECONDS = 25.0
"""After a first SIGTERM, work in hand is waited for so long. Schedulers kill after 30 s."""

CLEANING_SECONDS = 20.0
"""Exit after this time even if the processes that the command started have not ended."""

TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
SCARCE = TOO_MANY_FILES | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of the system if it has no more space, or no more open files."""

DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
"""Errors of the system if something is not allowed."""

DEBUG = "HEADCOUNT_DEBUG"
"""If this environment variable is set, an error of ours shows its stack trace."""


class Stopped(BaseException):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _ProcessState:
    """What this module knows of its process. There is one, so these are class attributes."""

    is_a_command = False
    """Whether this process runs a command of ours, and is no notebook or other program."""
    stop_signal: int | None = None
    """The signal that asked this process to end; none if none did."""
    has_children = False
    """Whether this process has started others, which must be ended with it."""
    may_finish = False
    """Whether this process is in a block that can finish its work in hand before it ends."""
    has_work_in_hand = False
    """Whether there is such work now."""
    is_finishing = False
    """Whether SIGTERM has come and the work in hand is being finished."""
    time_limit: threading.Timer | None = None
    """Ends the work in hand if it takes too long."""


def is_a_command() -> bool:
    """Whether this process runs a command of ours, and is no notebook or other program."""
    return _ProcessState.is_a_command


def processes_start() -> None:
    """Say that other processes are about to be started.

    From here on a command that is stopped unwinds, so that they are ended.
    """
    _ProcessState.has_children = True


@contextlib.contextmanager
def finishing_work_in_hand() -> Iterator[None]:
    """Let a block finish what it has in hand after a first SIGTERM, within some seconds.

    The block says `work_begins`, asks `is_finishing` and ends by itself. Then `Stopped` is raised,
    as it is when the time is over and at a second signal.
    """
    _ProcessState.may_finish = True
    _ProcessState.has_work_in_hand = _ProcessState.is_finishing = False
    try:
        yield
        if _ProcessState.is_finishing:
            raise Stopped(signal.SIGTERM)
    finally:
        _ProcessState.may_finish = False
        if _ProcessState.time_limit is not None:
            _ProcessState.time_limit.cancel()
            _ProcessState.time_limit = None


def work_begins() -> None:
    """Say that from here on there is work in hand that is worth finishing."""
    _ProcessState.has_work_in_hand = _ProcessState.may_finish


def is_finishing() -> bool:
    """Whether SIGTERM has come, so that the work in hand is finished and no other is begun."""
    return _ProcessState.may_finish and _ProcessState.is_finishing


@contextlib.contextmanager
def ended_in_lines() -> Iterator[None]:
    """Turn everything that ends a command early into lines on stderr and an exit code."""
    _open_standard_streams()
    _ProcessState.is_a_command = True
    # A test may run several commands in one process.
    _ProcessState.stop_signal = None
    previous_handlers = listen_to_signals()
    previous_hook, sys.unraisablehook = sys.unraisablehook, _repeat_interrupt
    try:
        try:
            yield
        finally:
            # What is printed may fail only now: on a full disk, or to a closed pipe.
            sys.stdout.flush()
    except (KeyboardInterrupt, Stopped, SystemExit) as end:
        number = _signal_of(end)
        if number is None:
            raise
        _end_stopped(number)
    except BrokenPipeError:
        # The reader has enough, as `head` has.
        _close_stdout()
        sys.exit(1)
    except Exception as error:
        _end_failed(error)
    finally:
        sys.unraisablehook = previous_hook
        # With children, a signal during their end must still find our handlers.
        if not _ProcessState.has_children:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)


def _signal_of(end: BaseException) -> int | None:
    """The signal behind the end of a command; none for an ordinary exit."""
    if isinstance(end, Stopped):
        return end.number
    if isinstance(end, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(end, SystemExit):
        # The command line library makes exit code 130 of an interrupt. Ray makes exit code 15 of
        # SIGTERM while it starts.
        if end.code == 128 + signal.SIGINT:
            return signal.SIGINT
        if end.code == signal.SIGTERM:
            return signal.SIGTERM
    return None


def _end_failed(error: Exception) -> NoReturn:
    """Say what went wrong and exit with code 2; in debug mode, raise an error of ours instead."""
    if _ProcessState.stop_signal is not None:
        # A library made an error of its own of the interrupt.
        _end_stopped(_ProcessState.stop_signal)
    if os.environ.get(DEBUG) and not isinstance(error, HeadcountError):
        raise error
    _close_stdout_if_it_fails()
    for line in lines_of(error):
        # An indented line belongs to the one before, for example a scan that would do.
        prefix = "" if line.startswith("    ") else "error: "
        _say(f"{prefix}{printable(line)}".rstrip())
    sys.exit(2)


def listen_to_signals() -> dict[signal.Signals, signal.Handlers]:
    """Let the signals that end a command unwind it; returns the handlers before.

    Signals that the shell wants ignored stay ignored, as `nohup` does. Ray takes SIGTERM for itself
    when it starts, so this is called again after that.
    """
    # Python allows it in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return {}
    previous: dict[signal.Signals, signal.Handlers] = {}
    for number in STOPPING:
        handler = signal.getsignal(number)
        # None is a handler that a library set in C, which Python could not put back.
        if handler is signal.SIG_IGN or handler is None:
            continue
        previous[number] = handler  # pyright: ignore[reportArgumentType]
        signal.signal(number, _stop)
    return previous


def _stop(number: int, frame: FrameType | None) -> None:
    """Unwind the command, or leave at once during an import if there is nothing to end."""
    _ProcessState.stop_signal = number
    can_finish = _ProcessState.may_finish and _ProcessState.has_work_in_hand
    if number == signal.SIGTERM and can_finish and not _ProcessState.is_finishing:
        _ProcessState.is_finishing = True
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        # A second SIGTERM when the time is over, to the main thread: it must interrupt what that
        # thread waits for.
        second_signal = (main_thread, int(signal.SIGTERM))
        timer = threading.Timer(FINISHING_SECONDS, signal.pthread_kill, second_signal)
        timer.daemon = True
        timer.start()
        _ProcessState.time_limit = timer
        return
    if not _ProcessState.has_children and _is_importing(frame):
        _leave(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Stopped(number)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: libraries turn an interrupt there into other errors."""
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            return True
        caller = caller.f_back
    return False


def _repeat_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeat an interrupt that came where Python can raise nothing, such as in a destructor.

    Python would print it and continue, so the interrupt would be lost.
    """
    if not isinstance(unraisable.exc_value, KeyboardInterrupt | Stopped):
        sys.__unraisablehook__(unraisable)
        return
    number = _ProcessState.stop_signal or signal.SIGINT
    if not _ProcessState.has_children:
        _leave(number)
    # A moment later, when the destructor has ended.
    threading.Timer(0.01, signal.raise_signal, [number]).start()


def _end_stopped(number: int) -> NoReturn:
    """Say that the command was stopped, and exit; the processes that it started end with it."""
    _say(_stopped_line())
    for other in STOPPING:
        # A second interrupt must not cut the end of Ray's processes short.
        signal.signal(other, signal.SIG_IGN)
    if _ProcessState.has_children:
        # A process that does not answer must not keep the command from ending.
        watchdog = threading.Timer(CLEANING_SECONDS, os._exit, [128 + number])
        watchdog.daemon = True
        watchdog.start()
    _close_stdout_if_it_fails()
    sys.exit(128 + number)


def _leave(number: int) -> NoReturn:
    """Exit without unwinding. Files are written whole or not at all, so none is half written."""
    # A progress bar hides the cursor.
    show_cursor = "\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):
        # Not `print`: the signal may have come in the middle of one.
        os.write(2, f"{show_cursor}{_stopped_line()}\n".encode())
    os._exit(128 + number)


def _stopped_line() -> str:
    subcommand = sys.argv[1] if len(sys.argv) > 1 else ""
    if subcommand not in CONTINUABLE:
        return "stopped"
    # The same command with --new would start one more run.
    command = "the same command without --new" if "--new" in sys.argv else "the same command"
    return f"stopped; {command} continues the {subcommand} where it stopped"


def lines_of(error: Exception) -> list[str]:
    """The lines that explain an error to a user; one for most errors."""
    if isinstance(error, HeadcountError):
        return str(error).splitlines()
    if isinstance(error, ModuleNotFoundError):
        library = (error.name or "").partition(".")[0]
        # That a module of ours is missing is a mistake here.
        if library and library != "headcount":
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
    """What to do if the system refused something; none if it is an error of ours."""
    # A library may have wrapped the error with which the system refused space or access.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in SCARCE | DENIED:
            break
        cause = cause.__cause__ or cause.__context__
    cause = error if cause is None else cause
    if not isinstance(cause, OSError):
        return None
    from headcount.schemas.files.places import reason

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
    """One line for an error that nobody foresaw. Its stack trace is kept in a file."""
    trace = "".join(traceback.format_exception(error))
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="headcount-error-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(trace)
    except OSError:
        return f"this is a mistake in headcount ({what}); {DEBUG}=1 shows its stack trace"
    return f"this is a mistake in headcount ({what}); its stack trace is in {file.name}"


def _open_standard_streams() -> None:
    """Let stdout and stderr accept everything that is printed.

    A closed stream swallows it. A stream in ASCII shows a character that it lacks as \\u….
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # It stays open as long as the process lives.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure") and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _close_stdout_if_it_fails() -> None:
    """Drop what stdout cannot write, for example on a full disk."""
    try:
        sys.stdout.flush()
    except OSError:
        _close_stdout()


def _close_stdout() -> None:
    """Drop what could not be written. Python would try again at exit and print a stack trace."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
