"""What Prometheus is told of a run, and the dashboard over it."""

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from rich.console import Console

from headcount.jobs import metrics
from headcount.jobs.cluster.ray_cluster import Resources
from headcount.jobs.metrics import Metric, node_name
from headcount.jobs.plan.plan import Plan
from headcount.jobs.run.measuring import run_to_end
from tests import ROOT
from tests.tools.processes import kept_endings
from tests.toys import toy_models as toy
from tests.toys.runs_here import begun
from tests.toys.toy_replica import ToyReplica

DASHBOARD = ROOT / "deploy" / "grafana" / "headcount.json"
SAMPLE = re.compile(r"^(ray_headcount_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
METRICS = [each for each in vars(metrics).values() if isinstance(each, Metric)]
SHARDS, N_CTX = 4, 8
Samples = dict[tuple[str, str], float]
"""Values by the metric's exported name and the tag that its series differ in."""

EXPECTED: Samples = {
    ("ray_headcount_tokens_measured_total", ""): (SHARDS - 1) * N_CTX,
    ("ray_headcount_tokens_prepared_total", ""): 123,
    ("ray_headcount_shards", "done"): SHARDS - 1,
    ("ray_headcount_shards", "running"): 1,
}
"""While the last shard is measured."""


def exported_name(metric: Metric) -> str:
    """The name by which Prometheus knows it."""
    return f"ray_{metric.name}{'_total' if metric.kind == 'counter' else ''}"


class WatchedReplica(ToyReplica):
    """Waits in its last shard until the metrics have been read."""

    measured = 0

    def misbehave(self, token: int) -> None:
        self.measured += 1
        deadline = time.monotonic() + 60
        while self.measured == SHARDS and time.monotonic() < deadline:
            if (Path(self.scan.out) / "watched").exists():
                return
            time.sleep(0.05)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A run over a corpus in which one row cannot be read."""
    model = toy.save_byte_model(tmp_path / "bytes")
    row = '{"text": "abcdefghijklmnop"}'
    (tmp_path / "a.jsonl").write_text("\n".join([row, "no row", *[row] * (SHARDS - 1), ""]))
    fields = {"model": str(model), "out": str(tmp_path / "runs"), "statistics": ["entropy"]}
    fields |= {"n_ctx": N_CTX, "sequences": SHARDS, "sequences_per_shard": 1, "bad_rows": 0.5}
    fields |= {"input": {"family": "pile", "files": str(tmp_path / "a.jsonl")}}
    return begun(fields, "watched")


@pytest.fixture
def _ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray on this machine that collects metrics often."""
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "200")
    with kept_endings():
        yield
        ray.shutdown()


def scraped() -> tuple[str, Samples]:
    """What Prometheus would read now: the text, and the samples of headcount in it."""
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    # Ray's collector starts after Ray itself.
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return "", {}
    samples: Samples = {}
    for name, labels, value in SAMPLE.findall(text):
        tags = dict(LABEL.findall(labels))
        different = tags.get("state") or tags.get("phase") or tags.get("reason") or ""
        samples[name, different] = float(value)
    return text, samples


def listening_addresses() -> set[str]:
    """The addresses at which this process and those that it has started take connections."""
    me = psutil.Process()
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def watch(plan: Plan, seen: dict[str, Any]) -> None:
    """Read until all shards but the last are told of, then let the last one end."""
    deadline = time.monotonic() + 90
    while not ray.is_initialized() and time.monotonic() < deadline:
        time.sleep(0.05)
    metrics.TOKENS_PREPARED.tell(123, node=node_name())
    while time.monotonic() < deadline:
        text, samples = scraped()
        seen["text"] += text
        # A gauge is there only if it was set since it was last read.
        seen["samples"] |= samples
        has_share = ("ray_headcount_replica_idle_share", "") in seen["samples"]
        if has_share and EXPECTED.items() <= seen["samples"].items():
            break
        time.sleep(0.4)
    seen["addresses"] = listening_addresses()
    (Path(plan.scan.out) / "watched").touch()


@pytest.mark.long
@pytest.mark.usefixtures("_ray")
def test_prometheus_reads_a_run_while_it_is_measured(plan: Plan):
    seen: dict[str, Any] = {"text": "", "samples": {}}
    before = ray.util.get_node_ip_address()
    watcher = threading.Thread(target=watch, args=[plan, seen])
    watcher.start()
    assert run_to_end(plan, Resources(1, 1, "cpu"), Console(quiet=True), WatchedReplica) == []
    watcher.join()
    assert seen["addresses"] == {"127.0.0.1"}  # Nobody else reads them: Ray asks for no token.
    ray.shutdown()
    # A cluster that this process joins later is told where it is.
    assert ray.util.get_node_ip_address() == before
    samples: Samples = seen["samples"]
    assert EXPECTED.items() <= samples.items(), samples
    assert [samples["ray_headcount_shards", state] for state in ("waiting", "failed")] == [0, 0]
    assert samples["ray_headcount_bad_rows_total", ""] == 1
    assert 0 <= samples["ray_headcount_replica_idle_share", ""] <= 1
    for phase in ("reading", "measuring", "writing"):
        assert 0 < samples["ray_headcount_phase_seconds_total", phase] < 60

    # Nothing was repeated in this run, so there is no such series.
    for metric in [metric for metric in METRICS if metric is not metrics.SHARDS_REPEATED]:
        name = exported_name(metric)
        assert f"# TYPE {name} {metric.kind}\n" in seen["text"]
        series = next(found[1] for found in SAMPLE.findall(seen["text"]) if found[0] == name)
        tags = dict(LABEL.findall(series))
        assert set(metric.tags) <= set(tags)
        assert tags.get("run_id", plan.run.run_id) == plan.run.run_id
        assert tags.get("node", node_name()) == node_name()


def test_without_ray_nothing_is_counted_and_nothing_fails():
    metrics.SHARDS.tell(1, run_id="toy", state="done")
    assert not ray.is_initialized()


def test_names_have_units_and_the_page_has_their_table():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    page = (ROOT / "docs" / "internals" / "operations.md").read_text()
    for metric in METRICS:
        assert metric.name.startswith("headcount_")
        assert metric.unit.split()[0].rstrip(",") in metric.name
        tags = ", ".join(f"`{tag}`" for tag in metric.tags)
        cells = (f"`{exported_name(metric)}`", metric.kind, metric.unit, tags, metric.meaning)
        assert f"| {' | '.join(cells)} |" in page


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    datasource, *variables = dashboard["templating"]["list"]
    queries += [variable["definition"] for variable in variables]
    by_name = {exported_name(metric): metric for metric in METRICS}
    names = {name for query in queries for name in re.findall(r"\bray_\w+", query)}
    # Every metric is drawn, and nothing else.
    assert names == set(by_name)
    for query in queries:
        (metric,) = {by_name[name] for name in re.findall(r"\bray_\w+", query)}
        tags = set(re.findall(r"(\w+)=~", query))
        tags |= {tag for tags in re.findall(r"by \(([^)]*)\)", query) for tag in tags.split(", ")}
        assert tags <= set(metric.tags), query
        # A counter only grows: what is drawn of it is how fast. increase() would miss rare events:
        # a counter that appears with its first event has no 0 before it.
        if metric.kind == "counter" and not query.startswith("label_values"):
            assert "increase(" not in query
            assert re.search(r"\brate\(| offset ", query), query
    assert (datasource["name"], datasource["type"]) == ("datasource", "datasource")
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
