"""The manifest of a job's JobSet against the schema of Kubernetes, and its submission to a fake kubectl.

The schema is JobSet's custom resource definition, copied unchanged from kubernetes-sigs/jobset (Apache License 2.0); it
embeds the pod template. Rules outside the schema (admission webhooks, the behaviour of controllers) are reimplemented
here from the sources of Kubernetes and JobSet, since daily tests have no cluster; `test_api_server.py` has one.

The manifests in tests/golden are written, for each line of GOLDEN, with
`python -m launch jobset tests/golden/job.yaml --image registry/job:1 --dry-run OPTIONS > tests/golden/NAME.yaml`.
"""

import copy
import functools
import itertools
import json
import operator
import os
import re
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from launch.app import main
from launch.kubernetes.engine import escape_references, validate_size
from launch.worker import WorkerArguments
from runner.accelerator import CHIPS
from runner.attempts.environment import SUBMITTED
from runner.errors import InvalidError
from tests.support.kubernetes_cluster import expand_variables

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "tests" / "golden" / "job.yaml"
CRD = ROOT / "tests" / "data" / "jobset.x-k8s.io_jobsets.yaml"
GOLDEN = {
    "jobset_v5e-16": ["--set", "topology.accelerator=v5e-16"],
    "jobset_2xv5e-256": ["--set", "topology.accelerator=2xv5e-256", "--spot", "--max-restarts", "20"],
    "jobset_h100-16": [
        "--set",
        "topology.accelerator=h100-16",
        "--env-from-secret",
        "wandb",
        "--priority-class",
        "high",
    ],
    "jobset_cpu": ["--nodes", "3", "--cpu", "4", "--memory", "16Gi", "--namespace", "research"],
}
# Sizes of jobs, each with the longest name that it leaves for its pods.
SIZES = {
    "one pod": (["--nodes", "1"], 47),
    "two slices": (["--set", "topology.accelerator=2xv5e-256"], 46),
    "100,000 pods": (["--nodes", "100000"], 43),
}
# Names of runs with the names of their JobSets; None for a name that neither this engine nor JobSet takes.
NAMES = {
    "a": "a",
    "gpt-2": "gpt-2",
    "GPT_Small.v2": "gpt-small-v2",
    "gpt__small": "gpt--small",
    "a" * 20: "a" * 20,
    "Llama_3.1_8B-" * 3 + "x": "llama-3-1-8b-" * 3 + "x",
    "a" * 63: None,
    "a" * 100: None,
    "3b": None,
    "2" * 20: None,
    "gpt-": None,
    "gpt_": None,
    "_gpt": None,
    "gpt small": None,
    "gpt/small": None,
    "größe": None,
}


def launch(*options, spec=SPEC):
    return main(["jobset", str(spec), "--image", "registry/job:1", *options])


@pytest.fixture
def render(capsys):
    """Return the manifest that `--dry-run` prints for the given options."""

    def render_manifest(*options, spec=SPEC):
        assert launch("--dry-run", *options, spec=spec) == 0
        return yaml.safe_load(capsys.readouterr().out)

    return render_manifest


def get_job(manifest):
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def get_pod(manifest):
    return get_job(manifest)["template"]["spec"]


def get_container(manifest):
    (container,) = get_pod(manifest)["containers"]
    return container


def get_variables(manifest):
    return {variable["name"]: variable.get("value") for variable in get_container(manifest)["env"]}


# Schema


def forbid_unknown_fields(schema):
    """Return an OpenAPI schema that rejects unknown fields, which the API server would drop silently."""
    if isinstance(schema, list):
        return [forbid_unknown_fields(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: forbid_unknown_fields(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def check_unique_items(make_validator, keys, items, schema):
    """Implement `x-kubernetes-list-map-keys`: no two items of a list have equal values of these keys."""
    places = [tuple(item.get(key) for key in keys) for item in items]
    if len(set(places)) < len(places):
        yield jsonschema.ValidationError(f"two items with the same {', '.join(keys)}: {places}")


@functools.cache
def make_validator():
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C implementation is seconds faster
    definition = yaml.load(CRD.read_text(), loader)  # noqa: S506
    (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1alpha2"]
    kinds = {"x-kubernetes-list-map-keys": check_unique_items}
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, kinds)(
        forbid_unknown_fields(version["schema"]["openAPIV3Schema"])
    )


def list_accelerators():
    for name, chip in CHIPS.items():
        for number in chip.shapes or ([] if chip.gke_accelerator is None else [1, 8, 16, 64]):
            yield f"{name}-{number}"
            if number > (chip.chips_per_host or 0):
                yield f"3x{name}-{number}"


@pytest.mark.daily(30)
@pytest.mark.parametrize("accelerator", list(list_accelerators()))
def test_the_manifest_of_every_accelerator_is_valid(render, accelerator):
    make_validator().validate(render("--set", f"topology.accelerator={accelerator}"))


EVERY_OPTION = [
    *("--label", "kueue.x-k8s.io/queue-name=team", "--label", "team=a.b", "--annotation", "a.b/c=Any text: {1}"),
    *("--exclude", "node-1", "--exclude", "node-2.internal"),
    *("--spot", "--node-selector", "a/b=c", "--cpu", "4", "--memory", "16Gi", "--workdir", "/job"),
    *("--env", "A=1", "--env", "A=2", "--env-from-secret", "wandb", "--volume-claim", "runs=/runs"),
    *("--service-account", "trainer", "--priority-class", "high", "--namespace", "research"),
    *("--set", "checkpoint.local_directory=/mnt/fast", "--set", "checkpoint.local_every_steps=5"),
]


def test_the_manifest_with_every_option_is_valid(render):
    for accelerator in ("2xv6e-64", "b200-16"):
        make_validator().validate(render(*EVERY_OPTION, "--set", f"topology.accelerator={accelerator}"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "failurePolicy", "maxRestart"], 3),
        (["spec", "failurePolicy", "maxRestarts"], "3"),
        (["spec", "failurePolicy", "restartStrategy"], "Gently"),
        (["spec", "failurePolicy", "rules"], "none"),
        (["spec", "replicatedJobs", 0, "template", "spec", "backofLimit"], 0),
        (["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "nodeSelectors"], {}),
        (["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "env", 0, "value"], 1),
        (
            ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "tolerations", 0, "operators"],
            "Exists",
        ),
        (
            ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "volumes", 0, "hostPath"],
            {"paths": ""},
        ),
        (["spec", "replicatedJobs", 0, "template", "spec", "template", "metadata", "annotation"], {}),
    ],
)
def test_a_manifest_with_one_wrong_field_is_invalid(render, path, value):
    manifest = render("--set", "topology.accelerator=v5e-16")
    *parents, last = path
    functools.reduce(operator.getitem, parents, manifest)[last] = value
    with pytest.raises(jsonschema.ValidationError):
        make_validator().validate(manifest)


def test_pods_avoid_excluded_nodes_and_know_their_own(render):
    pod = get_pod(render("--nodes", "2", "--exclude", "node-1", "--exclude", "node-2"))
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {
        "matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-1", "node-2"]},
        ]
    }
    plain = render("--nodes", "2")
    assert "affinity" not in get_pod(plain)
    variables = {each["name"]: each.get("valueFrom") for each in get_container(plain)["env"]}
    assert variables["RUNNER_NODE"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_duplicate_variables_are_invalid(render):
    manifest = render("--set", "topology.accelerator=v5e-16")
    container = get_container(manifest)
    container["env"].append(copy.deepcopy(container["env"][0]))
    with pytest.raises(jsonschema.ValidationError, match="same name"):
        make_validator().validate(manifest)


# Manifest


@pytest.mark.parametrize("name", GOLDEN)
def test_the_manifest_equals_the_golden_file(name, capsys):
    assert launch("--dry-run", *GOLDEN[name]) == 0
    assert capsys.readouterr().out == (SPEC.parent / f"{name}.yaml").read_text()


@pytest.mark.parametrize(
    ("accelerator", "slices", "hosts", "chips"),
    [("v5e-1", 1, 1, 1), ("v5e-16", 1, 4, 4), ("2xv5e-256", 2, 64, 4), ("v4-8", 1, 2, 4), ("tpu7x-64", 1, 16, 4)],
)
def test_each_tpu_slice_is_a_job_and_each_host_a_pod(render, accelerator, slices, hosts, chips):
    manifest = render("--set", f"topology.accelerator={accelerator}")
    job = get_job(manifest)
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == slices
    assert job["parallelism"] == job["completions"] == hosts
    assert get_container(manifest)["resources"] == {
        "requests": {"google.com/tpu": chips},
        "limits": {"google.com/tpu": chips},
    }
    assert "--coordinator" not in get_container(manifest)["args"]  # JAX detects its processes
    assert ("annotations" in manifest["metadata"]) == (hosts > 1)  # a pool of single hosts is shared


@pytest.mark.parametrize(
    ("options", "pods"),
    [
        (["--set", "topology.accelerator=h100-16"], 2),
        (["--set", "topology.accelerator=2xa100-16"], 4),
        (["--nodes", "3"], 3),
        (["--nodes", "3", "--set", "topology=null"], 3),
        (["--nodes", "3", "--set", "topology.accelerator=cpu"], 3),
    ],
)
def test_pods_get_their_process_ids_where_jax_cannot_detect_them(render, options, pods):
    manifest = render(*options)
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 1
    assert get_job(manifest)["completions"] == pods
    *_, name_1, address, name_2, number, name_3, place = get_container(manifest)["args"]
    assert (name_1, address) == ("--coordinator", "tiny-gpt-slice-0-0.tiny-gpt:8476")
    assert (name_2, number) == ("--num-processes", str(pods))
    assert (name_3, place) == ("--process-id", "$(JOB_COMPLETION_INDEX)")


@pytest.mark.parametrize("options", [["--nodes", "1"], ["--set", "topology.accelerator=h100-8"]])
def test_a_single_pod_has_no_coordinator(render, options):
    assert "--coordinator" not in get_container(render(*options))["args"]


def test_the_spec_is_passed_unchanged(render, tmp_path):
    spec = tmp_path / "spec.yaml"
    text = SPEC.read_text() + "# \ttabs, $(HOME), trailing  \n# ünïcödé: y\n\n"
    spec.write_text(text)
    manifest = render("--nodes", "1", spec=spec)
    assert get_job(manifest)["template"]["metadata"]["annotations"]["runner/spec"] == text
    (volume,) = get_pod(manifest)["volumes"]
    (item,) = volume["downwardAPI"]["items"]
    (mount,) = get_container(manifest)["volumeMounts"]
    assert item["fieldRef"]["fieldPath"] == "metadata.annotations['runner/spec']"
    assert mount["name"] == volume["name"]
    assert f"{mount['mountPath']}/{item['path']}" == get_container(manifest)["args"][2]


def test_overrides_and_variables_are_passed_unchanged(render):
    override = "directory=gs://bucket/$(HOME)"
    manifest = render("--nodes", "1", "--set", override, "--env", "A=$(B) $C", "--env", "JAX_PLATFORMS=cuda")
    assert get_container(manifest)["args"][3:5] == ["--set", escape_references(override)]
    assert expand_variables(escape_references(override), {"HOME": "/root"}) == override
    assert get_variables(manifest)["JAX_PLATFORMS"] == "cuda"
    assert expand_variables(get_variables(manifest)["A"], {"B": "b", "C": "c"}) == "$(B) $C"


@pytest.mark.parametrize(
    "value", ["y", "N", "1e3", "0x1F", "1_000", "1:30", ".5", "-1", "no", "null", "", "~", "2024-01-01"]
)
def test_a_value_that_looks_like_another_type_is_quoted(capsys, value):
    assert launch("--dry-run", "--nodes", "1", "--env", f"A={value}") == 0
    assert re.search(rf"name: A\n +value: (['\"]){re.escape(value)}\1\n", capsys.readouterr().out)


def test_the_fast_tier_is_on_the_node(render):
    settings = ["--set", "checkpoint.local_directory=/mnt/disks/ssd0/fast", "--set", "checkpoint.local_every_steps=5"]
    manifest = render("--set", "topology.accelerator=v5e-16", *settings)
    volume, mount = get_pod(manifest)["volumes"][1], get_container(manifest)["volumeMounts"][1]
    assert volume["hostPath"] == {"path": "/mnt/disks/ssd0/fast", "type": "DirectoryOrCreate"}
    assert mount == {"name": volume["name"], "mountPath": "/mnt/disks/ssd0/fast"}


@pytest.mark.parametrize(
    ("directory", "options"),
    [("/runs/tiny", []), ("runs/tiny", ["--workdir", "/"]), ("tiny", ["--workdir", "/runs"]), ("/runs", [])],
)
def test_a_local_directory_may_be_in_a_shared_volume(render, directory, options):
    claim = ["--volume-claim", "team-disk=/runs", "--set", f"directory={directory}"]
    manifest = render("--nodes", "2", *claim, *options)
    assert get_pod(manifest)["volumes"][1]["persistentVolumeClaim"] == {"claimName": "team-disk"}
    assert get_container(manifest)["volumeMounts"][1]["mountPath"] == "/runs"


def test_secrets_are_referenced_by_name(render):
    manifest = render("--nodes", "1", "--env-from-secret", "wandb", "--env-from-secret", "azure")
    assert get_container(manifest)["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"secretRef": {"name": "azure"}}]


@pytest.mark.parametrize("accelerator", ["v5e-16", "h100-16"])
def test_labels_and_annotations_are_those_of_jobset_and_pods(render, accelerator):
    words = ["--label", "kueue.x-k8s.io/queue-name=team", "--label", "cost=a.b", "--annotation", "a.b/c=x: {y} $(Z)=1"]
    manifest = render("--set", f"topology.accelerator={accelerator}", *words)
    pod = get_job(manifest)["template"]["metadata"]
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team", "cost": "a.b"}
    assert pod["labels"] == {"cost": "a.b"}  # the queue is that of the JobSet as a whole
    assert manifest["metadata"]["annotations"]["a.b/c"] == pod["annotations"]["a.b/c"] == "x: {y} $(Z)=1"
    assert "runner/spec" in pod["annotations"]


# Failure policy


def find_action(manifest, code, is_disrupted):
    """Return what the Job controller does about a failed pod: the action of the first rule that matches, else Count."""
    for rule in get_job(manifest)["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"] | {"values": []} == {"containerName": "runner", "operator": "In", "values": []}
            if code in rule["onExitCodes"]["values"]:
                return rule["action"]
        elif is_disrupted and {"type": "DisruptionTarget", "status": "True"} in rule["onPodConditions"]:
            return rule["action"]
    return "Count"


@pytest.mark.parametrize(
    ("code", "is_disrupted", "action"),
    [
        *((code, is_disrupted, "FailJob") for code in (1, 2) for is_disrupted in (False, True)),
        *((code, True, "Ignore") for code in (75, 76, 134, 137, 143)),
        (75, False, "Ignore"),
        *((code, False, "Count") for code in (76, 137, 143, 134, 139, 127, 255, 12, 21, 175)),
    ],
)
def test_the_failure_policy_decides_by_exit_code_and_disruption(render, code, is_disrupted, action):
    assert find_action(render("--nodes", "2"), code, is_disrupted) == action


@pytest.mark.parametrize("seconds", [None, 0, 30, 600])
def test_the_age_at_which_a_standby_is_started_is_passed_on(render, seconds):
    options = [] if seconds is None else ["--standby-seconds", str(seconds)]
    words, name = get_container(render("--nodes", "2", *options))["args"], "--standby-seconds"
    passed_on = int(words[words.index(name) + 1]) if name in words else WorkerArguments(spec="x.yaml").standby_seconds
    assert passed_on == (30 if seconds is None else seconds)


@pytest.mark.parametrize(
    ("options", "limit"),
    [(["--nodes", "2"], 14), (["--set", "topology.accelerator=2xv5e-256"], 7 * 64), (["--nodes", "100000"], 700_000)],
)
def test_pods_are_replaced_by_their_job_alone(render, options, limit):
    """Check the numbers of restarts, and the API server's rules for pod failure policies."""
    manifest = render(*options, "--max-restarts", "7")
    job = get_job(manifest)
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 0}
    assert job["backoffLimit"] == limit
    words = get_container(manifest)["args"]
    assert words[words.index("--max-restarts") + 1] == "7"
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    for rule in job["podFailurePolicy"]["rules"]:
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        values = rule.get("onExitCodes", {}).get("values", [1])
        assert values == sorted(set(values))
        assert 0 not in values


def test_the_number_of_replaced_pods_fits_into_its_field(render):
    manifest = render("--nodes", "100000", "--max-restarts", str(2**31 - 1))
    assert get_job(manifest)["backoffLimit"] == 2**31 - 1


# Rejected options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], f"{SPEC}:6: topology.accelerator: names no chips to request; give --nodes N"),
        (["--set", "topology.accelerator=cpu"], "give --nodes N"),
        (
            ["--set", "topology.accelerator=v5e"],
            "--set topology.accelerator=v5e: is v5e; needs the number of chips too, such as v5e-16",
        ),
        (["--set", "topology.accelerator=h100"], "needs the number of chips too, such as h100-16"),
        (["--set", "topology.accelerator=v5e-12"], "v5e has no slice of 12 chips"),
        (["--set", "topology.accelerator=v9-16"], "got 'v9-16', needs any, or"),
        (["--set", "topology.accelerator=2xv5e-4"], "GKE joins only slices that have several hosts"),
        (["--set", "topology.accelerator=h100-9"], "h100-9 does not divide into 2 nodes"),
        (["--set", "topology.accelerator=v5e-16", "--nodes", "4"], "--nodes 4 is for pods on CPUs"),
        (
            ["--nodes", "2", "--set", "directory=runs/tiny"],
            "--set directory=runs/tiny: is runs/tiny, on the pods' own disks",
        ),
        (
            ["--nodes", "2", "--set", "directory=/runs2", "--volume-claim", "a=/runs"],
            "--set directory=/runs2: is /runs2, on the pods'",
        ),
        (["--nodes", "2", "--env", "WANDB_API_KEY=1234"], "--env WANDB_API_KEY would be visible"),
        (["--nodes", "2", "--env", "HF_TOKEN=1234"], "--env HF_TOKEN would be visible"),
        (["--nodes", "2", "--label", "job-name=x"], "--label job-name: is set by"),
        (["--nodes", "2", "--label", "jobset.sigs.k8s.io/jobset-name=x"], "--label jobset.sigs.k8s.io/jobset-name: is"),
        (["--nodes", "2", "--annotation", "runner/spec=x"], "--annotation runner/spec: is set by"),
        (["--nodes", "2", "--annotation", "a b=x"], "--annotation 'a b': needs [DOMAIN/]NAME"),
        (["--nodes", "2", "--label", "a=b c"], "--label a 'b c': needs at most 63"),
        (["--nodes", "2", "--set", "name=3b"], "--set name=3b: 3b cannot name a JobSet: needs a letter"),
        (["--nodes", "2", "--set", "name=gpt-"], "gpt- cannot name a JobSet: needs a letter"),
        (
            ["--nodes", "1", "--set", "checkpoint.local_directory=fast", "--set", "checkpoint.local_every_steps=5"],
            "--set checkpoint.local_directory=fast: is fast; needs an absolute path",
        ),
    ],
)
def test_options_that_cannot_run_are_rejected_in_one_line(options, message, capsys):
    assert launch("--dry-run", *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize("options", [["--set", "nme=x", "--nodes", "1"], ["--set", "seed=x", "--nodes", "1"]])
def test_an_invalid_spec_exits_with_2(options, capsys):
    assert launch("--dry-run", *options) == 2
    assert capsys.readouterr().err.startswith(f"--set {options[1]}")


def test_a_missing_spec_exits_with_2(capsys):
    assert launch("--dry-run", "--nodes", "1", spec="specs/none.yaml") == 2
    assert "specs/none.yaml: cannot read the spec" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--image"], ["--image", "a", "--env", "A"], ["--image", "a", "--nodes", "0"]])
def test_a_bad_command_line_exits_with_2(options, capsys):
    assert main(["jobset", str(SPEC), *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def list_refused_names(manifest, name):
    """Return those of a job's longest names that JobSet's webhook would refuse if the JobSet had the name `name`."""
    assert manifest["spec"]["network"]["subdomain"] == manifest["metadata"]["name"]
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = f"{name}-{replicated['name']}-{replicated['replicas'] - 1}"
    pod = f"{job}-{get_job(manifest)['completions'] - 1}-abcde"
    return [each for each in (name, job, pod) if not re.fullmatch(r"(?=.{,63}$)[a-z]([-a-z0-9]*[a-z0-9])?", each)]


@pytest.mark.parametrize(("options", "limit"), SIZES.values(), ids=SIZES)
def test_names_are_those_that_jobset_takes(options, limit, render, capsys):
    """Check that a name is refused, with the limit in the line, only if JobSet would refuse it or its longest pod."""
    edges = {"a" * limit: "a" * limit, "a" * (limit + 1): None}
    small = render(*options, "--name", "a")
    # JobSet makes a label of the coordinator's address, which has the name twice.
    assert "coordinator" not in small["spec"]
    for given, made in (NAMES | edges).items():
        code = launch("--dry-run", *options, "--name", given)
        captured = capsys.readouterr()
        if made is None:
            assert (code, captured.out, captured.err.count("\n")) == (2, "", 1), given
            assert captured.err.startswith(f"{given} cannot name a JobSet: needs a letter"), given
            assert f"at most {limit} characters" in captured.err, given
            assert list_refused_names(small, given) != [], given
        else:
            manifest = yaml.safe_load(captured.out)
            assert (code, manifest["metadata"]["name"]) == (0, made), given
            assert list_refused_names(manifest, made) == [], given


@pytest.mark.parametrize("metadata", [{"namespace": "n" * 63}, {}, {"annotations": {"key": "value"}}], ids=str)
def test_the_limit_of_a_manifest_is_that_of_kubectls_copy(metadata):
    """Check the sum that an API server takes, to the byte: names and values of all annotations, with the copy."""
    annotations = metadata.get("annotations", {})
    copy = {"metadata": {"namespace": "n" * 63, "annotations": annotations}, "spec": "\\u003c"}
    others = "kubectl.kubernetes.io/last-applied-configuration" + "".join(map("".join, annotations.items()))
    # JSON doubles the backslash, and kubectl ends its copy with a new line.
    num_free = 256 * 1024 - len(json.dumps(copy, separators=(",", ":"))) + 1 - len("\n") - len(others)
    validate_size({"metadata": metadata, "spec": "<" + "x" * num_free}, 0)
    with pytest.raises(InvalidError, match="has 262145 bytes"):
        validate_size({"metadata": metadata, "spec": "<" + "x" * (num_free + 1)}, 0)


# Submission


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Fake kubectl that answers `get` with the file `there`, and records its arguments and input."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\n[ $1 != get ] || exec cat {tmp_path}/there\n'
        f"cat > {tmp_path}/input\n. {tmp_path}/end\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (tmp_path / "there").touch()
    (tmp_path / "end").write_text("echo jobset.jobset.x-k8s.io/tiny-gpt created")
    return tmp_path


def get_submit_time(manifest):
    """Return the submit time in the variables of the pods."""
    return get_variables(manifest).get(SUBMITTED)


def test_kubectl_applies_the_dry_run_manifest_plus_the_submit_time(kubectl, capfd):
    before = int(time.time())
    assert launch(*GOLDEN["jobset_cpu"]) == 0
    assert capfd.readouterr().out == "jobset.jobset.x-k8s.io/tiny-gpt created\n"
    get, apply = (kubectl / "arguments").read_text().splitlines()
    assert get == "get jobset tiny-gpt --namespace=research --ignore-not-found --output=json"
    assert apply == "apply -f -"
    given = yaml.safe_load((kubectl / "input").read_text())
    assert before <= int(get_submit_time(given)) <= time.time()
    environment = get_container(given)["env"]
    get_container(given)["env"] = [each for each in environment if each["name"] != SUBMITTED]
    assert given == yaml.safe_load((SPEC.parent / "jobset_cpu.yaml").read_text())


@pytest.mark.parametrize("before", [[], ["--env", "RUNNER_SUBMITTED=17"]], ids=["now", "user's"])
def test_an_existing_jobset_keeps_its_submit_time(kubectl, before, monkeypatch):
    clock = itertools.count(1_800_000_000, 10)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    assert launch("--nodes", "1", *before) == 0
    there = yaml.safe_load((kubectl / "input").read_text())
    (kubectl / "there").write_text(json.dumps(there | {"status": {"restarts": 3}}))
    assert launch("--nodes", "1") == 0
    again = yaml.safe_load((kubectl / "input").read_text())
    assert again == there
    assert get_submit_time(again) == ("17" if before else "1800000000")
    assert launch("--nodes", "1", "--env", "RUNNER_SUBMITTED=23") == 0
    assert get_submit_time(yaml.safe_load((kubectl / "input").read_text())) == "23"


def test_a_jobset_applied_from_a_dry_run_gets_no_submit_time(kubectl, render):
    (kubectl / "there").write_text(json.dumps(render("--nodes", "1")))
    assert launch("--nodes", "1") == 0
    assert get_submit_time(yaml.safe_load((kubectl / "input").read_text())) is None


def test_a_foreign_jobset_is_not_modified(kubectl, capfd):
    for text in ("no JSON", '{"spec": {}}', '{"spec": {"replicatedJobs": [{"template": null}]}}'):
        (kubectl / "there").write_text(text)
        assert launch("--nodes", "1") == 1
        assert capfd.readouterr().err == f"kubectl get: the JobSet tiny-gpt was not made by this command: {text!r}\n"
    assert not (kubectl / "input").exists()


def test_the_dry_run_does_not_call_kubectl(kubectl):
    assert launch("--dry-run", "--nodes", "1") == 0
    assert not (kubectl / "arguments").exists()


def test_errors_of_kubectl_are_passed_on(kubectl, capfd):
    (kubectl / "end").write_text("echo 'error: no matches for kind JobSet' >&2; exit 3")
    assert launch("--nodes", "1") == 1
    assert capfd.readouterr().err == "error: no matches for kind JobSet\nkubectl apply ended with 3\n"


def test_a_missing_kubectl_exits_with_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch("--nodes", "1") == 2
    error = capsys.readouterr().err
    assert error.startswith("cannot run kubectl: No such file or directory")
    assert len(error.splitlines()) == 1
