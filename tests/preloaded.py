"""What the process that commands of tests are forked from has computed: they inherit it."""

from __future__ import annotations

from workers.provenance.code_fingerprint import code_fingerprint

# It parses all of the code that measures, and is remembered.
code_fingerprint()
