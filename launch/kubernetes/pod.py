"""The pods of a JobSet: the nodes they need, their container, its variables and volumes.

The spec's text travels in an annotation of the pods, which the kubelet shows them as a file. One object holds all that
a run is, so a restart can never meet another spec than the one that was submitted.
"""

import argparse
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from launch.kubernetes.admission import MOST_PODS, check_mounts
from launch.options import SUBMITTED, grace_seconds, runner_arguments
from runner.accelerator import Accelerator
from runner.errors import InvalidError
from runner.spec import ExecutionSpec

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
    if accelerator.num_chips is None or accelerator.chips_on_a_host is None:
        raise InvalidError(f"topology.accelerator is {name}; needs the number of chips too, such as {name}-16")
    if chip.gke_accelerator is None:
        raise InvalidError(f"topology.accelerator is {name}, which GKE does not have")
    hosts, chips_on_a_host = accelerator.hosts_per_slice, accelerator.chips_on_a_host
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
        return Pods(hosts, accelerator.num_slices, {"google.com/tpu": chips_on_a_host}, labels, is_tpu=True)
    if hosts > 1 and accelerator.num_chips % hosts:
        raise InvalidError(f"{name}-{accelerator.num_chips} does not divide over {hosts} nodes")
    labels = {"cloud.google.com/gke-accelerator": chip.gke_accelerator}
    return Pods(hosts * accelerator.num_slices, 1, {"nvidia.com/gpu": chips_on_a_host}, labels)


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
