"""The job as a JobSet on Kubernetes: one child Job a slice, one pod a host.

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
import re
import sys
from typing import Any

import yaml

from launch.kubernetes import admission
from launch.kubernetes.pod import CONTAINER, SLICE, Pods, pods_for, template
from runner.accelerator import parse_accelerator
from runner.errors import EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, InvalidError
from runner.spec import ExecutionSpec

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
    admission.check_options(parsed)
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
