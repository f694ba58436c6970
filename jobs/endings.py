"""How a command ends that fails or is stopped: with a line for people, and a code for programs.

| code | why |
|---|---|
| 0 | it has done what it was asked for |
| 1 | `check`, `doctor` or `diff` found something amiss, or the reader of stdout closed it |
| 2 | an error, which is said in a line |
| 130 | an interrupt stopped it: 128 + the number of the signal |
| 143, 129 | SIGTERM or SIGHUP stopped it, likewise |

An interrupt may come anywhere: during an import, inside a library that turns it into an error of
its own, or where Python can raise nothing. So one handler hears all signals, and one place catches
everything.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Literal, NoReturn

from headcount.schemas.errors import HeadcountError, printable
from headcount.schemas.process import UNENDING

CONTINUABLE = (
    "scan", "resume", "compact", "reproduce", "calibrate", "export", "cache-plan", "watch",
)  # fmt: skip
"""Commands that the same command continues after they were stopped."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command: from a terminal, from a scheduler, and after a lost connection."""

INTERRUPTED = {128 + signal.SIGINT: signal.SIGINT, int(signal.SIGTERM): signal.SIGTERM}
"""Exit codes that stand for a signal: of an interrupt in the command line library, and of SIGTERM
in Ray, while it starts.
"""

FINISHING_SECONDS = 25.0
"""After a first SIGTERM, work in hand is waited for so long. Schedulers kill after 30 s."""

CLEANING_SECONDS = 20.0
"""Exit after this time even if the processes that the command started have not ended, or a request
to a store.
"""

UNHEARD_SECONDS = 2.0
"""The main thread hears a signal at once, unless it is inside a library."""

END = b"\0"  # what the watcher hears at the end of the process; no signal has this number

TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
SCARCE = TOO_MANY_FILES | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of the system if it has no more space, or no more open files."""

DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}  # errors of what is not allowed
DEBUG = "HEADCOUNT_DEBUG"  # if this variable is set, errors of ours show a stack trace


class Stopped(BaseException):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _ProcessState:
    """What this module knows of its process. There is one, so these are class attributes."""

    is_a_command = False  # whether this process runs a command, and is no notebook
    stop_signal: int | None = None  # the signal that asked this process to end; none if none did
    heard = 0.0  # when the main thread last heard such a signal, by the monotonic clock
    has_children = False  # whether this process has started others, which must be ended with it
    work: Literal["idle", "in hand", "finishing"] | None = None
    """What a block has in hand that can finish it before the process ends; none outside of one."""
    exit_code = 0  # with which it ends, once its end has begun
    time_limit: threading.Timer | None = None  # ends the work in hand if it takes too long


@contextlib.contextmanager
def starting_processes() -> Iterator[None]:
    """Start other processes in a block; a command that is stopped from here on ends them."""
    _ProcessState.has_children = True
    yield
    # Ray takes SIGTERM for itself when it starts.
    if _ProcessState.is_a_command:
        listen_to_signals()


@contextlib.contextmanager
def finishing_work_in_hand() -> Iterator[None]:
    """Let a block finish what it has in hand after a first SIGTERM, within some seconds.

    The block says `work_begins`, asks `is_finishing` and ends by itself. Then `Stopped` is raised,
    as it is when the time is over and at a second signal.
    """
    _ProcessState.work = "idle"
    try:
        yield
        if _ProcessState.work == "finishing":
            raise Stopped(signal.SIGTERM)
    finally:
        _ProcessState.work = None
        if _ProcessState.time_limit is not None:
            _ProcessState.time_limit.cancel()
            _ProcessState.time_limit = None


def is_a_command() -> bool:
    """Whether this process runs a command, and is no notebook or another program."""
    return _ProcessState.is_a_command


def work_begins() -> None:
    """Say that from here on there is work in hand that is worth finishing."""
    if _ProcessState.work == "idle":
        _ProcessState.work = "in hand"


def is_finishing() -> bool:
    """Whether SIGTERM has come, so that the work in hand is finished and no other is begun."""
    return _ProcessState.work == "finishing"


@contextlib.contextmanager
def ended_in_lines() -> Iterator[None]:
    """Turn everything that ends a command early into lines on stderr and an exit code."""
    _open_standard_streams()
    _ProcessState.is_a_command = True
    # A test may run several commands in one process.
    _ProcessState.stop_signal = None
    previous_handlers = listen_to_signals()
    previous_hook, sys.unraisablehook = sys.unraisablehook, _repeat_interrupt
    # Python writes the number of each signal there, whatever the main thread does.
    previous_watcher = signal.set_wakeup_fd(_watcher().fileno(), warn_on_full_buffer=False)
    try:
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_watcher)
            # What is printed may fail only now: on a full disk, or to a closed pipe.
            sys.stdout.flush()
    except (KeyboardInterrupt, Stopped) as end:
        _end_stopped(end.number if isinstance(end, Stopped) else signal.SIGINT)
    except SystemExit as end:
        if end.code in INTERRUPTED:
            _end_stopped(INTERRUPTED[end.code])
        raise
    except BrokenPipeError:
        # The reader has enough, as `head` has.
        _drop_unwritable_output()
        sys.exit(1)
    except Exception as error:
        _end_failed(error)
    finally:
        sys.unraisablehook = previous_hook
        # With children, a signal during their end must still find our handlers.
        if not _ProcessState.has_children:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)


def _open_standard_streams() -> None:
    """Let stdout and stderr accept everything that is printed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # A closed stream swallows what is printed. It stays open as long as the process lives.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure") and stream.errors == "strict":
            # A stream in ASCII shows a character that it lacks as \\u….
            stream.reconfigure(errors="backslashreplace")


def _end_failed(error: Exception) -> NoReturn:
    """Say what went wrong and exit with code 2; in debug mode, raise a mistake of ours instead."""
    if _ProcessState.stop_signal is not None:
        # A library made an error of its own of the interrupt.
        _end_stopped(_ProcessState.stop_signal)
    if os.environ.get(DEBUG) and not isinstance(error, HeadcountError):
        raise error
    _drop_unwritable_output()
    for line in lines_of(error):
        # An indented line belongs to the one before, for example a scan that would do.
        _say(f"{'' if line.startswith('    ') else 'error: '}{printable(line)}".rstrip())
    _exit_for_sure(2)


def listen_to_signals() -> dict[signal.Signals, signal.Handlers]:
    """Let the signals that end a command unwind it; returns the handlers before."""
    # Python allows it in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return {}
    previous: dict[signal.Signals, signal.Handlers] = {}
    for number in STOPPING:
        handler = signal.getsignal(number)
        # The shell may want some ignored, as `nohup` does. None is a handler that a library set in
        # C, which Python could not put back.
        if handler is not signal.SIG_IGN and handler is not None:
            previous[number] = handler  # pyright: ignore[reportArgumentType]
            signal.signal(number, _stop)
    return previous


@cache
def _watcher() -> socket.socket:
    """Where a thread hears of signals, and of the end of this process, and leaves if it must.

    In the main thread a library may wait for a store's answer for minutes, and at the end for
    processes of Ray's.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while received := reader.recv(1):
            if received == END:
                # In this thread, because Python 3.12 starts none at the end.
                time.sleep(CLEANING_SECONDS)
                os._exit(_ProcessState.exit_code)
            if (number := received[0]) in STOPPING:
                # Without work in hand, SIGTERM is an interrupt like any other.
                may_finish = number == signal.SIGTERM and (
                    _ProcessState.work is not None or _ProcessState.has_children
                )
                seconds = FINISHING_SECONDS if may_finish else UNHEARD_SECONDS
                _timer(seconds, _leave_if_unheard, number, time.monotonic())

    threading.Thread(target=watch, daemon=True).start()
    return writer


def _leave_if_unheard(number: int, came: float) -> None:
    # The main thread may have heard it before the watcher did.
    if _ProcessState.heard < came - 1:
        _leave(_stopped_line(), 128 + number)


# The signals of a process that this one forks are not its own.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
os.register_at_fork(after_in_child=_watcher.cache_clear)


def _stop(number: int, frame: FrameType | None) -> None:
    """Unwind the command, or leave at once during an import if there is nothing to end."""
    _ProcessState.stop_signal = number
    _ProcessState.heard = time.monotonic()
    if number == signal.SIGTERM and _ProcessState.work == "in hand":
        _ProcessState.work = "finishing"
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        # A second SIGTERM when the time is over, to the main thread: it must interrupt what that
        # thread waits for.
        second_signal = (main_thread, int(signal.SIGTERM))
        _ProcessState.time_limit = _timer(FINISHING_SECONDS, signal.pthread_kill, *second_signal)
        return
    # Libraries turn an interrupt during an import into other errors.
    while frame is not None and not _ProcessState.has_children:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave(_stopped_line(), 128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)


def _timer(seconds: float, call: Callable[..., object], *arguments: object) -> threading.Timer:
    """A call some seconds from now, which keeps no process alive."""
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()
    return timer


def _repeat_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeat an interrupt from where Python can raise nothing: it would print it and continue."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt | Stopped):
        sys.__unraisablehook__(unraisable)
        return
    number = _ProcessState.stop_signal or signal.SIGINT
    if not _ProcessState.has_children:
        _leave(_stopped_line(), 128 + number)
    # A moment later, when the destructor has ended.
    _timer(0.01, signal.raise_signal, number)


def _end_stopped(number: int) -> NoReturn:
    """Say that the command was stopped, and exit; the processes that it started end with it."""
    _say(_stopped_line())
    for other in STOPPING:
        # A second interrupt must not cut the end of Ray's processes short.
        signal.signal(other, signal.SIG_IGN)
    _drop_unwritable_output()
    _exit_for_sure(128 + number)


def _exit_for_sure(code: int) -> NoReturn:
    """Exit, within `CLEANING_SECONDS` of the process's end; at once if something computes on."""
    if UNENDING:
        for tidy_up in [*UNENDING.values()]:
            tidy_up()
        os._exit(code)
    _ProcessState.exit_code = code
    atexit.register(_watcher().send, END)
    sys.exit(code)


def fail_at_once(line: str, last_word: Callable[[], object]) -> None:
    """End a command with an error, from any thread; do nothing in a notebook or another program."""
    if _ProcessState.is_a_command:
        _leave(f"error: {printable(line)}", 2, last_word)


def _leave(line: str, code: int, last_word: Callable[[], object] = lambda: None) -> NoReturn:
    """Exit without unwinding. Files are written whole or not at all, so none is half written."""
    # A progress bar hides the cursor.
    show_cursor = "\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):
        # Not `print`: the signal may have come in the middle of one.
        os.write(2, f"{show_cursor}{line}\n".encode())
    last_word()
    os._exit(code)


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
    # A library may have wrapped the error with which the system refused space or access.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in SCARCE | DENIED:
            return [_refused_by_system(cause)]
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OSError):
        return [_refused_by_system(error)]
    # Nobody foresaw it. Its stack trace is kept in a file.
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="headcount-error-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write("".join(traceback.format_exception(error)))
        trace = f"its stack trace is in {file.name}"
    except OSError:
        trace = f"{DEBUG}=1 shows its stack trace"
    return [f"this is a mistake in headcount ({what}); {trace}"]


def _refused_by_system(error: OSError) -> str:
    from headcount.schemas.reasons import reason

    problem = f"{error.filename}: {reason(error)}" if error.filename is not None else reason(error)
    if error.errno in TOO_MANY_FILES:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{problem}; this process may open {most} files: allow more with ulimit -n 1024"
    if error.errno in SCARCE:
        where = "" if error.filename else ", on the disk or in the file that stdout goes to"
        return f"{problem}{where}; free space there, or set TMPDIR to a directory with space"
    if error.errno in DENIED:
        return f"{problem}; allow it, or set HOME and TMPDIR to directories that can be written"
    return problem


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _drop_unwritable_output() -> None:
    """Drop what a full disk does not take: Python would try again at exit and print a trace."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
