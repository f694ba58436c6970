"""Start Python as a fork of a process that has imported everything.

Ray runs this file in place of its own `setup_worker.py`, if a node is told so
(`tests/tools/workers.py`), and pytest in place of Python for the processes that test
(`tests/tools/forked_tests.py`). It imports little, because Ray runs it for every worker.
"""

import json
import os
import socket
import sys

SERVER = "HEADCOUNT_WORKERS"
"""The variable with the path of the socket at which the process listens."""


def main() -> None:
    """Ask for a fork, which gets this command line, environment, directory, input and outputs."""
    request = [sys.argv[1:], dict(os.environ), os.getcwd()]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SERVER])
        socket.send_fds(connection, [b"o"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        # The answer is the end of the connection: the fork is there.
        connection.recv(1)


if __name__ == "__main__":
    main()
