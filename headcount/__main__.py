"""`python -m headcount` is the command `headcount`."""

from headcount.command_line import main

if __name__ == "__main__":
    main()
