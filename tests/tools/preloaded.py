"""What the process that commands of tests are forked from has computed: they inherit it."""

from __future__ import annotations

# Whatever describes or loads a model waits two seconds for these modules of transformers.
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel

from headcount.workers.provenance.code_fingerprint import code_fingerprint

__all__ = ["AutoConfig", "AutoModelForCausalLM", "GPT2LMHeadModel"]

# It parses all of the code that measures, and is remembered.
code_fingerprint()
