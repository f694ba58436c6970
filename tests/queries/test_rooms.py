"""What a named query imports: not the rooms that other questions need."""

import subprocess
import sys
import time
from pathlib import Path

from headcount.queries.open import rooms
from headcount.queries.open.verified_files import CLOCK_TICK_SECONDS
from headcount.schemas.files.damage import LISTING
from headcount.schemas.packages import entered
from tests import ROOT

DOORS = [
    door
    for name, value in vars(rooms).items()
    if name.isupper()
    for door in (value.values() if isinstance(value, dict) else [value])
] + [LISTING]

MOST_FILES, MOST_LINES = 50, 6_200

ASK = """
import sys
from headcount.command_line import main
sys.argv = ["headcount", "query", sys.argv[1], "by_head"]
try:
    main()
finally:
    for name in sorted(sys.modules):
        if name.startswith("headcount"):
            print(sys.modules[name].__file__, file=sys.stderr)
"""


def test_the_doors_of_queries_lead_to_what_they_name() -> None:
    assert len(DOORS) > 20
    for door in DOORS:
        behind = entered(door)
        # `KINDS` is a tuple, which has no name.
        assert getattr(behind, "__name__", "KINDS") == door.rpartition(".")[2]


def test_a_named_query_enters_no_room(small: Path) -> None:
    files = [Path(file) for file in imported_by_a_query(small)]
    modules = {file.relative_to(ROOT / "headcount").with_suffix("").as_posix() for file in files}
    behind_doors = {door.rpartition(".")[0].replace(".", "/") for door in DOORS}
    assert modules & {*behind_doors, "schemas/object_stores"} == set()
    assert 30 < len(files) <= MOST_FILES
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= MOST_LINES


def imported_by_a_query(runs: Path) -> list[str]:
    """The files of ours that a named query imports, whose data files were compared before."""
    # What has just been written is not remembered.
    time.sleep(CLOCK_TICK_SECONDS)
    for _ in range(2):
        command = [sys.executable, "-c", ASK, str(runs)]
        asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert asked.stdout.count("\n") == 8
    return asked.stderr.splitlines()
