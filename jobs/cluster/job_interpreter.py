"""The Python that runs Ray on a cluster's head, made known to the command of a job.

Ray runs a job's command in a shell. If the environment of a head was not activated when Ray was
started there, `python` is another Python in that shell, or none. But the actor that starts the
shell is run by the Python that runs Ray, and the shell inherits the actor's variables.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

INTERPRETER = "HEADCOUNT_PYTHON"
"""The variable that holds the path of the Python that runs Ray."""


def make_interpreter_known() -> None:
    """Put the path of this Python into the environment, for processes that are started from here.

    Ray calls this in every worker process of a job when it starts (`SETUP_HOOK`).
    """
    os.environ[INTERPRETER] = sys.executable


SETUP_HOOK = f"{__name__}.{make_interpreter_known.__name__}"
"""The function above, as Ray wants it named."""


def command_line(words: Sequence[str]) -> str:
    r"""The command of a job that runs `headcount` with some words, as a shell reads it.

    >>> print(command_line(["scan", "my texts.toml"]))
    "${HEADCOUNT_PYTHON:-python}" -m headcount scan 'my texts.toml'
    """
    return f'"${{{INTERPRETER}:-python}}" -m headcount {shlex.join(words)}'
