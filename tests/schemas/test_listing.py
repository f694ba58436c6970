"""Which of many names a directory holds."""

import random

import pyarrow as pa
import pytest

from headcount.schemas.files.listing import Listing

NO_FILES_OF_SHARDS = [
    "merged-000000-000216-0a1b2c3d.parquet",
    "shard-00000x-0a1b2c3d.parquet",
    "shard-000001-0a1b2c3d.parquex",
    "shard_000001-0a1b2c3d.parquet",
    "shard-000001_0a1b2c3d.parquet",
    "shard-000001.parquet",
    "shard-:00001-0a1b2c3d.parquet",
    "shard--0a1b2c3d.parquet",
    "shard-123456789-0a1b2c3d.parquet",
    "naïve.parquet",
    "\udcff.parquet",
    "x",
]
"""Names that look more or less like those of shards' files, and two that are no ASCII."""


def shard_name(draw: random.Random) -> str:
    # Few numbers and digests, so that many names differ in one of them alone.
    digits, digest = draw.choice([1, 6, 7]), draw.choice(["0a1b2c3d", "0a1b2c3e", "fa1b2c3d"])
    return f"shard-{draw.randrange(10):0{digits}d}-{digest}.parquet"


@pytest.mark.parametrize("seed", range(20))
def test_a_listing_holds_what_a_set_of_its_names_holds(seed: int) -> None:
    draw = random.Random(seed)
    candidates = sorted({shard_name(draw) for _ in range(100)}) + NO_FILES_OF_SHARDS
    listed = draw.sample(candidates, draw.randrange(len(candidates)))
    # Commits hold no name that is not Unicode.
    wanted = [name for name in candidates if name != "\udcff.parquet"]
    wanted = draw.choices(wanted, k=200)
    names = pa.array(["a name before the slice", *wanted])[1:]
    is_held = Listing(listed, at_once=7).holds(names).tolist()
    assert is_held == [name in {*listed} for name in wanted]


def test_a_listing_without_a_name_holds_none():
    name = "shard-000001-0a1b2c3d.parquet"
    assert Listing([]).holds(pa.array([name])).tolist() == [False]
    assert Listing([name]).holds(pa.array([], pa.string())).tolist() == []
    assert Listing(["x"]).holds(pa.array(["", "x"])).tolist() == [False, True]
