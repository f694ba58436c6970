"""The end of a process that tests: once everything is reported, nothing else takes time.

Python would free two million objects one by one, which takes seconds in each process.
"""

import atexit
import os
import sys

import pytest


class _EndAtOnce:
    """Notes how the tests ended, and ends the process with that."""

    exit_status: int | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Note the exit status, which is known here for the first time."""
        self.exit_status = int(exitstatus)

    def end(self) -> None:
        """End the process, unless no tests were run."""
        if self.exit_status is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_status)


END_AT_ONCE = _EndAtOnce()
# What is registered first runs last: libraries still end what they have started.
atexit.register(END_AT_ONCE.end)
