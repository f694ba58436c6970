"""The file for Kubernetes has known names, and its pods may do only what they need.

A key that is not known is dropped, or refused on a cluster only. Nothing here needs one.
"""

import ipaddress
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from headcount.jobs.cluster import kubernetes_job
from tests import ROOT

DOCUMENTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((ROOT / "deploy" / "rayjob.yaml").read_text(encoding="utf-8"))
)
RAYJOB = DOCUMENTS[-1]
JOB: dict[str, Any] = RAYJOB["spec"]
CLUSTER: dict[str, Any] = JOB["rayClusterSpec"]
HEAD: dict[str, Any] = CLUSTER["headGroupSpec"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
PODS: dict[str, dict[str, Any]] = {
    "submitter": JOB["submitterPodTemplate"],
    "head": HEAD["template"],
    "worker": WORKERS["template"],
}
INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
JOB_KEYS = """
entrypoint runtimeEnvYAML submissionMode backoffLimit shutdownAfterJobFinishes submitterPodTemplate
ttlSecondsAfterFinished activeDeadlineSeconds rayClusterSpec
"""
CLUSTER_KEYS = """
rayVersion authOptions enableInTreeAutoscaling autoscalerOptions headGroupSpec workerGroupSpecs
"""
AUTOSCALER_KEYS = "idleTimeoutSeconds upscalingMode resources securityContext volumeMounts"
GROUP_KEYS = "groupName replicas minReplicas maxReplicas rayStartParams template"
POD_KEYS = """
serviceAccountName automountServiceAccountToken restartPolicy securityContext volumes containers
terminationGracePeriodSeconds nodeSelector tolerations
"""
CONTAINER_KEYS = "name image ports env envFrom securityContext volumeMounts resources"


class End(NamedTuple):
    """One end of a connection."""

    component: str = ""
    instance: str = ""
    namespace: str = "ours"
    address: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Those of the pod."""
        return {INSTANCE: self.instance, COMPONENT: self.component}


def pod(component: str, instance: str = "headcount-texts") -> End:
    return End(component, instance)


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document["spec"] for document in DOCUMENTS if document["kind"] == kind]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def is_peer(peer: dict[str, Any], end: End) -> bool:
    ((kind, value),) = peer.items()
    if kind == "podSelector":
        return end.namespace == "ours" and selects(value, end.labels)
    if kind == "namespaceSelector":
        return selects(value, {"kubernetes.io/metadata.name": end.namespace})
    assert kind == "ipBlock"
    network = ipaddress.IPv4Network(value["cidr"])
    exceptions = [ipaddress.IPv4Network(each) for each in value.get("except", [])]
    assert all(each.subnet_of(network) for each in exceptions), "Kubernetes refuses others"
    if not end.address:
        return False
    address = ipaddress.IPv4Address(end.address)
    return address in network and all(address not in each for each in exceptions)


def permits(direction: str, end: End, other: End, port: dict[str, Any]) -> bool:
    """Whether the policies of one end let it talk to another."""
    policies = [
        spec for spec in of_kind("NetworkPolicy") if selects(spec["podSelector"], end.labels)
    ]
    if end.namespace != "ours" or not policies:
        return True
    side = {"ingress": "from", "egress": "to"}[direction]
    return any(
        (side not in rule or any(is_peer(peer, other) for peer in rule[side]))
        and ("ports" not in rule or port in rule["ports"])
        for spec in policies
        for rule in spec.get(direction, [])
    )


def connects(source: End, target: End, number: int, protocol: str = "TCP") -> bool:
    """Whether the policies of both ends let one open a connection to the other."""
    port = {"protocol": protocol, "port": number}
    egress = permits("egress", source, target, port)
    return egress and permits("ingress", target, source, port)


def containers() -> Iterator[dict[str, Any]]:
    for template in PODS.values():
        yield from template["spec"]["containers"]


def test_kinds_and_keys_are_those_that_kubernetes_and_kuberay_know() -> None:
    assert [(each["apiVersion"], each["kind"]) for each in DOCUMENTS] == [
        ("policy/v1", "PodDisruptionBudget"),
        *[("networking.k8s.io/v1", "NetworkPolicy")] * 3,
        ("ray.io/v1", "RayJob"),
    ]
    assert all(set(each) == {"apiVersion", "kind", "metadata", "spec"} for each in DOCUMENTS)
    names = [each["metadata"]["name"] for each in DOCUMENTS]
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", name) for name in names)
    assert names[-1] == PODS["head"]["metadata"]["labels"][INSTANCE]
    assert set(JOB) <= set(JOB_KEYS.split())
    assert set(CLUSTER) <= set(CLUSTER_KEYS.split())
    assert set(CLUSTER["autoscalerOptions"]) <= set(AUTOSCALER_KEYS.split())
    assert set(HEAD) | set(WORKERS) <= set(GROUP_KEYS.split())
    for template in PODS.values():
        assert set(template) == {"metadata", "spec"}
        assert set(template["spec"]) <= set(POD_KEYS.split())
        assert template["spec"]["restartPolicy"] == "Never"
        assert len(template["spec"]["containers"]) == 1
    assert all(set(each) <= set(CONTAINER_KEYS.split()) for each in containers())
    for spec in of_kind("NetworkPolicy"):
        assert set(spec) <= {"podSelector", "policyTypes", "ingress", "egress"}
        assert spec["policyTypes"] == ["Ingress", "Egress"], "without both a side stays open"
        for rule in (*spec.get("ingress", []), *spec.get("egress", [])):
            assert set(rule) <= {"from", "to", "ports"}
            for port in rule.get("ports", []):
                assert set(port) == {"protocol", "port"}
                assert port["protocol"] in ("TCP", "UDP")
                assert type(port["port"]) is int


def test_the_rayjob_runs_a_scan_with_code_from_a_bucket_and_ends() -> None:
    assert JOB["shutdownAfterJobFinishes"] is True
    assert JOB["ttlSecondsAfterFinished"] > 0
    assert JOB["activeDeadlineSeconds"] == 24 * 60 * 60
    assert JOB["backoffLimit"] >= 1, "a lost head is tried again"
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert CLUSTER["enableInTreeAutoscaling"] is True
    words = JOB["entrypoint"].split()
    assert words[:3] == ["python", "-m", kubernetes_job.__name__]
    assert words[3] == "scan"
    assert re.search(r"--set out=(s3|gs)://", JOB["entrypoint"])
    assert words[words.index("--replicas") + 1] == str(WORKERS["maxReplicas"])
    assert words[words.index("--device") + 1] == "cuda", "at the start there is no GPU to be seen"
    environment = yaml.safe_load(JOB["runtimeEnvYAML"])
    assert re.fullmatch(r"(s3|gs)://\S+\.zip", environment.pop("working_dir"))
    assert environment == {}, "dependencies belong in the image"


def test_the_head_measures_nothing_and_workers_come_and_go() -> None:
    for group in (HEAD, WORKERS):
        # KubeRay takes strings only.
        assert {type(value) for value in group["rayStartParams"].values()} <= {str}
    for container in containers():
        resources = container["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"])
        # More than asked for is not safe to use.
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        # A pod whose logs fill the disk of its node takes the others down with it.
        assert "ephemeral-storage" in resources["requests"].keys() & resources["limits"].keys()
    assert HEAD["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in str(HEAD)
    aws = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    assert (WORKERS["replicas"], WORKERS["minReplicas"]) == (0, 0)
    assert WORKERS["maxReplicas"] == aws["max_workers"]
    spec = WORKERS["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["terminationGracePeriodSeconds"] <= 120, "a spot machine waits no longer"
    assert any("spot" in (key + value).lower() for key, value in spec["nodeSelector"].items())
    assert all({"key", "operator", "effect"} <= set(each) for each in spec["tolerations"])


def test_every_container_is_restricted_and_writes_only_into_folders_of_its_pod() -> None:
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 100}
    for template in PODS.values():
        spec = template["spec"]
        assert spec["securityContext"] == user | {"seccompProfile": {"type": "RuntimeDefault"}}
        assert {each["name"]: set(each["emptyDir"]) for each in spec["volumes"]} == {
            "tmp": {"sizeLimit"},
            "cache": {"sizeLimit"},
        }
    # KubeRay gives the worker's to the container that waits for the head.
    for container in (*containers(), CLUSTER["autoscalerOptions"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        # Not the home directory: the image has its Python there.
        assert mounts == {"/tmp": "tmp", "/home/ray/.cache": "cache"}
    # Only the autoscaler, beside the head, asks Kubernetes.
    tokens = {name: each["spec"].get("automountServiceAccountToken") for name, each in PODS.items()}
    assert tokens == {"submitter": False, "head": None, "worker": False}


def test_secrets_come_by_reference_only() -> None:
    for container in containers():
        variables = {each["name"]: each["value"] for each in container.get("env", [])}
        assert not [name for name in variables if re.search("KEY|SECRET|TOKEN|PASS|CRED", name)]
        # A path or a number, and nothing long without a slash.
        assert not [value for value in variables.values() if re.search(r"[^/]{20}", value)]
        assert all(set(each) == {"secretRef"} for each in container.get("envFrom", []))
    secrets = [each.get("envFrom") for each in containers()]
    store = [{"secretRef": {"name": "headcount-store", "optional": True}}]
    assert secrets == [None, store, store]
    arguments = JOB["entrypoint"] + JOB["runtimeEnvYAML"]
    assert not re.search(r"(?i)env_vars|key|secret|token|passw|://[^/\s]*@", arguments)


def test_a_drain_waits_for_the_head_and_for_nobody_else() -> None:
    (budget,) = of_kind("PodDisruptionBudget")
    selector = budget.pop("selector")
    # Of pods without a scale Kubernetes counts no maxUnavailable, and no share.
    assert budget == {"minAvailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    assert [
        name for name, each in PODS.items() if selects(selector, each["metadata"]["labels"])
    ] == ["head"]


def test_pods_reach_each_other_the_store_and_names_and_nobody_else_reaches_them() -> None:
    for name, template in PODS.items():
        assert template["metadata"]["labels"] == pod(name).labels
    head, worker, submitter = pod("head"), pod("worker"), pod("submitter")
    operator, dns = End(namespace="kuberay"), End(namespace="kube-system")
    outside, inside, other = End(address="52.218.1.1"), End(address="10.0.0.5"), End(namespace="x")
    metadata = End(address="169.254.169.254")
    for port in (6379, 8265, 10002):
        assert connects(worker, head, port)
        assert connects(head, worker, port)
        assert connects(worker, worker, port)
        for stranger in (other, pod("worker", "headcount-code"), End()):
            assert not connects(stranger, head, port)
            assert not connects(stranger, worker, port)
        for asking in (submitter, operator):
            assert connects(asking, head, port) == (port == 8265)
            assert not connects(asking, worker, port)
        assert not connects(worker, submitter, port)
    assert [connects(each, outside, 443) for each in (head, worker, submitter)] == [
        True,
        True,
        False,
    ]
    assert [connects(each, inside, 443) for each in (head, worker, submitter)] == [
        True,
        False,
        False,
    ]
    assert [connects(each, metadata, 80) for each in (head, worker, submitter)] == [
        True,
        True,
        False,
    ]
    for each in (head, worker, submitter):
        assert connects(each, dns, 53, "UDP")
        assert connects(each, dns, 53, "TCP")
        assert not connects(each, other, 53)
        assert not connects(each, outside, 80)
