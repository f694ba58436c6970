"""The dispatcher with fifty replicas, of which five vanish: simulated, and the same each time."""

from pathlib import Path

from headcount.jobs.cluster.ray_cluster import PROBE_SECONDS
from headcount.jobs.plan.plan import make_plan
from headcount.schemas.scans.scan_file import parse_scan
from tests.tools.simulated_cluster import AWAY_SECONDS, LOAD_SECONDS, simulate


def test_five_of_fifty_replicas_vanish_and_the_others_hardly_wait(tmp_path: Path) -> None:
    fields = {
        "model": "bundled:attn-only-2l-mini", "n_ctx": 8, "sequences": 1000,
        "sequences_per_shard": 1, "statistics": ["sink_mass"], "out": str(tmp_path),
        "input": {"family": "uniform_random"},
    }  # fmt: skip
    plan = make_plan(parse_scan(fields), "simulated")
    # Every shard is committed once, or this raises.
    run = simulate(plan, 50, 5, shard_seconds=5.0, vanish_at=60.0)
    undisturbed = simulate(plan, 50, 0, shard_seconds=5.0, vanish_at=60.0)
    # At the end, not all replicas have a shard: a shard takes 6 s at most.
    assert 0 <= undisturbed.seconds - undisturbed.ideal_seconds < 2 * 6
    # What was under way is lost, and a tenth of the replicas was away.
    lost = (AWAY_SECONDS + LOAD_SECONDS + 3 * 6) * 5 / 50
    assert 0 < run.seconds - undisturbed.seconds < lost + 2 * PROBE_SECONDS + 2 * 6
    # Five dead nodes are found in the time of two probes.
    assert 2 * PROBE_SECONDS <= run.longest_silence < 2 * PROBE_SECONDS + 1
    again = simulate(plan, 50, 5, shard_seconds=5.0, vanish_at=60.0)
    assert again._replace(driver_seconds=run.driver_seconds) == run
