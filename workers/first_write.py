"""Write a file only if there is none: of two attempts at a shard, the second finds the first.

pyarrow cannot say this condition to a store, so boto3 does.
"""

# boto3 has no types.
# pyright: basic

import errno
import os
from functools import cache
from typing import Any

from headcount.schemas.errors import SilentStoreError
from headcount.schemas.object_stores import CONNECT_SECONDS, REQUEST_SECONDS, region_and_endpoint
from headcount.schemas.places import Place, StorePath, explained, temporary_file, write_whole
from headcount.schemas.reasons import reason


def write_new(where: Place, content: bytes) -> bool:
    """`write_whole`, only if there is no such file yet; returns whether it was written.

    A store that does not know the condition (`headcount doctor OUT` says it), and a file system
    without links, replace a file that is there.
    """
    if isinstance(where, StorePath):
        return _put_if_absent(where, content)
    with explained(where), temporary_file(where, content) as temporary:
        try:
            os.link(temporary, where)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            os.replace(temporary, where)
    return True


def _put_if_absent(where: StorePath, content: bytes) -> bool:
    """Write an object if there is none, by `If-None-Match`; returns whether it was written."""
    if where.url.startswith("s3://"):
        # It takes half a second to import, and only what commits to a store needs it.
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            ConnectionError,
            HTTPClientError,
        )

        bucket, _, key = where.key.partition("/")
        try:
            client = _s3_client(*region_and_endpoint())
            client.put_object(Bucket=bucket, Key=key, Body=content, IfNoneMatch="*")
            return True
        except ClientError as error:
            # 409: another one writes it at this moment.
            if error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412):
                return False
        except (ConnectionError, HTTPClientError) as error:
            # A write without the condition could replace what somebody else wrote meanwhile.
            raise SilentStoreError(
                f"{where}: cannot be written ({reason(error)}); bring the store or the network up, "
                "then run the same command"
            ) from None
        except BotoCoreError:
            pass
    # The store does not know the condition, or it refuses all. Then this says why.
    write_whole(where, content)
    return True


@cache
def _s3_client(region: str | None, endpoint: str | None) -> Any:  # noqa: ANN401 (made at run time)
    from boto3.session import Session
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=REQUEST_SECONDS,
        # Legacy: the others have a quota. Six requests, and 31 s of pauses at most.
        retries={"mode": "legacy", "max_attempts": 5},
        # Stores other than AWS do not know newer ones.
        request_checksum_calculation="when_required",
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    # A session of its own, because boto3's may be made by one thread only.
    return Session().client("s3", region_name=region, endpoint_url=endpoint, config=config)
