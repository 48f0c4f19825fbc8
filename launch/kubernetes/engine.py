"""Engine `jobset`: the manifest of a JobSet, and its submission with kubectl.

The manifest describes the nodes that the pods need, their container, and the reaction to the end of a pod, which JobSet
carries out. The spec is passed as text in an annotation of the pods, which the kubelet mounts as a file. A single
object therefore defines the run, and a restart always gets the submitted spec.

Reaction to exit codes:

1. The first process of each container is `launch.worker`, which starts the runner again after 75, 76 and a kill. The
   pod, its node and its image stay, and nothing is scheduled. The other hosts end with 75 or 76 too, and their workers
   start them again.
2. A pod that was taken away (evicted, drained, preempted, its node lost) is replaced by its Job, under the same index
   and host name, while the workers of the other pods wait for it at the rendezvous. A pod failure policy keeps the Job
   from counting it, and from counting a pod that ends with 75. Any other end counts against the Job's backoff limit.
3. Codes 1 and 2 need a person: the policy fails the Job at once, and so the JobSet, which never restarts a Job.

All fields are stable ones of the Job. A Job with a pod failure policy replaces a pod only after it has ended
(`podReplacementPolicy: Failed`), and the fence of the run's directory holds in any case.

Values that an API server would refuse are refused before the submission, in one line that names the option. The rules
are Kubernetes' own (apimachinery's `util/validation` and `api/resource`, `core/validation`), and those of image
references (distribution's `reference`), which only the kubelet checks: a pod with a bad one waits forever.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar

import typer
import yaml

from launch.checks import SkipChecks, check_job
from launch.options import (
    MAX_NUMBER,
    SUBMIT_TIME_VARIABLE,
    DryRun,
    Exclude,
    GraceSeconds,
    LaunchArguments,
    Nodes,
    find_grace_seconds,
    restart_arguments,
    set_arguments,
)
from runner.accelerator import Accelerator, parse_accelerator
from runner.attempts.environment import ENGINE
from runner.console import write_text
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, FailedError, InvalidError
from runner.process import NODE_VARIABLE, format_placement
from runner.spec import Document, ExecutionSpec, load_document, validate_spec
from runner.spec.document import TextDumper, dump_yaml

CONTAINER = "runner"
SLICE = "slice"  # name of the replicated job: its pods are called NAME-slice-SLICE-HOST
SPEC_ANNOTATION = "runner/spec"
SPEC_DIRECTORY = PurePosixPath("/etc/runner")
SPEC_FILE = "spec.yaml"
COORDINATOR_PORT = 8476
MAX_PODS = 100_000  # of an indexed Job
MAX_LABEL_CHARACTERS = 63  # of a DNS label, which the name of a pod must be
_MAX_ANNOTATION_BYTES = 256 * 1024  # of all annotations of an object
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_ESCAPED_BY_GO = "<>&\u2028\u2029"  # characters that Go writes as 6 bytes in JSON
_SPOT = "cloud.google.com/gke-spot"
# Domains of labels and annotations that Kubernetes, JobSet, kubectl and this module set.
_RESERVED_DOMAINS = (
    "jobset.sigs.k8s.io",
    "alpha.jobset.sigs.k8s.io",
    "batch.kubernetes.io",
    "kubectl.kubernetes.io",
    SPEC_ANNOTATION.partition("/")[0],
)
_KUEUE = "kueue.x-k8s.io/"
_SECRET_NAME = r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CONNECTION_STRING)$"

# The first rule that matches a failed pod decides. If none does, the pod is replaced, and counts.
POD_FAILURE_RULES = [
    {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": values}}
    for action, values in (("FailJob", [EXIT_FAILED, EXIT_INVALID]), ("Ignore", [EXIT_PREEMPTED]))
] + [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_TEXT = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_COMPONENT = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"


@dataclass(frozen=True)
class Rule:
    """A rule for the value of an option."""

    pattern: str  # regular expression for the whole value
    max_characters: int  # largest length
    words: str  # valid form in words

    def validate(self, option: str, value: str) -> None:
        """Raise `InvalidError` if the value breaks the rule."""
        if len(value) > self.max_characters or re.fullmatch(self.pattern, value, re.ASCII) is None:
            raise InvalidError(f"{option} {value!r:.100}: needs {self.words}")


NAMESPACE = Rule(_DNS_LABEL, 63, "at most 63 lower case letters, digits and '-', no '-' first or last")
OBJECT = Rule(rf"{_DNS_LABEL}(\.{_DNS_LABEL})*", 253, "at most 253 lower case letters, digits, '-' and '.'")
LABEL = Rule(
    rf"({_DNS_LABEL}(\.{_DNS_LABEL})*/)?{_LABEL_TEXT}",
    317,
    "[DOMAIN/]NAME of at most 63 letters, digits, '-', '_', '.'",
)
LABEL_VALUE = Rule(
    rf"({_LABEL_TEXT})?", 63, "at most 63 letters, digits, '-', '_' and '.', a letter or digit at the ends"
)
VARIABLE = Rule(r"(?!\.\.?$|\.\.)[-._a-zA-Z][-._a-zA-Z0-9]*", 4096, "letters, digits, '_', '-' and '.', no digit first")
QUANTITY = Rule(r"(\d+\.?\d*|\.\d+)([munkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,2})?", 32, "a quantity such as 4, 500m, 16Gi")
PATH = Rule(r"/[^:\0]*", 4096, "an absolute path without ':'")
IMAGE = Rule(
    rf"({_DOMAIN}(\.{_DOMAIN})*(:\d+)?/)?{_COMPONENT}(/{_COMPONENT})*(:\w[\w.-]{{0,127}})?(@[A-Za-z][\w.+-]*:[0-9a-fA-F]{{32,}})?",
    512,
    "an image such as registry/job:1, in lower case but for the tag",
)


@dataclass(frozen=True, kw_only=True)
class JobSetArguments(LaunchArguments):
    """Arguments of `launch jobset`."""

    free_texts: ClassVar[tuple[str, ...]] = (*LaunchArguments.free_texts, "annotation")
    pairs: ClassVar[tuple[str, ...]] = ("node_selector", "label", "annotation", "env", "volume_claim")

    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Container image with Python, the runner and the job's own code.")
    ]
    is_skip_checks: SkipChecks = False
    dry_run: DryRun = False
    name: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="the spec's name", help="Name of the JobSet.")
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default="that of kubectl's context", help="Namespace of the JobSet."),
    ] = None
    nodes: Nodes = None
    cpu: Annotated[str | None, typer.Option(metavar="QUANTITY", help="CPUs that each pod requests, such as 4.")] = None
    memory: Annotated[
        str | None, typer.Option(metavar="QUANTITY", help="Memory that each pod requests, such as 16Gi.")
    ] = None
    spot: Annotated[bool, typer.Option("--spot", help="Use GKE's spot nodes.")] = False
    node_selector: Annotated[
        list[str], typer.Option(metavar="LABEL=VALUE", help="Label that the nodes must have; repeatable.")
    ] = field(default_factory=list)
    exclude: Exclude = field(default_factory=list)
    label: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE", help="Label of the JobSet and its pods, such as Kueue's queue name; repeatable."
        ),
    ] = field(default_factory=list)
    annotation: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="Annotation of the JobSet and its pods; repeatable.")
    ] = field(default_factory=list)
    grace_seconds: GraceSeconds = None
    workdir: Annotated[
        str | None,
        typer.Option(metavar="PATH", show_default="the image's", help="Working directory in the container."),
    ] = None
    env: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="Variable, visible to all in the manifest; repeatable.")
    ] = field(default_factory=list)
    env_from_secret: Annotated[
        list[str], typer.Option(metavar="SECRET", help="Secret whose keys become variables; repeatable.")
    ] = field(default_factory=list)
    volume_claim: Annotated[
        list[str], typer.Option(metavar="CLAIM=PATH", help="Volume of a claim, and where to mount it; repeatable.")
    ] = field(default_factory=list)
    service_account: Annotated[str | None, typer.Option(metavar="NAME", help="Service account of the pods.")] = None
    priority_class: Annotated[str | None, typer.Option(metavar="NAME", help="Priority class of the pods.")] = None

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Claims of volumes, each with the path to mount it at."""
        return _split_pairs(self.volume_claim)

    def validate_for_kubernetes(self) -> None:
        """Raise `InvalidError` for the first option that an API server or a kubelet would refuse."""
        IMAGE.validate("--image", self.image)
        optional = (
            ("--namespace", self.namespace, NAMESPACE),
            ("--service-account", self.service_account, OBJECT),
            ("--priority-class", self.priority_class, OBJECT),
            ("--cpu", self.cpu, QUANTITY),
            ("--memory", self.memory, QUANTITY),
            ("--workdir", self.workdir, PATH),
        )
        for option, given, rule in optional:
            if given is not None:
                rule.validate(option, given)
        for label, value in _split_pairs(self.node_selector):
            LABEL.validate("--node-selector", label)
            LABEL_VALUE.validate(f"--node-selector {label}", value)
        for node in self.exclude:
            LABEL_VALUE.validate("--exclude", node)
        for option, pairs in (("--label", self.label), ("--annotation", self.annotation)):
            for name, value in _split_pairs(pairs):
                LABEL.validate(option, name)
                if option == "--label":
                    LABEL_VALUE.validate(f"--label {name}", value)
                if name.rpartition("/")[0] in _RESERVED_DOMAINS or name in ("job-name", "controller-uid"):
                    raise InvalidError(f"{option} {name}: is set by Kubernetes, JobSet or this command itself")
        for name, _ in _split_pairs(self.env):
            VARIABLE.validate("--env", name)
            # Manifests are kept in repositories and shown by `kubectl get`, so a key must not be a value in one.
            if re.search(_SECRET_NAME, name.upper()):
                raise InvalidError(
                    f"--env {name} would be visible to all in the manifest; use --env-from-secret SECRET"
                )
        for secret in self.env_from_secret:
            OBJECT.validate("--env-from-secret", secret)
        for claim, path in self.mounts:
            OBJECT.validate("--volume-claim", claim)
            PATH.validate(f"--volume-claim {claim}", path)


@dataclass(frozen=True)
class _PodAllocation:
    """Pods of a job, and the nodes that they need."""

    hosts_per_slice: int  # number of pods of each child Job
    num_slices: int = 1  # number of child Jobs
    # Kubernetes' name of the chips, and how many each pod gets; empty on CPUs.
    chips: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)  # labels that the nodes must have
    is_tpu: bool = False  # True if the chips are TPUs


def render(document: Document, text: str, arguments: JobSetArguments, submit_time: str | None) -> dict[str, Any]:
    """Return the manifest of the job of a document.

    `text` is the spec as the user wrote it. Without a time of submission, in Unix seconds, pods get none.

    Raises:
        InvalidError: the job cannot run on Kubernetes with these options.
    """
    spec = validate_spec(document)
    arguments.validate_for_kubernetes()
    accelerator = None if spec.topology is None else parse_accelerator(spec.topology.accelerator)
    with document.errors_at("topology.accelerator") if arguments.nodes is None else contextlib.nullcontext():
        pods = _allocate_pods(accelerator, arguments.nodes)
    with document.errors_at("name") if arguments.name is None else contextlib.nullcontext():
        name = make_kubernetes_name(arguments.name or spec.name, pods)
    metadata: dict[str, Any] = {"name": name}
    if arguments.namespace:
        metadata["namespace"] = arguments.namespace
    annotations = dict(_split_pairs(arguments.annotation))
    if pods.is_tpu and pods.hosts_per_slice > 1:  # such a slice is one whole node pool; one of single hosts is shared
        annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] = "cloud.google.com/gke-nodepool"
    metadata |= _drop_empty({"labels": dict(_split_pairs(arguments.label)), "annotations": annotations})
    job = {
        "parallelism": pods.hosts_per_slice,
        "completions": pods.hosts_per_slice,
        "completionMode": "Indexed",
        # Each host counts its own restarts, and a fault of one host ends the others too.
        "backoffLimit": min(arguments.max_restarts * pods.hosts_per_slice, MAX_NUMBER),
        "podFailurePolicy": {"rules": POD_FAILURE_RULES},
        "template": _render_pod(document, spec, text, arguments, pods, name, submit_time),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": SLICE, "replicas": pods.num_slices, "template": {"spec": job}}],
        },
    }


def _allocate_pods(accelerator: Accelerator | None, num_nodes: int | None) -> _PodAllocation:
    """Return the pods for an accelerator; `num_nodes` is the option `--nodes`, for a job that may run on CPUs.

    Raises:
        InvalidError: spec and command line leave the pods undetermined, or GKE does not have the accelerator.
    """
    if accelerator is None or accelerator.name == "cpu":
        if num_nodes is None:
            raise InvalidError("names no chips to request; give --nodes N for N pods on CPUs")
        if num_nodes > MAX_PODS:
            raise InvalidError(f"--nodes {num_nodes}: a Job has at most {MAX_PODS} pods")
        return _PodAllocation(num_nodes)
    name, chip = accelerator.name, accelerator.chip
    if num_nodes is not None:
        raise InvalidError(f"--nodes {num_nodes} is for pods on CPUs, but topology.accelerator is {name}; leave it out")
    if accelerator.num_chips is None or accelerator.num_chips_per_host is None:
        raise InvalidError(f"is {name}; needs the number of chips too, such as {name}-16")
    if chip.gke_accelerator is None:
        raise InvalidError(f"is {name}, which GKE does not have")
    hosts, num_chips_per_host = accelerator.hosts_per_slice, accelerator.num_chips_per_host
    if hosts * accelerator.num_slices > MAX_PODS:
        raise InvalidError(f"is {accelerator}; a JobSet has at most {MAX_PODS} pods")
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
        return _PodAllocation(
            hosts, accelerator.num_slices, {"google.com/tpu": num_chips_per_host}, labels, is_tpu=True
        )
    if hosts > 1 and accelerator.num_chips % hosts:
        raise InvalidError(f"{name}-{accelerator.num_chips} does not divide into {hosts} nodes; use another number")
    labels = {"cloud.google.com/gke-accelerator": chip.gke_accelerator}
    return _PodAllocation(hosts * accelerator.num_slices, 1, {"nvidia.com/gpu": num_chips_per_host}, labels)


def make_kubernetes_name(name: str, pods: _PodAllocation) -> str:
    """Return a run's name in Kubernetes' form.

    Pods are called NAME-slice-SLICE-HOST-xxxxx, which must be a DNS label.
    """
    # The longest name of a pod: its highest numbers, and the five characters that Kubernetes adds.
    suffix = f"-{SLICE}-{pods.num_slices - 1}-{pods.hosts_per_slice - 1}-xxxxx"
    max_characters = MAX_LABEL_CHARACTERS - len(suffix)
    result = re.sub(r"[._]", "-", name.lower())
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", result) or len(result) > max_characters:
        raise InvalidError(
            f"{name} cannot name a JobSet: needs a letter, then letters, digits and '-', no '-' last, and at most "
            f"{max_characters} characters with so many pods; give --name NAME"
        )
    return result


def _render_pod(
    document: Document,
    spec: ExecutionSpec,
    text: str,
    arguments: JobSetArguments,
    pods: _PodAllocation,
    name: str,
    submit_time: str | None,
) -> dict[str, Any]:
    """Return the template of every pod of the JobSet `name`. The other arguments are those of `render`."""
    # A relative directory is relative to the working directory of the container.
    path = PurePosixPath(arguments.workdir or "", spec.directory)
    if "://" not in spec.directory and not any(path.is_relative_to(mount) for _, mount in arguments.mounts):
        raise document.error(
            "directory",
            f"is {spec.directory}, on the pods' own disks, which are deleted with them; needs gs://, s3:// or az://, "
            "or a path in a shared volume that --volume-claim CLAIM=PATH mounts",
        )
    annotations = dict(_split_pairs(arguments.annotation)) | {SPEC_ANNOTATION: text}
    # Kueue admits the JobSet as a whole: a queue of the pods' own would make it wait for each pod.
    labels = {name: value for name, value in _split_pairs(arguments.label) if not name.startswith(_KUEUE)}
    if not arguments.spot:  # moving one pod to save a node restarts all; GKE does not promise this on spot nodes
        annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] = "false"

    spec_file = {"path": SPEC_FILE, "fieldRef": {"fieldPath": f"metadata.annotations['{SPEC_ANNOTATION}']"}}
    volumes: list[tuple[str, str, dict[str, Any]]] = [
        ("spec", str(SPEC_DIRECTORY), {"downwardAPI": {"items": [spec_file]}})
    ]
    for number, (claim, mount) in enumerate(arguments.mounts):
        volumes.append((f"claim-{number}", mount, {"persistentVolumeClaim": {"claimName": claim}}))
    fast = spec.checkpoint.local_directory
    if fast is not None:
        if not PurePosixPath(fast).is_absolute():
            raise document.error("checkpoint.local_directory", f"is {fast}; needs an absolute path, on the node")
        # A directory of the node: an emptyDir is deleted with its pod, and a replaced pod may come back to this node.
        volumes.append(("fast-tier", fast, {"hostPath": {"path": fast, "type": "DirectoryOrCreate"}}))
    if pods.chips and not pods.is_tpu:  # NCCL needs more shared memory than the usual 64 MiB
        volumes.append(("shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory"}}))
    validate_mounts([mount for _, mount, _ in volumes])

    nodes = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": arguments.exclude}
    avoided = {"nodeSelectorTerms": [{"matchExpressions": [nodes]}]} if arguments.exclude else None
    container = _render_container(arguments, pods, name, submit_time)
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": find_grace_seconds(arguments.grace_seconds, spec.checkpoint),
        "serviceAccountName": arguments.service_account,
        "priorityClassName": arguments.priority_class,
        "nodeSelector": pods.labels
        | ({_SPOT: "true"} if arguments.spot else {})
        | dict(_split_pairs(arguments.node_selector)),
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": avoided}} if avoided else {},
        "tolerations": [
            *({"key": chip, "operator": "Exists", "effect": "NoSchedule"} for chip in pods.chips),
            *([{"key": _SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}] if arguments.spot else []),
        ],
        "containers": [container | {"volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in volumes]}],
        "volumes": [{"name": name, **source} for name, _, source in volumes],
    }
    return {"metadata": _drop_empty({"labels": labels, "annotations": annotations}), "spec": _drop_empty(pod)}


def _render_container(
    arguments: JobSetArguments, pods: _PodAllocation, name: str, submit_time: str | None
) -> dict[str, Any]:
    """Return the container of every pod, without its volumes."""
    # The DNS name of the first pod, which is known before any pod exists; `enableDNSHostnames` promises it.
    first_host = f"{name}-{SLICE}-0-0.{name}"
    words = ["-m", "launch.worker", str(SPEC_DIRECTORY / SPEC_FILE), *set_arguments(arguments.overrides)]
    command = [escape_references(word) for word in words]
    # The kubelet signals the first process of a container only.
    command += ["--forward-signals", *restart_arguments(arguments)]
    if not pods.is_tpu and pods.hosts_per_slice > 1:  # GKE tells JAX about the hosts of TPU slices only
        coordinator = f"{first_host}:{COORDINATOR_PORT}"
        command += format_placement(coordinator, pods.hosts_per_slice, "$(JOB_COMPLETION_INDEX)")

    # A later variable overrides an earlier one of the same name, so those of the user come last.
    variables: dict[str, dict[str, Any]] = {
        "PYTHONUNBUFFERED": {"value": "1"},
        ENGINE: {"value": "kubernetes"},
        NODE_VARIABLE: {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},  # the host name is that of the pod
    }
    if submit_time is not None:
        variables[SUBMIT_TIME_VARIABLE] = {"value": submit_time}
    # An image with a GPU or TPU build of JAX would look for such a device first.
    if not pods.chips:
        variables["JAX_PLATFORMS"] = {"value": "cpu"}
    if pods.num_slices > 1:
        slice_index = {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/job-index']"}
        variables["MEGASCALE_NUM_SLICES"] = {"value": str(pods.num_slices)}
        variables["MEGASCALE_SLICE_ID"] = {"valueFrom": {"fieldRef": slice_index}}
        variables["MEGASCALE_COORDINATOR_ADDRESS"] = {"value": first_host}
    for variable, value in _split_pairs(arguments.env):
        variables[variable] = {"value": escape_references(value)}

    requests = _drop_empty({"cpu": arguments.cpu, "memory": arguments.memory}) | pods.chips
    container = {
        "name": CONTAINER,
        "image": arguments.image,
        "command": ["python"],
        "args": command,
        "workingDir": arguments.workdir,
        "env": [{"name": variable} | value for variable, value in variables.items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in arguments.env_from_secret],
        "resources": _drop_empty({"requests": requests, "limits": pods.chips}),
    }
    return _drop_empty(container)


def validate_mounts(paths: Sequence[str]) -> None:
    """Raise `InvalidError` if nothing can be mounted at one of the paths, or if two are the same."""
    for path in paths:
        PATH.validate("the mount at", path)
        if ".." in PurePosixPath(path).parts:
            raise InvalidError(f"the mount at {path}: needs a path without '..'")
    # Paths are compared by parts, because `/data` and `/data/` are the same directory.
    twins = [path for path in paths if sum(PurePosixPath(other) == PurePosixPath(path) for other in paths) > 1]
    if twins:
        raise InvalidError(f"{twins[0]} would be mounted twice; needs a path for each volume")


def validate_size(manifest: Mapping[str, Any], spec_bytes: int) -> None:
    """Raise `InvalidError` if the manifest does not fit into the annotation where kubectl keeps a copy of it."""
    # kubectl adds the namespace of its context, which may be as long as any, and annotations, and ends with a new line.
    metadata = {"namespace": "x" * MAX_LABEL_CHARACTERS, "annotations": {}} | manifest["metadata"]
    text = json.dumps({**manifest, "metadata": metadata}, separators=(",", ":"), ensure_ascii=False) + "\n"
    # Go escapes these characters as six bytes, so that each is up to five bytes longer in kubectl's copy than here.
    copy_bytes = len(text.encode()) + 5 * sum(map(text.count, _ESCAPED_BY_GO))
    annotations = {_LAST_APPLIED: "", **metadata["annotations"]}
    size = copy_bytes + sum(len(key) + len(value) for key, value in annotations.items())
    if size > _MAX_ANNOTATION_BYTES:
        raise InvalidError(
            f"the manifest has {size} bytes, {spec_bytes} of them the spec's; kubectl keeps a copy in an annotation, "
            f"which ends at {_MAX_ANNOTATION_BYTES}; needs a smaller spec (its comments count too) or fewer options"
        )


def escape_references(text: str) -> str:
    """Escape `$(NAME)`, which Kubernetes would expand in arguments and values."""
    return text.replace("$", "$$")


def _split_pairs(pairs: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (pair.partition("=") for pair in pairs)]


def _drop_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, {}, [])}


class _Dumper(TextDumper):
    """Dumper that quotes what kubectl's parser, unlike PyYAML, does not read as text: 1e3, y."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        node = super().represent_text(text)
        if node.style is None:
            is_ambiguous = re.fullmatch(r"[-+.]?[.\d].*|[yYnN]", text) is not None
            node.style = "|" if text.endswith("\n") else '"' if is_ambiguous else None
        return node


def dump(manifest: dict[str, Any]) -> str:
    """Return a manifest as YAML."""
    return dump_yaml(manifest, _Dumper, width=sys.maxsize)


def run(arguments: JobSetArguments) -> int:
    """Submit the job, or print what would be submitted."""
    _render_job(arguments, lambda name, namespace: None)  # every option is checked before anything takes time
    if not arguments.is_skip_checks:
        check_job(arguments, has_shared_files=False, topology=find_topology(arguments))
    submit([arguments])
    return EXIT_DONE


def find_topology(arguments: JobSetArguments) -> str | None:
    """Return the accelerator of a job on CPUs, whose number the options give."""
    return None if arguments.nodes is None else f"cpu-{arguments.nodes}"


def submit(jobs: Sequence[JobSetArguments]) -> None:
    """Submit jobs with one call of kubectl, or print their manifests. Raises as `render`, and `FailedError`."""
    # First rendered without a time, so that every option is checked before the cluster is contacted.
    manifests = [_render_job(job, lambda name, namespace: None) for job in jobs]
    if not jobs[0].dry_run:
        manifests = [_render_job(job, _find_submit_time) for job in jobs]
    text = "---\n".join(map(dump, manifests))
    if jobs[0].dry_run:
        write_text(text, is_program=True)
    else:
        _kubectl("apply", "-f", "-", text=text)


def _render_job(arguments: JobSetArguments, find_time: Callable[[str, str | None], str | None]) -> dict[str, Any]:
    """Return the manifest of a job, whose time of submission is that of a function of its name and namespace."""
    document = load_document(arguments.spec, arguments.overrides)
    validate_spec(document)  # a wrong spec is reported before a text that cannot be read
    text = Path(arguments.spec).read_text(encoding="utf-8-sig")
    metadata = render(document, text, arguments, None)["metadata"]
    manifest = render(document, text, arguments, find_time(metadata["name"], metadata.get("namespace")))
    validate_size(manifest, len(text.encode()))
    return manifest


def _find_submit_time(name: str, namespace: str | None) -> str | None:
    """Return the time at which the JobSet was submitted, in Unix seconds: now for a new JobSet.

    The environment of pods cannot be changed, so an existing JobSet keeps its time, or None if its pods have none.
    """
    where = [] if namespace is None else [f"--namespace={namespace}"]
    get = ["get", "jobset", name, *where, "--ignore-not-found", "--output=json"]
    output = _kubectl(*get, stdout=subprocess.PIPE)
    # `--ignore-not-found` makes an absent JobSet an empty answer, while a cluster that cannot be reached is an error.
    if not output.strip():
        return str(int(time.time()))
    try:
        for replicated in json.loads(output)["spec"]["replicatedJobs"]:
            for container in replicated["template"]["spec"]["template"]["spec"]["containers"]:
                for variable in container.get("env", []) if container["name"] == CONTAINER else []:
                    if variable["name"] == SUBMIT_TIME_VARIABLE:
                        return variable.get("value")
        return None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise FailedError(f"kubectl get: the JobSet {name} was not made by this command: {output!r:.100}") from None


def _kubectl(*arguments: str, text: str = "", stdout: int | None = None) -> str:
    """Run kubectl and return its output if `stdout` is a pipe.

    Raises:
        InvalidError: kubectl cannot be run.
        FailedError: kubectl has failed; it has printed why.
    """
    try:
        result = subprocess.run(["kubectl", *arguments], input=text, stdout=stdout, text=True)
    except OSError as error:
        raise InvalidError(f"cannot run kubectl: {error.strerror}; --dry-run prints the manifest instead") from None
    if result.returncode != 0:
        raise FailedError(f"kubectl {arguments[0]} ended with {result.returncode}")
    return result.stdout or ""
