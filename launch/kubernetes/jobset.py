"""The pods of a JobSet: the nodes they need, their container, its variables and volumes.

The spec's text travels in an annotation of the pods, which the kubelet shows them as a file. One object holds all that
a run is, so a restart can never meet another spec than the one that was submitted.

What an API server refuses, refused before it is asked, in one line that names the option.

The rules are Kubernetes' own (apimachinery's `util/validation` and `api/resource`, `core/validation`), and those of
image references (distribution's `reference`), which only the kubelet looks at: a pod with a bad one waits for ever.

The job as a JobSet on Kubernetes: one child Job a slice, one pod a host.

How an exit code gets the right answer, though JobSet never sees one:

1. A Job may try no pod again (`backoffLimit: 0`), so the first pod that fails is the end of its Job, which stops the
   other pods. A pod failure policy makes the Job name the cause: "Container runner for pod ... failed with exit code
   75 matching FailJob rule at index 1", or "Pod ... has condition DisruptionTarget matching FailJob rule at index 2"
   for a pod that the cluster took away. After any other end of a pod the Job speaks of its backoff limit alone.
2. JobSet matches that message against rules of its own, in order. Codes 1 and 2 fail the set. Code 75 and a pod that
   was taken away start all of it again at no charge. Everything else (76, a kill, a lost node) starts all of it again
   and counts.

A node that is lost without notice is missed by the other hosts before Kubernetes knows: they end with 76, so it counts.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from launch.options import SUBMITTED, grace_seconds, runner_arguments
from runner.accelerator import Accelerator, parse_accelerator
from runner.errors import EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, InvalidError
from runner.spec import ExecutionSpec

MOST_PODS = 100_000  # of an indexed Job
_MOST_ANNOTATION_BYTES = 256 * 1024  # of all annotations of one object
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_ESCAPED_BY_GO = "<>&\u2028\u2029"  # by 6 bytes each, in JSON

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_IN_A_LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_COMPONENT = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"


@dataclass(frozen=True)
class Rule:
    """What a value must look like.

    Attributes:
        pattern: of all of it.
        most: characters.
        words: what it needs, for a person.
    """

    pattern: str
    most: int
    words: str

    def check(self, option: str, value: str) -> None:
        """Raise `InvalidError` unless the value is such a one."""
        if len(value) > self.most or re.fullmatch(self.pattern, value, re.ASCII) is None:
            raise InvalidError(f"{option} {value!r:.100}: needs {self.words}")


NAMESPACE = Rule(_DNS_LABEL, 63, "at most 63 lower case letters, digits and '-', no '-' first or last")
OBJECT = Rule(rf"{_DNS_LABEL}(\.{_DNS_LABEL})*", 253, "at most 253 lower case letters, digits, '-' and '.'")
LABEL = Rule(
    rf"({_DNS_LABEL}(\.{_DNS_LABEL})*/)?{_IN_A_LABEL}",
    317,
    "[DOMAIN/]NAME of at most 63 letters, digits, '-', '_', '.'",
)
LABEL_VALUE = Rule(
    rf"({_IN_A_LABEL})?", 63, "at most 63 letters, digits, '-', '_' and '.', a letter or digit at the ends"
)
VARIABLE = Rule(r"(?!\.\.?$|\.\.)[-._a-zA-Z][-._a-zA-Z0-9]*", 4096, "letters, digits, '_', '-' and '.', no digit first")
QUANTITY = Rule(r"(\d+\.?\d*|\.\d+)([munkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,2})?", 32, "a quantity such as 4, 500m, 16Gi")
PATH = Rule(r"/[^:\0]*", 4096, "an absolute path without ':'")
IMAGE = Rule(
    rf"({_DOMAIN}(\.{_DOMAIN})*(:\d+)?/)?{_COMPONENT}(/{_COMPONENT})*(:\w[\w.-]{{0,127}})?(@[A-Za-z][\w.+-]*:[0-9a-fA-F]{{32,}})?",
    512,
    "an image such as registry/job:1, in lower case but for the tag",
)


def check_options(parsed: argparse.Namespace) -> None:
    """Raise `InvalidError` for the first option that an API server, or a kubelet, would refuse."""
    IMAGE.check("--image", parsed.image)
    single = (
        ("namespace", NAMESPACE),
        ("service_account", OBJECT),
        ("priority_class", OBJECT),
        ("cpu", QUANTITY),
        ("memory", QUANTITY),
        ("workdir", PATH),
    )
    for name, rule in single:
        if getattr(parsed, name) is not None:
            rule.check(f"--{name.replace('_', '-')}", getattr(parsed, name))
    for label, value in parsed.node_selector:
        LABEL.check("--node-selector", label)
        LABEL_VALUE.check(f"--node-selector {label}", value)
    for name, _ in parsed.env:
        VARIABLE.check("--env", name)
    for secret in parsed.env_from_secret:
        OBJECT.check("--env-from-secret", secret)
    for claim, path in parsed.volume_claim:
        OBJECT.check("--volume-claim", claim)
        PATH.check(f"--volume-claim {claim}", path)


def check_mounts(paths: Sequence[str]) -> None:
    """Raise `InvalidError` if a path is none to mount at, or two are one."""
    for path in paths:
        PATH.check("the mount at", path)
        if ".." in PurePosixPath(path).parts:
            raise InvalidError(f"the mount at {path}: needs a path without '..'")
    twins = [path for path in paths if sum(PurePosixPath(other) == PurePosixPath(path) for other in paths) > 1]
    if twins:
        raise InvalidError(f"{twins[0]} would be mounted twice; needs a path for each volume")


def check_size(manifest: Mapping[str, object], spec_bytes: int) -> None:
    """Raise `InvalidError` if the manifest does not fit where kubectl puts a copy of it, an annotation of itself."""
    text = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False)
    size = len(text.encode()) + 5 * sum(map(text.count, _ESCAPED_BY_GO)) + len(_LAST_APPLIED)
    if size > _MOST_ANNOTATION_BYTES:
        raise InvalidError(
            f"the manifest has {size} bytes, {spec_bytes} of them the spec's; kubectl keeps a copy in an annotation, "
            f"which ends at {_MOST_ANNOTATION_BYTES}; needs a smaller spec (its comments count too) or fewer options"
        )


CONTAINER = "runner"
SLICE = "slice"  # the replicated job: its pods are NAME-slice-SLICE-HOST
SPEC_ANNOTATION = "runner/spec"
SPEC_DIRECTORY = PurePosixPath("/etc/runner")
SPEC_FILE = "spec.yaml"
COORDINATOR_PORT = 8476
_SPOT = "cloud.google.com/gke-spot"
_SECRET_NAME = r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CONNECTION_STRING)$"


@dataclass(frozen=True)
class Pods:
    """How many pods the job has, and on which nodes.

    Attributes:
        chips: what Kubernetes calls the chips, and how many each pod gets; empty on CPUs.
        labels: what the nodes must be labelled with.
    """

    hosts_per_slice: int
    num_slices: int = 1
    chips: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    is_tpu: bool = False


def pods_for(accelerator: Accelerator | None, num_nodes: int | None) -> Pods:
    """Where a job for this accelerator runs; `num_nodes` are for a job that may run on CPUs.

    Raises `InvalidError` for what spec and command line leave open, or what GKE does not have.
    """
    if accelerator is None or accelerator.name == "cpu":
        if num_nodes is None:
            raise InvalidError("topology.accelerator names no chips to ask for; give --nodes N for N pods on CPUs")
        if num_nodes > MOST_PODS:
            raise InvalidError(f"--nodes {num_nodes}: a Job has at most {MOST_PODS} pods")
        return Pods(num_nodes)
    name, chip = accelerator.name, accelerator.chip
    if num_nodes is not None:
        raise InvalidError(f"--nodes {num_nodes} is for pods on CPUs, but topology.accelerator names {name}")
    if accelerator.num_chips is None or accelerator.num_chips_per_host is None:
        raise InvalidError(f"topology.accelerator is {name}; needs the number of chips too, such as {name}-16")
    if chip.gke_accelerator is None:
        raise InvalidError(f"topology.accelerator is {name}, which GKE does not have")
    hosts, num_chips_per_host = accelerator.hosts_per_slice, accelerator.num_chips_per_host
    if hosts * accelerator.num_slices > MOST_PODS:
        raise InvalidError(f"topology.accelerator is {accelerator}; a JobSet has at most {MOST_PODS} pods")
    if chip.is_tpu:
        labels = {
            "cloud.google.com/gke-tpu-accelerator": chip.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": accelerator.shape,
        }
        if hosts == 1 and accelerator.num_slices > 1:
            raise InvalidError(
                f"{accelerator.num_slices} slices of {name}-{accelerator.num_chips}: GKE joins only slices that have "
                "several hosts; use larger ones"
            )
        return Pods(hosts, accelerator.num_slices, {"google.com/tpu": num_chips_per_host}, labels, is_tpu=True)
    if hosts > 1 and accelerator.num_chips % hosts:
        raise InvalidError(f"{name}-{accelerator.num_chips} does not divide over {hosts} nodes")
    labels = {"cloud.google.com/gke-accelerator": chip.gke_accelerator}
    return Pods(hosts * accelerator.num_slices, 1, {"nvidia.com/gpu": num_chips_per_host}, labels)


def template(
    spec: ExecutionSpec, text: str, parsed: argparse.Namespace, pods: Pods, name: str, submitted: str | None
) -> dict[str, Any]:
    """The template of every pod of the JobSet `name`; `text` is the spec as it was written, `submitted` as of `render`.

    Raises `InvalidError` for what the pods would lose or give away.
    """
    _check_directory(spec.directory, parsed)
    annotations = {SPEC_ANNOTATION: text}
    if not parsed.spot:  # one pod moved to save a node is a restart of all; GKE does not promise this on spot nodes
        annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] = "false"
    volumes, mounts = _volumes(spec, parsed, pods)
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds(parsed, spec.checkpoint),
        "serviceAccountName": parsed.service_account,
        "priorityClassName": parsed.priority_class,
        "nodeSelector": pods.labels | ({_SPOT: "true"} if parsed.spot else {}) | dict(parsed.node_selector),
        "tolerations": [
            *({"key": chip, "operator": "Exists", "effect": "NoSchedule"} for chip in pods.chips),
            *([{"key": _SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}] if parsed.spot else []),
        ],
        "containers": [_container(parsed, pods, name, submitted) | {"volumeMounts": mounts}],
        "volumes": volumes,
    }
    return {"metadata": {"annotations": annotations}, "spec": _given(pod)}


def _check_directory(directory: str, parsed: argparse.Namespace) -> None:
    """What a pod writes on its own disk is gone with the pod."""
    path = PurePosixPath(parsed.workdir or "", directory)
    if "://" not in directory and not any(path.is_relative_to(mount) for _, mount in parsed.volume_claim):
        raise InvalidError(
            f"directory is {directory}, on the pods' own disks, which end with them; needs gs://, s3:// or az://, "
            "or a path in a shared volume that --volume-claim CLAIM=PATH mounts"
        )


def _volumes(
    spec: ExecutionSpec, parsed: argparse.Namespace, pods: Pods
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes of a pod, and where its container sees them."""
    spec_file = {"path": SPEC_FILE, "fieldRef": {"fieldPath": f"metadata.annotations['{SPEC_ANNOTATION}']"}}
    volumes: list[tuple[str, str, dict[str, Any]]] = [
        ("spec", str(SPEC_DIRECTORY), {"downwardAPI": {"items": [spec_file]}})
    ]
    for number, (claim, path) in enumerate(parsed.volume_claim):
        volumes.append((f"claim-{number}", path, {"persistentVolumeClaim": {"claimName": claim}}))
    fast = spec.checkpoint.local_directory
    if fast is not None:
        if not PurePosixPath(fast).is_absolute():
            raise InvalidError(f"checkpoint.local_directory is {fast}; needs an absolute path, on the node")
        # The node's own directory: an emptyDir ends with its pod, and every restart makes new pods.
        volumes.append(("fast-tier", fast, {"hostPath": {"path": fast, "type": "DirectoryOrCreate"}}))
    if pods.chips and not pods.is_tpu:  # NCCL wants more shared memory than the usual 64 MiB
        volumes.append(("shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory"}}))
    check_mounts([path for _, path, _ in volumes])
    return (
        [{"name": name, **source} for name, _, source in volumes],
        [{"name": name, "mountPath": path} for name, path, _ in volumes],
    )


def _container(parsed: argparse.Namespace, pods: Pods, name: str, submitted: str | None) -> dict[str, Any]:
    """What runs in every pod, but for its volumes."""
    first_host = f"{name}-{SLICE}-0-0.{name}"
    arguments = [literal(word) for word in runner_arguments(str(SPEC_DIRECTORY / SPEC_FILE), parsed.set)]
    if not pods.is_tpu and pods.hosts_per_slice > 1:  # GKE tells JAX of the hosts of a TPU slice, but of no others
        arguments += ["--coordinator", f"{first_host}:{COORDINATOR_PORT}"]
        arguments += ["--num-processes", str(pods.hosts_per_slice), "--process-id", "$(JOB_COMPLETION_INDEX)"]
    container = {
        "name": CONTAINER,
        "image": parsed.image,
        "command": ["python"],
        "args": arguments,
        "workingDir": parsed.workdir,
        "env": [{"name": key} | value for key, value in _variables(parsed, pods, first_host, submitted).items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in parsed.env_from_secret],
        "resources": _given(
            {
                "requests": _given({"cpu": parsed.cpu, "memory": parsed.memory}) | pods.chips,
                "limits": pods.chips,
            }
        ),
    }
    return _given(container)


def _variables(
    parsed: argparse.Namespace, pods: Pods, first_host: str, submitted: str | None
) -> dict[str, dict[str, Any]]:
    """The environment of the container; the user's word is the last."""
    variables: dict[str, dict[str, Any]] = {"PYTHONUNBUFFERED": {"value": "1"}}
    if submitted is not None:
        variables[SUBMITTED] = {"value": submitted}
    if not pods.chips:
        variables["JAX_PLATFORMS"] = {"value": "cpu"}
    if pods.num_slices > 1:
        slice_index = {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/job-index']"}
        variables["MEGASCALE_NUM_SLICES"] = {"value": str(pods.num_slices)}
        variables["MEGASCALE_SLICE_ID"] = {"valueFrom": {"fieldRef": slice_index}}
        variables["MEGASCALE_COORDINATOR_ADDRESS"] = {"value": first_host}
    for name, value in parsed.env:
        if re.search(_SECRET_NAME, name.upper()):
            raise InvalidError(
                f"--env {name} would stand in the manifest for all to read; use --env-from-secret SECRET"
            )
        variables[name] = {"value": literal(value)}
    return variables


def literal(text: str) -> str:
    """Text that Kubernetes, which expands $(NAME) in arguments and values, leaves as it is."""
    return text.replace("$", "$$")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Without what is not set."""
    return {key: value for key, value in values.items() if value not in (None, {}, [])}


LONGEST_LABEL = 63  # of a DNS name, which a pod's must be

POD_FAILURE_RULES = [
    {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": values}}
    for values in ([EXIT_FAILED, EXIT_INVALID], [EXIT_PREEMPTED])
] + [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]

JOBSET_FAILURE_RULES = [
    {
        "name": "final",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"failed with exit code ({EXIT_FAILED}|{EXIT_INVALID}) matching FailJob rule"],
    },
    {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [
            f"failed with exit code {EXIT_PREEMPTED} matching FailJob rule",
            "has condition DisruptionTarget matching FailJob rule",
        ],
    },
    {"name": "retryable", "action": "RestartJobSet"},
]


def render(spec: ExecutionSpec, text: str, parsed: argparse.Namespace, submitted: str | None) -> dict[str, Any]:
    """The JobSet of a job; `text` is its spec as it was written, `submitted` when that was, if its pods are told.

    Raises `InvalidError` for what cannot run there.
    """
    check_options(parsed)
    accelerator = None if spec.topology is None else parse_accelerator(spec.topology.accelerator)
    pods = pods_for(accelerator, parsed.nodes)
    name = kubernetes_name(parsed.name or spec.name, pods)
    metadata: dict[str, Any] = {"name": name}
    if parsed.namespace:
        metadata["namespace"] = parsed.namespace
    if pods.is_tpu:  # a slice is one node pool, and all of it
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    job = {
        "parallelism": pods.hosts_per_slice,
        "completions": pods.hosts_per_slice,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": POD_FAILURE_RULES},
        "template": template(spec, text, parsed, pods, name, submitted),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "coordinator": {"replicatedJob": SLICE, "jobIndex": 0, "podIndex": 0},
            "failurePolicy": {
                "maxRestarts": parsed.max_restarts,
                "restartStrategy": "BlockingRecreate",  # no pod of an attempt meets one of the attempt before it
                "rules": JOBSET_FAILURE_RULES,
            },
            "replicatedJobs": [{"name": SLICE, "replicas": pods.num_slices, "template": {"spec": job}}],
        },
    }


def kubernetes_name(name: str, pods: Pods) -> str:
    """A run's name as Kubernetes takes it: pods are called NAME-slice-SLICE-HOST-xxxxx, which must be a DNS label."""
    suffix = f"-{SLICE}-{pods.num_slices - 1}-{pods.hosts_per_slice - 1}-xxxxx"
    longest = LONGEST_LABEL - len(suffix)
    result = re.sub(r"[._]", "-", name.lower())
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", result) or len(result) > longest:
        raise InvalidError(
            f"{name} cannot name a JobSet: needs a letter, then letters, digits and '-', no '-' last, and at most "
            f"{longest} characters with so many pods; give --name NAME"
        )
    return result


class _Dumper(yaml.SafeDumper):
    """Quotes what the parser of kubectl, unlike PyYAML, reads as no text: 1e3, y."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_ambiguous = re.fullmatch(r"[-+.]?[.\d].*|[yYnN]", text) is not None
    style = "|" if text.endswith("\n") else '"' if is_ambiguous else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump(manifest: dict[str, Any]) -> str:
    """A manifest as YAML."""
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
