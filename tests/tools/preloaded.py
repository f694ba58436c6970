"""What the process that commands of tests are forked from has computed: they inherit it."""

import sys

# Whatever describes or loads a model waits two seconds for these modules of transformers.
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel

from headcount.workers.provenance.code_fingerprint import code_fingerprint

__all__ = ["AutoConfig", "AutoModelForCausalLM", "GPT2LMHeadModel"]

# It parses all of the code that measures, and is remembered.
code_fingerprint()


def main_that_lists_modules() -> None:
    """Run `headcount …`, and print the top-level name of every module that is imported then."""
    # It says what an interrupt does, so it is imported by the command alone.
    import headcount.command_line

    try:
        headcount.command_line.main()
    finally:
        print(*sorted({name.partition(".")[0] for name in sys.modules}))
