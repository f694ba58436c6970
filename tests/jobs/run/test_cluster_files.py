"""The files that start clusters are accepted by Ray, and are safe, cheap and pinned.

Nothing here starts Ray or needs a network.
"""

import copy
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import ray
import yaml
from moto.server import ThreadedMotoServer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.exceptions import RaySystemError

from headcount.jobs.cluster.ray_cluster import draining_nodes, hook_variables
from headcount.schemas.packages import PACKAGES
from tests import ROOT
from tests.tools.aws import played_aws

CLUSTERS = ("cluster.yaml", "deploy/bare-machines.yaml", "deploy/gcp.yaml")
STARTS = ("head_start_ray_commands", "worker_start_ray_commands")
SETUPS = ("initialization_", "setup_", "head_setup_", "worker_setup_")


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def cluster(name: str) -> dict[str, Any]:
    """A cluster file as it is written."""
    return yaml.safe_load(text(name))


def prepared(name: str) -> dict[str, Any]:
    """What `ray up` makes of a file before it asks a cloud: with defaults, and checked."""
    # Ray changes the configuration that it is given.
    complete = prepare_config(copy.deepcopy(cluster(name)))
    validate_config(complete)
    return complete


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_a_cluster_file_that_is_closed_and_brings_no_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)  # Not needed for this much.
    config = prepared(name)
    assert config["cluster_name"] == "headcount"
    # Every node asks for the token and gets it as a file.
    assert "--env RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    # Nothing answers without it.
    assert {tuple(option.split()) for option in config["docker"]["run_options"]} >= {
        ("--env", "RAY_enable_metrics_collection=0", "--env", "DASHBOARD_METRIC_PORT=-1",
         "--env", "AUTOSCALER_METRIC_PORT=-1")
    }  # fmt: skip
    assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    # The dashboard listens on the head itself only.
    (start,) = [command for command in config["head_start_ray_commands"] if "ray start" in command]
    assert re.findall(r"--head |--autoscaling-config=\S+|--dashboard-host=\S+", start) == [
        "--head ", "--autoscaling-config=~/ray_bootstrap_config.yaml", "--dashboard-host=127.0.0.1",
    ]  # fmt: skip
    assert all("0.0.0.0" not in command for key in STARTS for command in config[key])
    # Neither our code nor another Ray is installed.
    assert config["cluster_synced_files"] == []
    assert [command for key in SETUPS for command in config[f"{key}commands"]] == []


@pytest.mark.parametrize("name", ["cluster.yaml", "deploy/gcp.yaml"])
def test_nothing_is_paid_for_while_nothing_runs(name: str) -> None:
    config = prepared(name)
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    # The head is not to be measured on, so it can be small; and it is paid for all the time.
    assert head["resources"] == {"CPU": 0}, "a replica or a reader could land on the head"
    assert re.findall("MarketType|SPOT", str(head)) == [], "a cluster ends with its head"
    (worker,) = types.values()
    assert (worker["min_workers"], worker["max_workers"]) == (0, config["max_workers"])
    node = worker["node_config"]
    market = node.get("InstanceMarketOptions", node.get("scheduling"))
    assert "spot" in (market.get("MarketType"), market.get("provisioningModel", "").lower())
    assert 0 < config["idle_timeout_minutes"] <= 15
    assert config["provider"]["cache_stopped_nodes"] is False


def test_clusters_differ_in_their_machines_only_and_use_all_of_them() -> None:
    aws, google = cluster("cluster.yaml"), cluster("deploy/gcp.yaml")
    differing = {key for key in aws | google if aws.get(key) != google.get(key)}
    assert differing == {"provider", "available_node_types"}
    local = prepared("deploy/bare-machines.yaml")
    (machines,) = local["available_node_types"].values()
    counts = {machines["min_workers"], machines["max_workers"]}
    assert counts == {len(local["provider"]["worker_ips"])} == {1}


def test_no_file_holds_a_key() -> None:
    names = "SECRET_ACCESS_KEY|AUTH_TOKEN|ACCESS_KEY_ID|SESSION_TOKEN"
    secrets = rf"AKIA[0-9A-Z]{{16}}|PRIVATE KEY|({names})['\"]?\s*[:=]\s*['\"]?\w"
    files = (*CLUSTERS, "deploy/aws-account.sh", "deploy/rayjob.yaml", "docs/guide/cluster.md")
    assert [path for path in files if re.search(secrets, text(path))] == []


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An account of a simulated AWS, and `aws` to reach it; yields the endpoint."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    aws = tmp_path / "bin" / "aws"
    aws.parent.mkdir()
    for variable in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    settings = {
        "AWS_ACCESS_KEY_ID": "simulated", "AWS_SECRET_ACCESS_KEY": "simulated",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-west-2",
        "HOME": str(tmp_path),  # Ray writes a key pair to ~/.ssh.
        "PATH": f"{aws.parent}:{os.environ['PATH']}",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with played_aws(aws):
        yield settings["AWS_ENDPOINT_URL"]
    server.stop()


def prepare_account(region: str, bucket: str) -> subprocess.CompletedProcess[str]:
    """Run the script for an account."""
    answers = {"BUCKET": bucket, "REGION": region, "SSH_FROM": "203.0.113.7/32"}
    command = ["bash", str(ROOT / "deploy" / "aws-account.sh")]
    variables = os.environ | answers
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


@pytest.mark.long
def test_an_account_is_prepared_in_every_region_again_and_up_to_the_first_failure(aws: str) -> None:
    # The only region that must not be named; then one that is; then everything is there already.
    for region, bucket in (("us-east-1", "east"), ("us-west-2", "west"), ("us-west-2", "west")):
        ended = prepare_account(region, bucket)
        assert (ended.returncode, ended.stderr) == (0, "")
    assert [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]] == [
        "east",
        "west",
    ]
    # S3 refuses such a name, and nothing that comes later is done.
    failed = prepare_account("us-west-2", "Not a name of a bucket")
    assert failed.returncode != 0
    iam = boto3.client("iam")
    (policy,) = [
        iam.get_role_policy(RoleName="headcount-head", PolicyName="launch")["PolicyDocument"]
    ]
    may_end = [each for each in policy["Statement"] if "ec2:TerminateInstances" in each["Action"]]
    assert [each["Condition"] for each in may_end] == [
        {"StringEquals": {"ec2:ResourceTag/ray-cluster-name": "headcount"}}
    ]
    # Only a machine that is started with this tag can be started, and no other gets it later.
    tagging = [each for each in policy["Statement"] if "ec2:CreateTags" in each["Action"]]
    assert all("Condition" in each for each in tagging)
    worker = iam.list_role_policies(RoleName="headcount-worker")["PolicyNames"]
    assert worker == ["store"]


@pytest.mark.long
def test_cluster_yaml_launches_on_a_simulated_ec2(aws: str) -> None:
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    ended = prepare_account("us-west-2", "heads")
    assert (ended.returncode, ended.stderr) == (0, "")
    config = prepared("cluster.yaml")
    config = AWSNodeProvider.fillout_available_node_types_resources(config)
    config = AWSNodeProvider.bootstrap_config(config)
    nodes = config["available_node_types"]
    assert nodes["head"]["resources"] == {"CPU": 0}
    gpu = {"CPU": 4, "GPU": 1, "accelerator_type:L40S": 1}
    assert nodes["gpu"]["resources"].items() >= gpu.items()
    assert len(nodes["gpu"]["node_config"]["SubnetIds"]) == 3, "one for each zone"
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    ec2: Any = boto3.resource("ec2")
    for kind in ("head", "gpu"):
        tags = {"ray-node-type": kind}
        (machine,) = provider.create_node(nodes[kind]["node_config"], tags, 1)
        instance = ec2.Instance(machine)
        tags_of_machine = {tag["Key"]: tag["Value"] for tag in instance.tags}
        wanted = {"ray-cluster-name": "headcount", "project": "headcount"}
        assert tags_of_machine.items() >= wanted.items()
        assert instance.metadata_options["HttpTokens"] == "required"
        (disk,) = instance.volumes.all()
        assert disk.encrypted
        # Only named addresses reach a port, and only that of ssh.
        (group,) = instance.security_groups
        rules = ec2.SecurityGroup(group["GroupId"]).ip_permissions
        ranges = [(rule["FromPort"], rule["IpRanges"]) for rule in rules if rule["IpRanges"]]
        assert ranges == [(22, [{"CidrIp": "203.0.113.7/32"}])]


def test_one_ray_everywhere() -> None:
    dockerfile, guide = text("deploy/Dockerfile"), text("docs/guide/cluster.md")
    constraints = text("deploy/constraints.txt")
    (version,) = re.findall(r"^ray(?:\[.*\])?==([\d.]+)", constraints, re.MULTILINE)
    (base,) = re.findall(r"^FROM rayproject/ray:(\S+)@sha256:DIGEST$", dockerfile, re.MULTILINE)
    assert base == f"{version}-py311-gpu"
    assert f"ray.__version__ == '{version}'" in dockerfile
    rayjob = text("deploy/rayjob.yaml")
    assert re.findall("rayVersion: (.*)", rayjob) == [f'"{version}"']
    images = re.findall(r"image: (\S+)", rayjob)
    assert len(images) == 3
    images += [cluster(name)["docker"]["image"] for name in CLUSTERS]
    assert set(images) == {f"REGISTRY/headcount-ray:{version}"}
    assert set(re.findall(r'"ray\[default\]==(\S+)"', guide)) == {version}
    assert Version(version).release[:2] == Version(ray.__version__).release[:2]


def test_the_image_has_every_dependency_of_a_scan_and_never_our_code() -> None:
    lines = text("deploy/requirements.txt").splitlines()
    assert "-c constraints.txt" in lines
    parsed = [
        Requirement(line.partition("#")[0]) for line in lines if line[:1] not in ("", "-", "#")
    ]
    wanted = {canonicalize_name(requirement.name): requirement for requirement in parsed}
    project = tomllib.loads(text("pyproject.toml"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["scan"]]
    for needed in map(Requirement, needs):
        assert needed.extras <= wanted[canonicalize_name(needed.name)].extras
    assert not {"headcount", *PACKAGES} & set(wanted)
    dockerfile = text("deploy/Dockerfile")
    copied = re.findall(r"^(?:COPY|ADD) (.+) \S+$", dockerfile, re.MULTILINE)
    assert copied == ["requirements.lock"]
    built = re.findall(r"docker build .*", dockerfile + text("docs/guide/cluster.md"))
    assert len(built) == 2
    # The build context holds no code.
    assert all(re.search(r" deploy(\s|$)", command) for command in built)
    assert not list((ROOT / "deploy").rglob("*.py"))


def test_every_file_that_the_image_installs_has_a_digest() -> None:
    install = "pip install --no-cache-dir --require-hashes -r /tmp/requirements.lock"
    assert install in text("deploy/Dockerfile")
    lock, requirements = text("deploy/requirements.lock"), text("deploy/requirements.txt")
    with_digests = r"^(\S+==\S+)(?: \\\n +--hash=sha256:[0-9a-f]{64})+$"
    locked = set(re.findall(with_digests, lock, re.MULTILINE))
    assert len(locked) == lock.count("==")
    # `make constraints` has not been forgotten.
    pins = re.findall(
        r"^[\w.-]+==[\w.]+", text("deploy/constraints.txt") + requirements, re.MULTILINE
    )
    assert locked <= set(pins)
    names = {entry.partition("==")[0] for entry in locked}
    needed = re.findall(r"^\w+", requirements, re.MULTILINE)
    assert {canonicalize_name(name) for name in needed} <= names


def test_one_file_has_the_names_that_ray_does_not_promise_to_keep() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    uses = [path for path in files if "from ray._private" in path.read_text(encoding="utf-8")]
    assert uses == [ROOT / "jobs" / "cluster" / "ray_cluster.py"]
    # Without a cluster Ray knows no nodes, and says that it is not initialized.
    with pytest.raises(RaySystemError):
        draining_nodes()
    (hook,) = hook_variables().values()
    module, _, name = hook.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
