"""The profiles of the `profiles` table, a file per family; importing this package registers them
all.
"""

from headcount.schemas.profiles import (
    attention,
    columns_and_diagonals,
    first_position,
    norms_by_position,
    query_moments,
    score_shifts,
    scores_by_key,
    tail_attention,
)
from headcount.schemas.profiles.profile_registry import (
    KIND,
    PROFILES,
    Profile,
    profile,
)

__all__ = [
    "KIND",
    "PROFILES",
    "Profile",
    "attention",
    "columns_and_diagonals",
    "first_position",
    "norms_by_position",
    "profile",
    "query_moments",
    "score_shifts",
    "scores_by_key",
    "tail_attention",
]
