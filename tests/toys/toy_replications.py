"""Our replications, and others of nothing in particular: what every one must say, and what a test
adds.
"""

from headcount.reproduce.replication import Replication, replications

REPLICATIONS = replications()
"""Those that we ship, read once: their published values take a tenth of a second."""

FIELDS = {
    "title": "", "source": "", "measured": "", "published_model": "m",
    "published_sizes": {"n_layers": 1, "n_heads": 2}, "bundled_model": "bundled:gpt2-mini",
    "scan": {},
}  # fmt: skip


def toy_replication(**fields: object) -> Replication:
    return Replication.model_validate(FIELDS | fields)


def replication_text(rest: str, sizes: str = "n_layers = 1, n_heads = 2") -> str:
    """The file of a replication."""
    return f"""title = "Toy"
source = ""
measured = ""
published_model = "m"
published_sizes = {{ {sizes} }}
bundled_model = "bundled:gpt2-mini"
{rest}
"""
