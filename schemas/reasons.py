"""Why something failed, in the words of the system or of an object store, on one line."""

import re

from headcount.schemas.errors import SilentStoreError, WriteError

ATTEMPTS = 10
"""Repetitions of a request that a store refuses for now: 26 s of pauses in all, each twice as long
as the one before. If nothing answers at all, each attempt also waits for
`object_stores.REQUEST_SECONDS`: three minutes in all to read and four to write, so that a store may
stand still for two.
"""

SILENCE = re.compile(r"AWS Error NETWORK_CONNECTION during \w+ operation: ([^;]*).*")
"""What is said of a request that a store did not answer, however often it was repeated."""

DENIAL = re.compile(
    r"(?:key '(?P<key>[^']*)' in )?(?:bucket '(?P<bucket>[^']*)': )?"
    r"AWS Error (?:ACCESS_DENIED|\w+_ID|SIGNATURE_DOES_NOT_MATCH|REQUEST_EXPIRED"
    r"|UNKNOWN \(HTTP status 40[013]\)) during "
    r"(?P<operation>\w+)"
)
"""What is said of a request that a store denies. An answer to HEAD has no body that says why; the
status of credentials that have ended is 400.
"""

PERMISSIONS = {
    "HeadObject": "s3:GetObject and s3:ListBucket",  # without it a missing object is denied, too
    "GetObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
}
"""What a request needs; those that are not here write."""


def store_error(error: OSError) -> type[WriteError]:
    """The kind of error that a store's error becomes."""
    return SilentStoreError if SILENCE.search(str(error)) else WriteError


def reason(error: BaseException) -> str:
    """Why something failed, in the words of the system or the store, on one line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    if silence := SILENCE.search(text):
        what = (
            f"the store gave no whole answer to {ATTEMPTS + 1} requests, bring it or the network up"
        )
        text = f"{what}: {text[: silence.start()]}{silence[1]}"
    elif denial := DENIAL.search(text):
        permission = PERMISSIONS.get(denial["operation"], "s3:PutObject")
        place_denied = "/".join(filter(None, (denial["bucket"], denial["key"])))
        text = (
            "the store denies it: renew the credentials if they have ended, or allow them "
            f"{permission}{f' on {place_denied}' if place_denied else ''}"
        )
    return text if len(text) <= 240 else f"{text[:239]}…"
