"""The files that start clusters are accepted by Ray, and are safe, cheap and pinned.

Nothing here starts Ray or needs a network.
"""

from __future__ import annotations

import copy
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from ray.autoscaler._private.util import prepare_config, validate_config

from headcount.schemas.packages import PACKAGES
from tests import ROOT

DEPLOY = ROOT / "deploy"
CLUSTERS = ("cluster.yaml", "deploy/bare-machines.yaml", "deploy/gcp.yaml")
COMMANDS = {
    "plan",
    "scan",
    "doctor",
    "submit",
    "status",
    "list",
    "logs",
    "stop",
    "resume",
    "compact",
    "query",
    "report",
}
COMMANDS_START = ("head_start_ray_commands", "worker_start_ray_commands")
SETUP = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
)
IMAGE = re.compile(r"headcount-ray:(\S+)")


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code_blocks(page: str, language: str) -> list[str]:
    return [
        code
        for name, code in re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        if name == language
    ]


def cluster(name: str) -> dict[str, Any]:
    """A cluster file as it is written."""
    return yaml.safe_load(text(name))


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` makes of a file before it asks a cloud.

    Defaults are filled in, and the file is checked against Ray's schema.
    """
    # Ray changes the configuration that it is given.
    complete = prepare_config(copy.deepcopy(config))
    validate_config(complete)
    return complete


def rayjob() -> dict[str, Any]:
    return yaml.safe_load(text("deploy/rayjob.yaml"))


def pods() -> dict[str, dict[str, Any]]:
    """The head group and the worker groups of the RayJob."""
    spec = rayjob()["spec"]["rayClusterSpec"]
    return {"head": spec["headGroupSpec"]} | {
        group["groupName"]: group for group in spec["workerGroupSpecs"]
    }


def requirements(file: str = "requirements.txt") -> dict[str, Requirement]:
    """What a file of deploy/ asks of this system, by name."""
    by_name: dict[str, Requirement] = {}
    for line in text(f"deploy/{file}").splitlines():
        specification = line.partition("#")[0].strip()
        if specification and not specification.startswith("-c"):
            requirement = Requirement(specification)
            if requirement.marker is None or requirement.marker.evaluate():
                by_name[canonicalize_name(requirement.name)] = requirement
    return by_name


def pinned(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", requirement
    assert "*" not in specifier.version, requirement
    return specifier.version


# What `ray up` reads


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_a_cluster_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)  # Not needed for this much.
    assert prepared(cluster(name))["cluster_name"] == "headcount"


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("place", [(), ("docker",), ("auth",)])
def test_ray_refuses_a_cluster_file_with_a_typo(name: str, place: tuple[str, ...]) -> None:
    config = cluster(name)
    table = config
    for key in place:
        table = table[key]
    table["idle_timeout_minuets"] = 5
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout_minuets"):
        prepared(config)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_node_asks_for_the_token_and_gets_it_as_a_file(name: str) -> None:
    config = prepared(cluster(name))
    assert "--env RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_dashboard_listens_on_the_head_itself_only(name: str) -> None:
    config = prepared(cluster(name))
    (start,) = [command for command in config["head_start_ray_commands"] if "ray start" in command]
    assert "--head" in start
    assert re.findall(r"--dashboard-host=(\S+)", start) == ["127.0.0.1"]
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start
    assert all("0.0.0.0" not in command for key in COMMANDS_START for command in config[key])


@pytest.mark.parametrize("name", ["cluster.yaml", "deploy/gcp.yaml"])
def test_nothing_is_paid_for_while_nothing_runs(name: str) -> None:
    config = prepared(cluster(name))
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    # The head is not to be measured on, so it can be small; and it is paid for all the time.
    assert head["resources"] == {"CPU": 0}, "a replica or a reader could land on the head"
    assert re.findall("MarketType|SPOT", str(head)) == [], "a cluster ends with its head"
    (worker,) = types.values()
    assert (worker["min_workers"], worker["max_workers"]) == (0, config["max_workers"])
    market = worker["node_config"].get(
        "InstanceMarketOptions", worker["node_config"].get("scheduling")
    )
    assert "spot" in (market.get("MarketType"), market.get("provisioningModel", "").lower())
    assert 0 < config["idle_timeout_minutes"] <= 15
    assert config["provider"]["cache_stopped_nodes"] is False


def test_the_clusters_of_two_clouds_differ_only_in_their_machines() -> None:
    aws, google = cluster("cluster.yaml"), cluster("deploy/gcp.yaml")
    differing = {key for key in aws | google if aws.get(key) != google.get(key)}
    assert differing == {"provider", "available_node_types"}


def test_every_machine_of_a_local_cluster_is_used() -> None:
    config = prepared(cluster("deploy/bare-machines.yaml"))
    (machines,) = config["available_node_types"].values()
    assert (
        machines["min_workers"]
        == machines["max_workers"]
        == len(config["provider"]["worker_ips"])
        == 1
    )


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_file_brings_neither_our_code_nor_another_ray(name: str) -> None:
    config = prepared(cluster(name))
    assert list(config["file_mounts"]) == ["~/.ray/auth_token"]
    assert config["cluster_synced_files"] == []
    assert [command for key in SETUP for command in config[key]] == []


@pytest.mark.parametrize(
    "path",
    [
        "cluster.yaml",
        "deploy/aws-account.sh",
        "deploy/bare-machines.yaml",
        "deploy/gcp.yaml",
        "deploy/rayjob.yaml",
        "docs/guide/cluster.md",
    ],
)
def test_no_file_holds_a_key(path: str) -> None:
    secret_names = "SECRET_ACCESS_KEY|AUTH_TOKEN|ACCESS_KEY_ID|SESSION_TOKEN"
    assigned_secret = rf"({secret_names})['\"]?\s*[:=]\s*['\"]?\w"
    secrets = rf"AKIA[0-9A-Z]{{16}}|PRIVATE KEY|{assigned_secret}"
    assert re.findall(secrets, text(path)) == []


def test_cluster_yaml_launches_on_a_simulated_ec2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto = pytest.importorskip(
        "moto", reason="moto simulates EC2; without it only Ray's schema is checked"
    )
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes a key pair to ~/.ssh.
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "simulated")
    for variable in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    with moto.mock_aws():
        import boto3
        from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

        config = AWSNodeProvider.fillout_available_node_types_resources(
            prepared(cluster("cluster.yaml"))
        )
        config = AWSNodeProvider.bootstrap_config(config)
        nodes = config["available_node_types"]
        assert nodes["head"]["resources"] == {"CPU": 0}
        assert (
            nodes["gpu"]["resources"].items()
            >= {"CPU": 4, "GPU": 1, "accelerator_type:L40S": 1}.items()
        )
        assert len(nodes["gpu"]["node_config"]["SubnetIds"]) == 3, "one for each zone"
        roles = re.findall(r"for ROLE in (.+); do", text("deploy/aws-account.sh"))[0].split()
        for profile in roles:
            boto3.client("iam").create_instance_profile(InstanceProfileName=profile)
        provider = AWSNodeProvider(config["provider"], config["cluster_name"])
        for kind in ("head", "gpu"):
            tags = {"ray-node-type": kind}
            assert len(provider.create_node(nodes[kind]["node_config"], tags, 1)) == 1


# What KubeRay reads


def test_rayjob_is_a_rayjob_with_what_it_needs() -> None:
    job = rayjob()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    # Kubernetes drops a key that it does not know, and says nothing.
    assert set(spec) <= {
        "entrypoint",
        "runtimeEnvYAML",
        "submissionMode",
        "backoffLimit",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "activeDeadlineSeconds",
        "submitterConfig",
        "rayClusterSpec",
    }
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] > 0
    assert spec["backoffLimit"] >= 1, "a lost head is tried again"
    ray_cluster = spec["rayClusterSpec"]
    assert set(ray_cluster) <= {
        "rayVersion",
        "authOptions",
        "enableInTreeAutoscaling",
        "autoscalerOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    }
    assert ray_cluster["authOptions"] == {"mode": "token"}
    assert ray_cluster["enableInTreeAutoscaling"] is True


def test_the_rayjob_runs_a_scan_with_code_from_a_bucket() -> None:
    spec = rayjob()["spec"]
    words = spec["entrypoint"].split()
    assert words[:4] == ["python", "-m", "headcount", "scan"]
    assert re.search(r"--set out=(s3|gs)://", spec["entrypoint"])
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    assert re.fullmatch(r"(s3|gs)://\S+\.zip", environment.pop("working_dir"))
    assert environment == {}, "dependencies belong in the image"
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert words[words.index("--replicas") + 1] == str(group["maxReplicas"])
    assert words[words.index("--device") + 1] == "cuda", "at the start there is no GPU to be seen"


@pytest.mark.parametrize("group", ["head", "gpu"])
def test_every_pod_of_the_rayjob_is_whole(group: str) -> None:
    spec = pods()[group]
    assert all(isinstance(value, str) for value in spec["rayStartParams"].values()), (
        "KubeRay takes strings only"
    )
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["name"]
    assert IMAGE.search(container["image"])
    resources = container["resources"]
    assert {"cpu", "memory"} <= set(resources["requests"])
    assert resources["limits"]["memory"] == resources["requests"]["memory"], (
        "more than asked for is not safe to use"
    )


def test_the_rayjobs_head_measures_nothing_and_its_workers_come_and_go() -> None:
    head, worker = pods()["head"], pods()["gpu"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in str(head)
    assert (worker["replicas"], worker["minReplicas"]) == (0, 0)
    assert worker["maxReplicas"] == cluster("cluster.yaml")["max_workers"]
    pod = worker["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["terminationGracePeriodSeconds"] <= 120, "a spot machine waits no longer"
    assert any("spot" in (key + value).lower() for key, value in pod["nodeSelector"].items())
    assert all(
        {"key", "operator", "effect"} <= set(toleration) for toleration in pod["tolerations"]
    )


# The image


def test_one_ray_everywhere() -> None:
    version = pinned(requirements("constraints.txt")["ray"])
    (base,) = re.findall(r"^FROM rayproject/ray:(\S+)$", text("deploy/Dockerfile"), re.MULTILINE)
    assert base == f"{version}-py311-gpu"
    assert f"ray.__version__ == '{version}'" in text("deploy/Dockerfile")
    assert rayjob()["spec"]["rayClusterSpec"]["rayVersion"] == version
    images = [
        container["image"]
        for pod in pods().values()
        for container in pod["template"]["spec"]["containers"]
    ]
    images += [cluster(name)["docker"]["image"] for name in CLUSTERS]
    assert {tag for image in images for tag in IMAGE.findall(image)} == {version}
    assert set(re.findall(r'"ray\[default\]==(\S+)"', text("docs/guide/cluster.md"))) == {version}
    assert Version(version).release[:2] == Version(ray.__version__).release[:2]


def test_the_image_has_every_dependency_of_a_scan() -> None:
    project = tomllib.loads(text("pyproject.toml"))["project"]
    for needed in map(
        Requirement, [*project["dependencies"], *project["optional-dependencies"]["scan"]]
    ):
        wanted = requirements()[canonicalize_name(needed.name)]
        assert needed.extras <= wanted.extras
    assert "-c constraints.txt" in text("deploy/requirements.txt").splitlines()


def test_the_constraints_pin_every_dependency_within_its_range() -> None:
    pins = requirements("constraints.txt")
    whole = tomllib.loads(text("pyproject.toml"))
    lists = [
        whole["project"]["dependencies"],
        *whole["project"]["optional-dependencies"].values(),
        *whole["dependency-groups"].values(),
    ]
    for needed in [Requirement(line) for lines in lists for line in lines]:
        if needed.marker is None or needed.marker.evaluate():
            pin = pins[canonicalize_name(needed.name)]
            assert needed.specifier.contains(pinned(pin)), f"{pin} is outside {needed}"
    for pin in pins.values():
        assert Version(pinned(pin)).local is None, f"{pin}: PyPI has no such build"


def test_the_image_never_has_our_code() -> None:
    lines = text("deploy/Dockerfile").splitlines()
    instructions = [line.split() for line in lines if re.match(r"[A-Z]+ ", line)]
    copied = [words[1:-1] for words in instructions if words[0] in ("COPY", "ADD")]
    assert copied == [["requirements.txt", "constraints.txt"]]
    assert not {"headcount", *PACKAGES} & set(requirements())
    built = re.findall(
        r"docker build .*", text("deploy/Dockerfile") + text("docs/guide/cluster.md")
    )
    assert len(built) == 2
    assert all(re.search(r" deploy(\s|$)", command) for command in built), (
        "the build context holds no code"
    )
    assert not [path for path in DEPLOY.rglob("*") if path.suffix == ".py"]


# The page


def test_the_page_uses_only_commands_that_exist() -> None:
    code = "\n".join(code_blocks(text("docs/guide/cluster.md"), "bash"))
    used = re.findall(r"(?:^|token )headcount (\w+)", code, re.MULTILINE)
    assert set(used) <= COMMANDS
    assert {
        "submit",
        "status",
        "list",
        "logs",
        "stop",
        "resume",
        "compact",
        "query",
        "report",
        "scan",
    } <= set(used)
    assert code.count("headcount submit") == len(
        re.findall(r"headcount submit .*--device cuda --replicas \d", code)
    )


def test_the_page_names_files_that_exist_and_fits_its_width() -> None:
    page = text("docs/guide/cluster.md")
    for path in re.findall(r"\b(?:cluster\.yaml|deploy/[\w.-]+)", page):
        assert (ROOT / path).is_file(), path
    files = [f"deploy/{file.name}" for file in DEPLOY.iterdir() if file.is_file()]
    files.remove("deploy/constraints.txt")  # uv writes it.
    for path in ("docs/guide/cluster.md", "cluster.yaml", *files):
        assert [line for line in text(path).splitlines() if len(line) > 132] == [], path
