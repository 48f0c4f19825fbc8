"""Jobs of `launch jobset` on a real Kubernetes API server, with the real controllers of Jobs and JobSets.

Each test needs root and the directory KUBEBUILDER_ASSETS with the programs of Kubernetes and JobSet's controller.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from launch.app import main
from launch.kubernetes import engine
from runner.attempts.environment import SUBMITTED
from tests.launch.kubernetes.test_jobset import (
    EVERY_OPTION,
    GOLDEN,
    NAMES,
    ROOT,
    SIZES,
    SPEC,
    get_job,
    get_variables,
    launch,
    list_accelerators,
)
from tests.support.job_process import (
    SMALL_GPT_OPTIONS,
    WHOLE_RUN_DEADLINE_SECONDS,
    Job,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
    read_lines,
)
from tests.support.kubernetes_cluster import JOBS, JOBSETS, PODS, KubernetesCluster, Object, RefusedError
from tests.support.leftover import list_children

pytestmark = pytest.mark.soak

STRICT = "?dryRun=All&fieldValidation=Strict"
INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"
GPT_OPTIONS = (
    *SMALL_GPT_OPTIONS,
    "config.train.total_steps=3000",
    "config.eval.every_steps=3000",
    "checkpoint.every_steps=20",
    "logging.every_steps=5",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesCluster]:
    """Nodes of each kind, service accounts and a priority class.

    Three nodes run pods. The others have devices: two slices of v5e-16, each a node pool, a pool of two slices of
    v5e-4, and two nodes with GPUs.
    """
    running = KubernetesCluster(tmp_path_factory.mktemp("kubernetes"))
    for number in range(3):
        running.nodes.add(f"cpu-{number}")
    for pool, topology, num_nodes in (("pool-a", "4x4", 4), ("pool-b", "4x4", 4), ("single", "2x2", 2)):
        tpu = {"gke-tpu-accelerator": "tpu-v5-lite-podslice", "gke-tpu-topology": topology, "gke-nodepool": pool}
        labels = {f"cloud.google.com/{name}": value for name, value in tpu.items()}
        for number in range(num_nodes):
            running.nodes.add(f"{pool}-{number}", labels, "google.com/tpu", **{"google.com/tpu": 4})
    for number in range(2):
        add_gpu_node(running, f"gpu-{number}")
    running.kubectl("create", "namespace", "research")
    running.kubectl("create", "priorityclass", "high", "--value=1000")
    for namespace in ("default", "research"):
        running.kubectl("create", "serviceaccount", "trainer", f"--namespace={namespace}")
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        running.wait(lambda accounts=accounts: len(running.list(accounts)) == 2, "the default service account")
    yield running
    running.stop()


def add_gpu_node(cluster: KubernetesCluster, name: str) -> None:
    """Add a node with eight H100 that does not run its pods."""
    labels = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    cluster.nodes.add(name, labels, "nvidia.com/gpu", **{"nvidia.com/gpu": 8})


@pytest.fixture
def kubectl(cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    """Cluster that `launch jobset` finds with kubectl; its JobSets are deleted after the test."""
    for name in ("KUBECONFIG", "PATH", "HOME"):
        monkeypatch.setenv(name, cluster.variables[name])
    yield cluster
    cluster.delete_jobsets()


def list_objects(manifest: Object) -> list[tuple[str, Object]]:
    """Return the path and the object of everything that a manifest makes or needs: its JobSet, a Job, a pod, and more.

    The Job and its pod are those that JobSet and Kubernetes make of it.
    """
    metadata, pod = manifest["metadata"], get_job(manifest)["template"]
    name, namespace = metadata["name"], metadata.get("namespace", "default")
    spec = get_job(manifest) | {"template": pod | {"spec": pod["spec"] | {"subdomain": name}}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{name}-slice-0"}, "spec": spec}
    last = f"{name}-slice-{manifest['spec']['replicatedJobs'][0]['replicas'] - 1}-{spec['completions'] - 1}"
    host = {"metadata": {"name": f"{last}-abcde"}, "spec": pod["spec"] | {"subdomain": name, "hostname": last}}
    host["metadata"]["annotations"] = pod["metadata"]["annotations"]
    found = [(JOBS, job), (PODS, {"apiVersion": "v1", "kind": "Pod"} | host)]
    for volume in pod["spec"]["volumes"]:
        if "persistentVolumeClaim" in volume:
            claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": make_claim("1Gi")}
            claim["metadata"] = {"name": volume["persistentVolumeClaim"]["claimName"]}
            found.append(("/api/v1/namespaces/{}/persistentvolumeclaims", claim))
    if "namespace" in metadata:
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": metadata["namespace"] + "2"}}
        found.append(("/api/v1/namespaces", made))
    return [(path.format(namespace), each) for path, each in [(JOBSETS, manifest), *found]]


def make_claim(size: str) -> Object:
    """Return the spec of a claim of shared storage without a storage class."""
    return {"accessModes": ["ReadWriteMany"], "storageClassName": "", "resources": {"requests": {"storage": size}}}


def list_refusals(cluster: KubernetesCluster, manifest: Object) -> list[str]:
    """Return the messages of the API server about the objects of a manifest, without making any of them."""
    messages = []
    for path, each in list_objects(manifest):
        try:
            cluster.request("POST", path + STRICT, each)
        except RefusedError as error:
            messages.append(f"{each['kind']}: {error}")
    return messages


# What is accepted


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_manifests_are_accepted(cluster, name):
    manifest = yaml.safe_load((SPEC.parent / f"{name}.yaml").read_text())
    assert list_refusals(cluster, manifest) == []
    text = (SPEC.parent / f"{name}.yaml").read_text()
    namespace = manifest["metadata"].get("namespace", "default")
    cluster.request("POST", JOBSETS.format(namespace) + STRICT, text, "application/yaml")
    output = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    assert output == "jobset.jobset.x-k8s.io/tiny-gpt created (server dry run)\n"


def render(capsys: pytest.CaptureFixture[str], *options: str, spec: Path = SPEC) -> Object:
    assert launch("--dry-run", *options, spec=spec) == 0
    return dict(yaml.safe_load(capsys.readouterr().out))


def test_the_manifest_of_every_accelerator_is_accepted(cluster, capsys):
    for accelerator in list_accelerators():
        manifest = render(capsys, "--set", f"topology.accelerator={accelerator}")
        assert list_refusals(cluster, manifest) == [], accelerator


def test_the_manifest_with_every_option_is_accepted(cluster, capsys):
    for accelerator in ("2xv6e-64", "b200-16"):
        manifest = render(capsys, *EVERY_OPTION, "--set", f"topology.accelerator={accelerator}")
        assert list_refusals(cluster, manifest) == []


@pytest.mark.parametrize(("options", "limit"), SIZES.values(), ids=SIZES)
def test_names_are_accepted_and_refused_by_both(cluster, options, limit, capsys, unchecked):
    names = {**NAMES, "a" * limit: "a" * limit, "a" * (limit + 1): None}
    for name, made in names.items():
        assert launch("--dry-run", *options, "--name", name) == (2 if made is None else 0), name
        text = capsys.readouterr().out
        assert made is None or list_refusals(cluster, yaml.safe_load(text)) == [], name
    unchecked()
    for name in (name for name, made in names.items() if made is None):
        assert list_refusals(cluster, render(capsys, *options, "--name", name)) != [], name


# What is refused


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Switch the rules of the engine off."""

    def disable() -> None:
        monkeypatch.setattr(engine.Rule, "validate", lambda *_: None)
        monkeypatch.setattr(engine, "validate_mounts", lambda _: None)
        monkeypatch.setattr(engine, "make_kubernetes_name", lambda name, _: name)
        monkeypatch.setattr(engine, "MAX_PODS", 10**9)
        monkeypatch.setattr(engine, "validate_size", lambda *_: None)

    return disable


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--name", "3b"),
        ("--name", "gpt_small!"),
        ("--name", "gpt-"),
        ("--name", "a" * 64),
        ("--namespace", "Research"),
        ("--namespace", "a.b"),
        ("--service-account", "trainer_1"),
        ("--priority-class", "High"),
        ("--cpu", "4x"),
        ("--cpu", "-1"),
        ("--memory", "16GiB"),
        ("--memory", "1 Gi"),
        ("--node-selector", "a b=c"),
        ("--node-selector", "a/b/c=d"),
        ("--node-selector", "a=b c"),
        ("--node-selector", f"a={'b' * 64}"),
        ("--label", "a b=c"),
        ("--label", "a=b c"),
        ("--label", f"a={'b' * 64}"),
        ("--annotation", "a b=c"),
        ("--annotation", "a/b/c=d"),
        ("--env", "A B\u00e9=1"),
        ("--env-from-secret", "Wandb_"),
        ("--volume-claim", "Team_Disk=/runs"),
        ("--volume-claim", "disk=/a:b"),
        ("--volume-claim", "disk=/etc/runner"),
        ("--nodes", "100001"),
    ],
)
def test_a_wrong_value_is_refused_by_launch_and_by_the_server(cluster, option, value, capsys, unchecked):
    words = [option, value] if option == "--nodes" else ["--nodes", "2", option, value]
    assert launch("--dry-run", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    unchecked()
    assert list_refusals(cluster, render(capsys, *words)) != []


@pytest.mark.parametrize("accelerator", ["cpu", "v5e-16"])
def test_the_largest_spec_is_accepted_and_the_next_is_refused_by_both(
    cluster, accelerator, capsys, unchecked, tmp_path
):
    spec = tmp_path / "spec.yaml"
    options = ["--namespace", "research", *(["--nodes", "2"] if accelerator == "cpu" else [])]
    options += ["--set", f"topology.accelerator={accelerator}"]

    def write(num_bytes: int) -> None:
        spec.write_text(f"{SPEC.read_text()}# {'<' * 100}{'x' * num_bytes}\n")

    def measure(num_bytes: int) -> int:
        write(num_bytes)
        assert launch("--dry-run", *options, spec=spec) == 2
        (size,) = re.findall(r"the manifest has (\d+) bytes", capsys.readouterr().err)
        return int(size)

    limit = 300_000 - (measure(300_000) - 256 * 1024)
    assert measure(limit + 1) == 256 * 1024 + 1
    apply = ["apply", "--dry-run=server", "-f", "-"]
    write(limit)
    manifest = render(capsys, *options, spec=spec)
    assert list_refusals(cluster, manifest) == []
    cluster.kubectl(*apply, text=engine.dump(manifest))
    unchecked()
    write(limit + 1)
    too_large = engine.dump(render(capsys, *options, spec=spec))
    with pytest.raises(AssertionError, match="Too long"):
        cluster.kubectl(*apply, text=too_large)


# Submission


def submit(accelerator: str, number: int = 0) -> None:
    assert launch("--set", f"topology.accelerator={accelerator}", "--name", f"job-{number}") == 0


def wait_for_pods(cluster: KubernetesCluster, num_placed: int, num_unplaced: int = 0) -> list[Object]:
    """Wait until so many pods have a node, and the scheduler has found none for so many others; return all pods."""

    def list_places() -> list[str]:
        places = []
        for pod in cluster.list(PODS.format("default")):
            conditions = {each["type"]: each.get("reason", "") for each in pod["status"].get("conditions", [])}
            has_node = "nodeName" in pod["spec"] and "deletionTimestamp" not in pod["metadata"]
            places.append("placed" if has_node else conditions.get("PodScheduled", ""))
        return sorted(places)

    wanted = ["Unschedulable"] * num_unplaced + ["placed"] * num_placed
    cluster.wait(lambda: list_places() == wanted, f"{num_placed} pods with a node and {num_unplaced} without")
    pods = cluster.list(PODS.format("default"))
    assert {pod["status"]["phase"] for pod in pods} == {"Pending"}
    return pods


def list_pools(pods: list[Object]) -> dict[str, list[str]]:
    """Return the pools of nodes on which the pods of each child Job are, with nodes of their own."""
    nodes = [pod["spec"]["nodeName"] for pod in pods if "nodeName" in pod["spec"]]
    assert len(set(nodes)) == len(nodes)
    pools: dict[str, set[str]] = {}
    for pod in pods:
        pools.setdefault(pod["metadata"]["labels"][JOB_NAME], set()).add(
            pod["spec"].get("nodeName", "none-").rpartition("-")[0]
        )
    return {name: sorted(each) for name, each in sorted(pools.items())}


# Accelerators of JobSets, the pods with and without a node, and the pools that each child Job may get.
PLACEMENTS = {
    "one slice": (["v5e-16"], 4, 0, [{"pool-a", "pool-b"}]),
    "two slices": (["2xv5e-16"], 8, 0, [{"pool-a"}, {"pool-b"}]),
    # The other pods of a slice are made only after its first one has a node.
    "more slices than pools": (["3xv5e-16"], 8, 1, [{"none"}, {"pool-a"}, {"pool-b"}]),
    "two jobs and two pools": (["v5e-16", "v5e-16"], 8, 0, [{"pool-a"}, {"pool-b"}]),
    "no slice of this shape": (["v5e-8"], 0, 1, [{"none"}]),
    "jobs that share a pool of single hosts": (["v5e-4", "v5e-4", "v5e-4"], 2, 1, [{"none"}, {"single"}, {"single"}]),
    "nodes with GPUs": (["h100-16"], 2, 0, [{"gpu"}]),
    "too few nodes with GPUs": (["h100-24"], 2, 1, [{"gpu", "none"}]),
}


@pytest.mark.parametrize(("accelerators", "num_placed", "num_unplaced", "pools"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_pods_get_nodes_of_their_own(kubectl, accelerators, num_placed, num_unplaced, pools):
    """Check the scheduler's choice: one pod per node, a slice in one pool, and pods without a node that wait."""
    for number, accelerator in enumerate(accelerators):
        submit(accelerator, number)
    pods = wait_for_pods(kubectl, num_placed, num_unplaced)
    for found, allowed in zip(sorted(list_pools(pods).values()), pools, strict=True):
        assert allowed.issuperset(found)
        assert len(found) == 1 or "none" in found
    for pod in pods:
        name, index = pod["metadata"]["labels"][JOB_NAME], pod["metadata"]["annotations"][INDEX]
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (f"{name}-{index}", name.rpartition("-slice-")[0])


def test_a_pod_waits_for_a_node(kubectl):
    submit("h100-24")
    wait_for_pods(kubectl, 2, 1)
    add_gpu_node(kubectl, "gpu-new")
    assert list_pools(wait_for_pods(kubectl, 3)) == {"job-0-slice-0": ["gpu"]}
    kubectl.delete_jobsets()
    kubectl.nodes.lose("gpu-new")
    kubectl.kubectl("delete", "node", "gpu-new")


def test_a_replaced_pod_of_a_slice_comes_back_to_its_pool(kubectl):
    """Check it for the first pod, which the others follow, and for another one, while a second pool is empty."""
    submit("v5e-16")
    pods = wait_for_pods(kubectl, 4)
    pools = list_pools(pods)
    for index in (0, 3):
        (lost,) = (pod for pod in pods if pod["metadata"]["annotations"][INDEX] == str(index))
        kubectl.kubectl("delete", "pod", lost["metadata"]["name"])
        after = wait_for_pods(kubectl, 4)
        assert list_pools(after) == pools
        old, new = ({pod["metadata"]["uid"]: pod["spec"]["hostname"] for pod in each} for each in (pods, after))
        assert [old[uid] for uid in old.keys() - new] == [f"job-0-slice-0-{index}"]
        assert [new[uid] for uid in new.keys() - old] == [f"job-0-slice-0-{index}"]
        pods = after


class KubernetesJob:
    """A job that `launch jobset` submits, with pods on nodes of their own and a volume for its directory.

    Attributes:
        job: the job, with its directory as this process sees it.
        name: name of the JobSet.
    """

    def __init__(self, cluster: KubernetesCluster, directory: Path, spec: str, *options: str, num_pods: int = 2):
        self.cluster, self._spec, self._options, self._num_pods = cluster, spec, options, num_pods
        disk, self._mount = directory / "disk", directory / "mount"
        disk.mkdir()
        self.job = Job(spec, disk / "run", options)
        self.name = re.sub("_", "-", Path(spec).stem)
        self._claim = f"disk-{len(cluster.list('/api/v1/persistentvolumes'))}"
        claims = "/api/v1/namespaces/default/persistentvolumeclaims"
        volume = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": str(disk)}}
        volume["claimRef"] = {"namespace": "default", "name": self._claim}
        for path, kind, made in (
            ("/api/v1/persistentvolumes", "PersistentVolume", volume),
            (claims, "PersistentVolumeClaim", make_claim("1Gi") | {"volumeName": self._claim}),
        ):
            cluster.request(
                "POST", path, {"apiVersion": "v1", "kind": kind, "metadata": {"name": self._claim}, "spec": made}
            )

    def submit(self, *options: str) -> int:
        """Run `launch jobset` and return its exit code."""
        settings = (f"directory={self._mount / 'run'}", *self._options)
        words = [word for setting in settings for word in ("--set", setting)]
        where = ["--nodes", str(self._num_pods), "--cpu", "5", "--volume-claim", f"{self._claim}={self._mount}"]
        return main(["jobset", self._spec, "--image", "registry/job:1", *words, *where, *options])

    def get(self) -> Object:
        return self.cluster.request("GET", f"{JOBSETS.format('default')}/{self.name}")

    def count_failures(self) -> int:
        """Return the number of failed pods that count against the limit of the Job."""
        job = self.cluster.request("GET", f"{JOBS.format('default')}/{self.name}-slice-0")
        return int(job["status"].get("failed", 0))

    def pods(self) -> dict[int, Object]:
        """Return the pods that have not ended, by index; of a pod and its successor, the successor."""
        found = {
            int(pod["metadata"]["annotations"][INDEX]): pod
            for pod in sorted(
                self.cluster.list(PODS.format("default")), key=lambda pod: pod["metadata"]["creationTimestamp"]
            )
            if pod["status"]["phase"] in ("Pending", "Running")
        }
        return dict(sorted(found.items()))

    def find_trainer(self, index: int) -> int:
        """Return the process id of the runner in a pod, which its worker has started."""
        return list_children(self.cluster.nodes.find_process(self.pods()[index]))[0]

    def newest_attempt(self) -> int:
        """Return the number of the newest attempt that has committed a step."""
        return max((row["attempt"] for row in self.job.events("commit")), default=0)

    def wait_for_commit(self, attempt: int) -> None:
        """Wait until an attempt after `attempt` has committed a step."""
        self.cluster.wait(lambda: self.newest_attempt() > attempt, f"a commit after attempt {attempt}")

    def wait_for_step(self, attempt: int) -> None:
        """Wait until an attempt after `attempt` has completed a step."""

        def has_stepped() -> bool:
            starts = [row for row in self.job.events("init", "restore") if row["attempt"] > attempt]
            rows = read_lines(self.job.directory / "metrics.jsonl")
            return bool(starts) and any(row["step"] > (starts[-1]["step"] or 0) for row in rows[-1:])

        self.cluster.wait(has_stepped, f"a step after attempt {attempt}")

    def wait_for_end(self) -> str:
        self.cluster.wait(
            lambda: "terminalState" in self.get().get("status", {}), "the end of the JobSet", WHOLE_RUN_DEADLINE_SECONDS
        )
        return str(self.get()["status"]["terminalState"])


@dataclass(frozen=True)
class Fault:
    """A fault of a pod.

    Attributes:
        strike: function that does it to the pod of an index.
        index: index of the pod.
        is_replaced: True if the pod is replaced, alone; False if its runner starts again in it.
        num_counted: failures that the Job counts.
    """

    strike: Callable[[KubernetesJob, int], object]
    index: int
    is_replaced: bool = True
    num_counted: int = 0


def kill_trainer(job: KubernetesJob, index: int) -> None:
    os.kill(job.find_trainer(index), signal.SIGKILL)


def kill_pod(job: KubernetesJob, index: int) -> None:
    os.kill(job.cluster.nodes.find_process(job.pods()[index]), signal.SIGKILL)


def delete_pod(job: KubernetesJob, index: int) -> None:
    job.cluster.kubectl("delete", "pod", job.pods()[index]["metadata"]["name"], "--wait=false")


def evict_pod(job: KubernetesJob, index: int) -> None:
    name = job.pods()[index]["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
    job.cluster.request("POST", f"{PODS.format('default')}/{name}/eviction", body)


def lose_node(job: KubernetesJob, index: int) -> None:
    """Switch the node off, see that its pod is kept while it may still run, and remove the node."""
    pod, cluster = job.pods()[index], job.cluster
    node = pod["spec"]["nodeName"]
    cluster.nodes.lose(node)
    cluster.wait(lambda: "deletionTimestamp" in job.pods()[index]["metadata"], "the node is given up")
    assert job.pods()[index]["metadata"]["uid"] == pod["metadata"]["uid"]
    cluster.kubectl("delete", "node", node)


FAULTS = {
    "killed trainer": Fault(kill_trainer, 1, is_replaced=False),
    "killed trainer of process 0": Fault(kill_trainer, 0, is_replaced=False),
    "deleted pod": Fault(delete_pod, 1),
    "evicted pod of process 0": Fault(evict_pod, 0),
    "killed pod": Fault(kill_pod, 1, num_counted=1),
    "lost node": Fault(lose_node, 1),
}


def test_a_lost_process_or_pod_is_replaced_alone(kubectl, tmp_path, capfd):
    """Check that only the pod of a fault is replaced, if any, under its name, and that the run has the same bits."""
    job = KubernetesJob(kubectl, tmp_path, "specs/gpt_nano.yaml", *GPT_OPTIONS)
    assert job.submit() == 0
    job.wait_for_commit(0)
    for name, fault in FAULTS.items():
        before, attempt, num_counted = job.pods(), job.newest_attempt(), job.count_failures()
        assert list(before) == [0, 1], name
        peer = before[1 - fault.index]
        num_read, began = len(kubectl.nodes.read_log(peer)), time.monotonic()
        fault.strike(job, fault.index)
        job.wait_for_step(attempt)
        with capfd.disabled():
            print(f"\n{name}: {time.monotonic() - began:.1f} s to the next step")
        job.wait_for_commit(attempt)
        after = job.pods()
        assert [pod["spec"]["hostname"] for pod in after.values()] == ["gpt-nano-slice-0-0", "gpt-nano-slice-0-1"], name
        replaced = [index for index in before if after[index]["metadata"]["uid"] != before[index]["metadata"]["uid"]]
        assert replaced == [fault.index] * fault.is_replaced, name
        assert job.count_failures() == num_counted + fault.num_counted, name
        # Abruptly lost, its peer ends with 76; asked to stop, it asks its peer to save too, which ends with 75.
        assert re.search(r"ended with 76; restart|preempted; starting", kubectl.nodes.read_log(peer)[num_read:]), name
    kubectl.nodes.add("cpu-new")
    assert job.wait_for_end() == "Completed"
    assert job.get()["status"].get("restarts", 0) == 0
    whole = make_uninterrupted_run("specs/gpt_nano.yaml", GPT_OPTIONS, num_processes=2)
    assert job.job.result()["fingerprint"] == whole.result()["fingerprint"]


@pytest.mark.parametrize(
    ("spec", "options", "num_pods", "run_whole"),
    [
        ("specs/counter.yaml", ["config.step_seconds=0.1"], 2, lambda spec: make_uninterrupted_counter_run(())),
        ("specs/gpt_nano.yaml", [], 1, make_uninterrupted_run),
    ],
    ids=["counter", "gpt_nano"],
)
def test_a_disturbed_run_has_the_bits_of_an_undisturbed_process(kubectl, tmp_path, spec, options, num_pods, run_whole):
    """Check whole runs of shipped specs: a killed trainer, a deleted pod, and the end with 0 of every pod."""
    job = KubernetesJob(kubectl, tmp_path, spec, *options, num_pods=num_pods)
    assert job.submit() == 0
    for strike in (kill_trainer, delete_pod):
        job.wait_for_commit(job.newest_attempt())
        strike(job, num_pods - 1)
    assert job.wait_for_end() == "Completed"
    assert job.newest_attempt() == 3
    ended = [pod["status"] for pod in kubectl.list(PODS.format("default")) if pod["status"]["phase"] == "Succeeded"]
    assert [status["containerStatuses"][0]["state"]["terminated"]["exitCode"] for status in ended] == [0] * num_pods
    assert job.job.result()["fingerprint"] == run_whole(spec).result()["fingerprint"]


@pytest.mark.parametrize("code", [1, 2])
def test_a_code_that_needs_a_person_fails_the_jobset(kubectl, tmp_path, code):
    spec = tmp_path / "counter.yaml"
    text = (ROOT / "specs" / "counter.yaml").read_text()
    failing = "tests.support.faulty_jobs:FailingCounter"
    spec.write_text(re.sub("^job: .*$", f"job: {failing}", text, flags=re.MULTILINE) if code == 1 else text)
    job = KubernetesJob(kubectl, tmp_path, str(spec), "config.total_steps=2000", "config.step_seconds=0.01")
    if code == 2:  # the directory holds a run of another shape
        Job(str(spec), job.job.directory, ("config.total_steps=4", "config.step_seconds=0", "config.width=4")).finish()
    assert job.submit() == 0
    assert job.wait_for_end() == "Failed"
    kubectl.wait(lambda: not job.pods(), "the end of all pods")
    child = kubectl.request("GET", f"{JOBS.format('default')}/counter-slice-0")
    (failed,) = [each for each in child["status"]["conditions"] if each["type"] == "Failed"]
    assert failed["reason"] == "PodFailurePolicy"
    assert f"exit code {code}" in failed["message"]
    assert job.get()["status"].get("restarts", 0) == 0


def test_a_pod_that_dies_at_the_end_of_its_job_is_not_started_again(kubectl, tmp_path):
    job = KubernetesJob(kubectl, tmp_path, "specs/counter.yaml", "config.total_steps=6", "config.step_seconds=0.0")
    assert job.submit() == 0
    kubectl.wait(lambda: len(job.pods()) == 2, "both pods")
    pods = job.pods()

    def has_result() -> bool:
        return (job.job.directory / "result.json").exists()

    kubectl.wait(has_result, "the result")
    with contextlib.suppress(OSError, LookupError):  # it may have ended by itself
        job_trainer = job.find_trainer(1)
        os.kill(job_trainer, signal.SIGKILL)
    assert job.wait_for_end() == "Completed"
    assert job.count_failures() == 0
    assert all("restart" not in kubectl.nodes.read_log(pod) for pod in pods.values())


def test_apply_delete_and_apply_again(kubectl, tmp_path, capfd):
    """Check the commands of the README: a second submission changes nothing, and a deleted job saves and resumes."""
    job = KubernetesJob(kubectl, tmp_path, "specs/gpt_nano.yaml", *GPT_OPTIONS, "checkpoint.every_steps=100000")
    assert job.submit("--env", "A=1") == 0
    assert capfd.readouterr().out == "jobset.jobset.x-k8s.io/gpt-nano created\n"
    submitted = get_variables(job.get())[SUBMITTED]
    job.wait_for_step(0)
    before, spec = {index: pod["metadata"]["uid"] for index, pod in job.pods().items()}, get_job(job.get())
    capfd.readouterr()
    assert job.submit("--env", "A=1") == 0
    # kubectl sends the list of jobs again, without the defaults that the server has put into it.
    assert capfd.readouterr().out == "jobset.jobset.x-k8s.io/gpt-nano configured\n"
    assert get_job(job.get()) == spec
    assert get_variables(job.get())[SUBMITTED] == submitted
    # Another spec: refused, and nothing changes.
    assert job.submit("--env", "A=2") == 1
    assert "immutable" in capfd.readouterr().err
    assert {index: pod["metadata"]["uid"] for index, pod in job.pods().items()} == before
    print(kubectl.kubectl("get", "jobset,job,pod"))
    kubectl.kubectl("delete", "jobset", "gpt-nano")
    kubectl.wait(lambda: not kubectl.list(PODS.format("default")), "the end of all pods")
    (saved,) = job.job.committed()
    assert [row["event"] for row in job.job.events()][-1] == "preempt"
    time.sleep(1.1)  # times of submission have whole seconds
    assert job.submit("--env", "A=2") == 0
    assert int(get_variables(job.get())[SUBMITTED]) > int(submitted)
    job.wait_for_step(1)
    (restored,) = job.job.events("restore")
    assert restored["step"] == saved
