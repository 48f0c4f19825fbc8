"""Real Kubernetes control plane on this machine, with JobSet's controller, and nodes whose pods are local processes.

The programs come from the directory KUBEBUILDER_ASSETS, as for controller-runtime's tests. All of them listen on
127.0.0.1 only.

A container is its command in namespaces of its own for mounts, host name and process ids. So it has the files, the host
names and the signals of a container, and Python and code of this machine instead of an image. That needs root. The
network is that of the machine: the host names of all pods resolve to 127.0.0.1, so one job runs at a time.
"""

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from runner.process import find_free_port
from tests.support.job_process import ROOT
from tests.support.leftover import list_children
from tests.support.simulated_devices import environment

DEADLINE_SECONDS = 240.0
DIRECTORY_VARIABLE = "KUBEBUILDER_ASSETS"
CRD = ROOT / "tests" / "data" / "jobset.x-k8s.io_jobsets.yaml"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets"
JOBS = "/apis/batch/v1/namespaces/{}/jobs"
PODS = "/api/v1/namespaces/{}/pods"
_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "jobset-controller")
_POLL_SECONDS = 0.1
_HEARTBEAT_SECONDS = 2.0
_LOST_NODE_SECONDS = 10
_BOUND = ("setpriv", "--pdeathsig", "KILL")  # ends with its parent, even if that is killed; Go ignores other signals
_SPEC_MOUNT = Path("/etc/runner")  # the only mount of pods outside the directory of the test
# Starts the first process of a container and ends with its code. (`unshare --fork` ends with 1 after SIGKILL.)
_PARENT = (
    "import os, sys; child = os.fork(); child or os.execvp(sys.argv[1], sys.argv[1:]); "
    "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]); sys.exit(128 - code if code < 0 else code)"
)
# Is the first process of a container: mounts pairs of paths until `--`, and becomes the command.
_ENTRY = (
    'mount -t proc proc /proc; hostname "$1"; cd "$2"; shift 2; '
    'while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit 125; shift 2; done; shift; exec "$@"'
)

Object = dict[str, Any]


def expand_variables(text: str, variables: Mapping[str, str]) -> str:
    """Expand an argument or value like the kubelet: $$ is $, and $(NAME) is the variable if it exists."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text
    )


def read_field(pod: Object, path: str) -> str:
    """Return the field of a pod that a `fieldRef` names."""
    found = re.fullmatch(r"metadata\.(annotations|labels)\['(.*)'\]", path)
    if found:
        return str(pod["metadata"][found[1]][found[2]])
    value: Any = pod
    for key in path.split("."):
        value = value[key]
    return str(value)


class RefusedError(Exception):
    """The API server has refused a request: `code` of HTTP, and its message."""

    def __init__(self, code: int, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code


class KubernetesCluster:
    """Control plane, and a kubelet in a thread of this process for all nodes that are added.

    Attributes:
        directory: directory of keys, logs and the files of pods.
        variables: environment in which kubectl finds the cluster.
        address: URL of the API server.
    """

    def __init__(self, directory: Path):
        programs = Path(os.environ.get(DIRECTORY_VARIABLE, ""))
        missing = [
            name for name in _PROGRAMS if not os.environ.get(DIRECTORY_VARIABLE) or not (programs / name).exists()
        ]
        assert not missing, (
            f"{DIRECTORY_VARIABLE}={os.environ.get(DIRECTORY_VARIABLE, '')}: needs a directory with the programs of "
            f"Kubernetes 1.31 or newer and JobSet; it lacks {', '.join(missing)}"
        )
        assert os.geteuid() == 0, "the namespaces of containers need root"
        self.directory, self._programs = directory, programs
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._key, self._certificate = directory / "tls.key", directory / "tls.crt"
        extensions = ("subjectAltName=IP:127.0.0.1", "keyUsage=digitalSignature,keyCertSign")
        request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
        request += [word for extension in extensions for word in ("-addext", extension)]
        files = ["-keyout", str(self._key), "-out", str(self._certificate)]
        subprocess.run([*request, *files], check=True, capture_output=True)
        self._context = ssl.create_default_context(cafile=str(self._certificate))
        self.address = f"https://127.0.0.1:{find_free_port()}"
        self._token = os.urandom(16).hex()
        kubeconfig = directory / "kubeconfig"
        cluster = {"server": self.address, "certificate-authority": str(self._certificate)}
        kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": "admin", "user": {"token": self._token}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
                    "current-context": "test",
                }
            )
        )
        self.variables = environment(1) | {
            "KUBECONFIG": str(kubeconfig),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(directory),  # kubectl keeps a cache there
        }
        try:
            self._start_control_plane(kubeconfig)
            self._start_jobset(kubeconfig)
        except BaseException:
            self._stop_daemons()
            raise
        self.nodes = Nodes(self)

    def _start_control_plane(self, kubeconfig: Path) -> None:
        etcd, peer = (f"http://127.0.0.1:{find_free_port()}" for _ in range(2))
        (self.directory / "etcd").mkdir(mode=0o700)
        self._start(
            "etcd",
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        tokens = self.directory / "tokens.csv"
        tokens.write_text(f"{self._token},admin,admin,system:masters\n")
        self._start(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.address.rpartition(':')[2]}",
            f"--tls-cert-file={self._certificate}",
            f"--tls-private-key-file={self._key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._key}",
            f"--service-account-signing-key-file={self._key}",
            "--default-unreachable-toleration-seconds=5",
        )
        self.wait(lambda: self._is_ready(f"{self.address}/readyz"), "the API server")
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            f"--service-account-private-key-file={self._key}",
            "--leader-elect=false",
            "--secure-port=0",
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={_LOST_NODE_SECONDS}s",
        )
        self._start("kube-scheduler", f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0")

    def _start_jobset(self, kubeconfig: Path) -> None:
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        self.request("POST", definitions, yaml.safe_load(CRD.read_text()))
        self.wait(lambda: self._is_ready(self.address + JOBSETS.format("default")), "the definition of JobSets")
        self.wait(lambda: self._is_ready(f"{self.address}/openapi/v2"), "the schema for kubectl")
        certificates = self.directory / "webhook"
        certificates.mkdir()
        for file in (self._key, self._certificate):
            (certificates / file.name).symlink_to(file)
        port, health = find_free_port(), find_free_port()
        config = self.directory / "jobset.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
                    "kind": "Configuration",
                    "leaderElection": {"leaderElect": False},
                    "internalCertManagement": {"enable": False},
                    "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(certificates)},
                    "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
                    "metrics": {"bindAddress": "0"},
                }
            )
        )
        self._start("jobset-controller", f"--config={config}", f"--kubeconfig={kubeconfig}")
        self.wait(lambda: self._is_ready(f"http://127.0.0.1:{health}/readyz"), "JobSet's controller")
        # Those of JobSet's config/components/webhook, with an address outside the cluster.
        bundle = subprocess.run(
            ["openssl", "base64", "-A", "-in", str(self._certificate)], check=True, capture_output=True, text=True
        ).stdout
        ours = {
            "objectSelector": {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}
        }
        for kind, verb, updates in (("Mutating", "mutate", []), ("Validating", "validate", ["UPDATE"])):
            hooks = [
                {
                    "name": f"{verb[0]}{resource}.kb.io",
                    "admissionReviewVersions": ["v1"],
                    "sideEffects": "None",
                    "failurePolicy": "Fail",
                    "clientConfig": {"url": f"https://127.0.0.1:{port}/{verb}-{path}", "caBundle": bundle},
                    "rules": [
                        {"apiGroups": [group], "apiVersions": [version], "operations": events, "resources": [resource]}
                    ],
                    **selector,
                }
                for group, version, resource, path, events, selector in (
                    (
                        "jobset.x-k8s.io",
                        "v1alpha2",
                        "jobsets",
                        "jobset-x-k8s-io-v1alpha2-jobset",
                        ["CREATE", *updates],
                        {},
                    ),
                    ("", "v1", "pods", "-v1-pod", ["CREATE"], ours),
                )
            ]
            self.request(
                "POST",
                f"/apis/admissionregistration.k8s.io/v1/{kind.lower()}webhookconfigurations",
                {
                    "apiVersion": "admissionregistration.k8s.io/v1",
                    "kind": f"{kind}WebhookConfiguration",
                    "metadata": {"name": f"jobset-{verb}"},
                    "webhooks": hooks,
                },
            )

    def _start(self, name: str, *options: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*_BOUND, str(self._programs / name), *options],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _is_ready(self, url: str) -> bool:
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, f"{name} ended with {daemon.returncode}\n{self.report()}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._token}"})
        try:
            with urllib.request.urlopen(request, timeout=5, context=self._context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def request(
        self, method: str, path: str, body: Object | str | None = None, kind: str = "application/json"
    ) -> Object:
        """Send a request to the API server and return its answer.

        Args:
            method: method of HTTP.
            path: path and query.
            body: object, or its text.
            kind: media type of the body.

        Raises:
            RefusedError: the server has refused it.
        """
        data = None if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind, "Accept": "application/json"}
        request = urllib.request.Request(self.address + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._context) as answer:
                return dict(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
            with contextlib.suppress(ValueError, KeyError):
                text = json.loads(text)["message"]
            raise RefusedError(error.code, text) from None

    def list(self, path: str) -> list[Object]:
        """Return the objects of a collection."""
        return list(self.request("GET", path)["items"])

    def patch(self, path: str, changes: Object) -> Object:
        """Apply a strategic merge patch, in which lists such as conditions are merged by their keys."""
        return self.request("PATCH", path, changes, "application/strategic-merge-patch+json")

    def kubectl(self, *words: str, text: str | None = None) -> str:
        """Run kubectl and return its output."""
        result = subprocess.run(
            ["kubectl", *words],
            env=self.variables,
            input=text,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        assert result.returncode == 0, f"kubectl {' '.join(words)} ended with {result.returncode}\n{result.stderr}"
        return result.stdout

    def wait(self, happens: Callable[[], object], what: str, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until `happens()`; fail with all logs at the deadline."""
        deadline = time.monotonic() + deadline_seconds
        while not happens():
            assert time.monotonic() < deadline, f"not within {deadline_seconds:.0f} s: {what}\n{self.report()}"
            time.sleep(_POLL_SECONDS)

    def report(self) -> str:
        """Return the last lines of all logs, those of the pods last."""
        logs = [*sorted(self.directory.glob("*.log")), *sorted(self.directory.glob("pods/*/log"))]
        return "\n".join(
            f"--- {path.relative_to(self.directory)}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:])
            for path in logs
        )

    def delete_jobsets(self) -> None:
        """Delete all JobSets, and wait until no pod is left."""
        for jobset in self.list("/apis/jobset.x-k8s.io/v1alpha2/jobsets"):
            names = jobset["metadata"]["namespace"], jobset["metadata"]["name"]
            self.request("DELETE", f"{JOBSETS.format(names[0])}/{names[1]}?propagationPolicy=Background")
        self.wait(lambda: not self.list("/api/v1/pods"), "the end of all pods")

    def stop(self) -> None:
        """Kill all pods and stop the control plane."""
        self.nodes.stop()
        self._stop_daemons()

    def _stop_daemons(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()


class Nodes:
    """Kubelet for the nodes of a cluster: runs their pods, and reports them and the nodes themselves."""

    def __init__(self, cluster: KubernetesCluster):
        self._cluster = cluster
        self._names: set[str] = set()
        self._idle: set[str] = set()  # nodes that do not run their pods
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by the uid of the pod
        self._kill_times: dict[str, float] = {}
        self._next_heartbeat = 0.0
        self._lock = threading.Lock()
        self._hosts = cluster.directory / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._has_made_mount = not _SPEC_MOUNT.exists()
        _SPEC_MOUNT.mkdir(exist_ok=True)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)
        self._thread.start()

    def add(self, name: str, labels: Mapping[str, str] | None = None, taint: str = "", **devices: int) -> None:
        """Register a node, with `devices` such as `nvidia.com/gpu`; the pods of a tainted node are not run."""
        taints = [{"key": taint, "value": "present", "effect": "NoSchedule"}] if taint else []
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name} | dict(labels or {})}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": taints}}
        self._cluster.request("POST", "/api/v1/nodes", node)
        capacity = {"cpu": "8", "memory": "64Gi", "pods": "110"} | {key: str(value) for key, value in devices.items()}
        self._cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"capacity": capacity, "allocatable": capacity}})
        self._beat(name)
        with self._lock:
            self._names.add(name)
            if taint:
                self._idle.add(name)

    def lose(self, name: str) -> None:
        """Switch a node off: its processes are gone, and nothing is reported any more."""
        with self._lock:
            self._names.discard(name)
            for pod in self._cluster.list("/api/v1/pods"):
                if pod["spec"].get("nodeName") == name:
                    self._kill(pod["metadata"]["uid"])
                    self._processes.pop(pod["metadata"]["uid"], None)

    def find_process(self, pod: Object) -> int:
        """Return the id of the first process of a pod's container."""
        return list_children(self._processes[pod["metadata"]["uid"]].pid)[0]

    def read_log(self, pod: Object) -> str:
        """Return the output of a pod."""
        path = self._cluster.directory / "pods" / pod["metadata"]["uid"] / "log"
        return path.read_text() if path.exists() else ""

    def stop(self) -> None:
        """Kill all containers and end the thread."""
        self._is_stopping.set()
        self._thread.join()
        for uid in list(self._processes):
            self._kill(uid)
        if self._has_made_mount:
            _SPEC_MOUNT.rmdir()

    def _run(self) -> None:
        while not self._is_stopping.wait(_POLL_SECONDS):
            try:
                self._sync()
            # The object was changed or deleted meanwhile, or the server is not there: look again.
            except (RefusedError, OSError) as error:
                with (self._cluster.directory / "kubelet.log").open("a") as log:
                    print(time.time(), error, file=log)

    def _sync(self) -> None:
        with self._lock:
            if time.monotonic() >= self._next_heartbeat:
                for name in self._names:
                    self._beat(name)
                self._next_heartbeat = time.monotonic() + _HEARTBEAT_SECONDS
            pods = self._cluster.list("/api/v1/pods")
            self._write_hosts(pods)
            for pod in pods:
                if pod["spec"].get("nodeName") in self._names:
                    self._sync_pod(pod)

    def _beat(self, name: str) -> None:
        now = _format_now()
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
        self._cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [ready]}})

    def _write_hosts(self, pods: Iterable[Object]) -> None:
        """Write what the cluster's DNS would answer: names of pods that belong to a headless service."""
        services = {
            service["metadata"]["name"]
            for service in self._cluster.list("/api/v1/services")
            if service["spec"].get("clusterIP") == "None"
        }
        lines = ["127.0.0.1 localhost"]
        for pod in pods:
            host, domain = pod["spec"].get("hostname"), pod["spec"].get("subdomain")
            if pod["spec"].get("nodeName") and pod["status"]["phase"] in ("Pending", "Running") and domain in services:
                lines.append(f"127.0.0.1 {host}.{domain} {host}")
        text = "\n".join(lines) + "\n"
        if text != self._hosts.read_text():
            self._hosts.write_text(text)  # in place, since it is mounted in the containers

    def _sync_pod(self, pod: Object) -> None:
        uid, status = pod["metadata"]["uid"], pod["status"]
        path = f"{PODS.format(pod['metadata']['namespace'])}/{pod['metadata']['name']}"
        process, is_deleted = self._processes.get(uid), "deletionTimestamp" in pod["metadata"]
        if status["phase"] in ("Succeeded", "Failed"):
            self._processes.pop(uid, None)
            if is_deleted:
                self._cluster.request("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
        elif process is None and is_deleted:
            self._cluster.patch(f"{path}/status", {"status": {"phase": "Failed"}})
        elif process is None and pod["spec"]["nodeName"] in self._idle:
            pass
        elif process is None:
            self._processes[uid] = self._start(pod)
            running = {"state": {"running": {"startedAt": _format_now()}}, "ready": True, "started": True}
            self._report(pod, path, "Running", running)
        elif (code := process.poll()) is not None:
            code = 137 if code < 0 else code  # the test has killed all processes
            reason = "Completed" if code == 0 else "Error"
            ended = {"exitCode": code, "reason": reason, "finishedAt": _format_now()}
            self._report(pod, path, "Failed" if code else "Succeeded", {"state": {"terminated": ended}, "ready": False})
        elif is_deleted:
            if uid not in self._kill_times:
                self._kill_times[uid] = time.monotonic() + pod["metadata"]["deletionGracePeriodSeconds"]
                # The kubelet signals the first process of a container only.
                os.kill(self.find_process(pod), signal.SIGTERM)
            elif time.monotonic() > self._kill_times[uid]:
                self._kill(uid)

    def _report(self, pod: Object, path: str, phase: str, container: Object) -> None:
        (given,) = pod["spec"]["containers"]
        state = {"name": given["name"], "image": given["image"], "imageID": "", "restartCount": 0} | container
        conditions = [
            {"type": kind, "status": str(container["ready"])} for kind in ("Initialized", "ContainersReady", "Ready")
        ]
        changes = {"phase": phase, "containerStatuses": [state], "conditions": conditions, "startTime": _format_now()}
        self._cluster.patch(f"{path}/status", {"status": changes})

    def _start(self, pod: Object) -> "subprocess.Popen[bytes]":
        directory = self._cluster.directory / "pods" / pod["metadata"]["uid"]
        directory.mkdir(parents=True)
        (container,) = pod["spec"]["containers"]
        own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        variables = {**environment(1), **own}
        known: dict[str, str] = {}
        for variable in container.get("env", []):
            field = variable.get("valueFrom", {}).get("fieldRef")
            value = read_field(pod, field["fieldPath"]) if field else variable.get("value", "")
            known[variable["name"]] = value if field else expand_variables(value, known)
        mounts = [str(self._hosts), "/etc/hosts"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            source = self._make_volume(pod, volumes[mount["name"]], directory)
            if source is not None:
                Path(mount["mountPath"]).mkdir(parents=True, exist_ok=True)
                mounts += [str(source), mount["mountPath"]]
        words = [expand_variables(word, known) for word in (*container["command"], *container["args"])]
        entry = [
            "sh",
            "-c",
            _ENTRY,
            "sh",
            pod["spec"]["hostname"],
            container.get("workingDir", str(ROOT)),
            *mounts,
            "--",
        ]
        namespaces = [*_BOUND, "unshare", "--mount", "--uts", "--pid", sys.executable, "-ISc", _PARENT, *_BOUND]
        with (directory / "log").open("ab") as log:
            return subprocess.Popen(
                [*namespaces, *entry, *words],
                env=variables | known,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _make_volume(self, pod: Object, volume: Object, directory: Path) -> Path | None:
        """Return the directory of a volume on this machine; None if the command does not need it."""
        source = directory / volume["name"]
        if "downwardAPI" in volume:
            source.mkdir()
            for item in volume["downwardAPI"]["items"]:
                (source / item["path"]).write_text(read_field(pod, item["fieldRef"]["fieldPath"]))
            return source
        if "hostPath" in volume:
            # Each node has a disk of its own.
            source = (
                self._cluster.directory / "nodes" / pod["spec"]["nodeName"] / volume["hostPath"]["path"].lstrip("/")
            )
            source.mkdir(parents=True, exist_ok=True)
            return source
        if "persistentVolumeClaim" in volume:
            claims = f"/api/v1/namespaces/{pod['metadata']['namespace']}/persistentvolumeclaims"
            claim = self._cluster.request("GET", f"{claims}/{volume['persistentVolumeClaim']['claimName']}")
            disk = self._cluster.request("GET", f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
            return Path(disk["spec"]["hostPath"]["path"])
        return None

    def _kill(self, uid: str) -> None:
        process = self._processes.get(uid)
        if process is not None and process.poll() is None:
            for child in list_children(process.pid):  # with the first process of a container, all others end
                os.kill(child, signal.SIGKILL)
            process.wait()


def _format_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
