"""`python -m headcount` is the command `headcount`."""

import os.path
import sys

# Python puts the working directory first, where even a `torch.py` of the user's may lie.
if not sys.flags.safe_path:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from headcount.command_line import main

if __name__ == "__main__":
    main()
