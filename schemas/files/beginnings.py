"""What a file is, by its first bytes: a name may promise something else."""

import json
import re

BYTES = 512
"""How many first bytes are enough."""

FORMS = {
    "gzip": rb"\x1f\x8b",
    # Also a frame that is to be skipped.
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "bzip2": rb"BZh[1-9]1AY&SY",
    "xz": rb"\xfd7zXZ\x00",
    "zip": rb"PK\x03\x04",
    "tar": rb".{257}ustar",
    "Parquet": rb"PAR1\x15",
    "Arrow": rb"ARROW1\x00\x00|\xff\xff\xff\xff..\x00\x00",
    "Git LFS": rb"version https://git-lfs\.github\.com/spec/",
}
"""How files begin that are not text, or that stand for another file."""

LFS_POINTER = "is a pointer of Git LFS, not the file itself; run git lfs pull"
"""What is said of a file that was not fetched: a repository has some lines in its place."""


def form_of(beginning: bytes) -> str | None:
    """One of `FORMS`; None if a file that begins so is none of them.

    >>> form_of(b"version https://git-lfs.github.com/spec/v1"), form_of(b'{"text": "a"}')
    ('Git LFS', None)
    """
    forms = (form for form, begin in FORMS.items() if re.match(begin, beginning, re.DOTALL))
    return next(forms, None)


def wide_encoding_of(beginning: bytes) -> str | None:
    """UTF-16 or UTF-32 if a text that begins so is written in it.

    >>> wide_encoding_of("a text".encode("utf-16")), wide_encoding_of(b"a text")
    ('UTF-16', None)
    """
    encoding = json.detect_encoding(beginning[:4])
    # Text has a zero byte in every second place then. A text in UTF-8 may hold one somewhere.
    is_marked = encoding in ("utf-16", "utf-32")
    is_zero_enough = len(beginning) / 3 < beginning.count(0) < len(beginning)
    if encoding.startswith("utf-8") or not (is_marked or is_zero_enough):
        return None
    return encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
