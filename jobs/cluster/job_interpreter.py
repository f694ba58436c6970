"""Make the Python that runs Ray on a cluster's head known to the command of a job.

Ray runs that command in a shell. If the environment of a head was not activated when Ray was
started there, `python` is another Python in that shell, or none. But the actor that starts the
shell is run by the Python that runs Ray, and the shell inherits the actor's variables. Every worker
of a job loads this, so it imports nothing of ours.
"""

import os
import sys

INTERPRETER = "HEADCOUNT_PYTHON"  # the variable that holds the path of the Python that runs Ray


def make_interpreter_known() -> None:
    """Called by Ray in every worker process of a job when it starts (`SETUP_HOOK`)."""
    os.environ[INTERPRETER] = sys.executable


SETUP_HOOK = f"{__name__}.{make_interpreter_known.__name__}"
"""The function above, as Ray wants it named."""
