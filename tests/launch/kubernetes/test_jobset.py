"""The JobSet of a job: its manifest against Kubernetes' own schema, its failure policy against the words of real Jobs.

The schema is JobSet's custom resource definition, copied unchanged from kubernetes-sigs/jobset (Apache License 2.0); it
embeds the pod template. What it cannot say (rules of admission webhooks, the behaviour of controllers) is tested as
read from the sources of Kubernetes and JobSet, since no cluster runs here.

The manifests in tests/golden are written with, for each line of GOLDEN,
`python -m launch jobset tests/golden/job.yaml --image registry/job:1 --dry-run OPTIONS > tests/golden/NAME.yaml`.
"""

import copy
import functools
import itertools
import json
import operator
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from launch.__main__ import main
from launch.kubernetes.engine import escape_references
from runner.accelerator import CHIPS
from runner.run.events import SUBMITTED
from tests.support.job_process import DEADLINE_SECONDS

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


def launch(*options, spec=SPEC):
    return main(["jobset", str(spec), "--image", "registry/job:1", *options])


@pytest.fixture
def rendered(capsys):
    """The manifest that `--dry-run` prints for these options."""

    def render(*options, spec=SPEC):
        assert launch("--dry-run", *options, spec=spec) == 0
        return yaml.safe_load(capsys.readouterr().out)

    return render


def job_of(manifest):
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod_of(manifest):
    return job_of(manifest)["template"]["spec"]


def container_of(manifest):
    (container,) = pod_of(manifest)["containers"]
    return container


def variables_of(manifest):
    return {variable["name"]: variable.get("value") for variable in container_of(manifest)["env"]}


# The schema


def strict(schema):
    """An OpenAPI schema that refuses what the API server would silently drop: fields without a name in it."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def no_twins(validator, keys, items, schema):
    """`x-kubernetes-list-map-keys`: no two items of a list agree on these keys."""
    places = [tuple(item.get(key) for key in keys) for item in items]
    if len(set(places)) < len(places):
        yield jsonschema.ValidationError(f"two items with the same {', '.join(keys)}: {places}")


@functools.cache
def validator():
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, seconds faster
    definition = yaml.load(CRD.read_text(), loader)  # noqa: S506
    (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1alpha2"]
    kinds = {"x-kubernetes-list-map-keys": no_twins}
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, kinds)(
        strict(version["schema"]["openAPIV3Schema"])
    )


def every_accelerator():
    for name, chip in CHIPS.items():
        for number in chip.shapes or ([] if name == "cpu" else [1, 8, 16, 64]):
            yield f"{name}-{number}"
            if number > (chip.chips_per_host or 0):
                yield f"3x{name}-{number}"


@pytest.mark.parametrize("accelerator", list(every_accelerator()))
def test_the_manifest_of_every_accelerator_is_valid(rendered, accelerator):
    validator().validate(rendered("--set", f"topology.accelerator={accelerator}"))


def test_the_manifest_with_every_option_is_valid(rendered):
    options = ["--spot", "--node-selector", "a/b=c", "--cpu", "4", "--memory", "16Gi", "--workdir", "/job"]
    options += ["--env", "A=1", "--env", "A=2", "--env-from-secret", "wandb", "--volume-claim", "runs=/runs"]
    options += ["--service-account", "trainer", "--priority-class", "high", "--namespace", "research"]
    options += ["--set", "checkpoint.local_directory=/mnt/fast", "--set", "checkpoint.local_every_steps=5"]
    for accelerator in ("2xv6e-64", "b200-16"):
        validator().validate(rendered(*options, "--set", f"topology.accelerator={accelerator}"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "failurePolicy", "maxRestart"], 3),
        (["spec", "failurePolicy", "maxRestarts"], "3"),
        (["spec", "failurePolicy", "restartStrategy"], "Gently"),
        (["spec", "failurePolicy", "rules", 0, "action"], "FailJob"),
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
def test_a_manifest_with_one_wrong_field_is_invalid(rendered, path, value):
    manifest = rendered("--set", "topology.accelerator=v5e-16")
    *parents, last = path
    functools.reduce(operator.getitem, parents, manifest)[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(manifest)


def test_two_variables_of_one_name_are_invalid(rendered):
    manifest = rendered("--set", "topology.accelerator=v5e-16")
    container = container_of(manifest)
    container["env"].append(copy.deepcopy(container["env"][0]))
    with pytest.raises(jsonschema.ValidationError, match="same name"):
        validator().validate(manifest)


# What is rendered


@pytest.mark.parametrize("name", GOLDEN)
def test_the_manifest_is_the_one_that_was_reviewed(name, capsys):
    assert launch("--dry-run", *GOLDEN[name]) == 0
    assert capsys.readouterr().out == (SPEC.parent / f"{name}.yaml").read_text()


@pytest.mark.parametrize(
    ("accelerator", "slices", "hosts", "chips"),
    [("v5e-1", 1, 1, 1), ("v5e-16", 1, 4, 4), ("2xv5e-256", 2, 64, 4), ("v4-8", 1, 2, 4), ("tpu7x-64", 1, 16, 4)],
)
def test_a_slice_of_tpus_is_a_job_and_a_host_is_a_pod(rendered, accelerator, slices, hosts, chips):
    manifest = rendered("--set", f"topology.accelerator={accelerator}")
    job = job_of(manifest)
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == slices
    assert job["parallelism"] == job["completions"] == hosts
    assert container_of(manifest)["resources"] == {
        "requests": {"google.com/tpu": chips},
        "limits": {"google.com/tpu": chips},
    }
    assert "--coordinator" not in container_of(manifest)["args"]  # JAX detects it


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
def test_pods_that_jax_cannot_detect_are_told_where_they_stand(rendered, options, pods):
    manifest = rendered(*options)
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 1
    assert job_of(manifest)["completions"] == pods
    *_, name_1, address, name_2, number, name_3, place = container_of(manifest)["args"]
    assert (name_1, address) == ("--coordinator", "tiny-gpt-slice-0-0.tiny-gpt:8476")
    assert (name_2, number) == ("--num-processes", str(pods))
    assert (name_3, place) == ("--process-id", "$(JOB_COMPLETION_INDEX)")


@pytest.mark.parametrize("options", [["--nodes", "1"], ["--set", "topology.accelerator=h100-8"]])
def test_a_single_pod_has_no_coordinator(rendered, options):
    assert "--coordinator" not in container_of(rendered(*options))["args"]


def test_the_spec_travels_word_for_word(rendered, tmp_path):
    spec = tmp_path / "spec.yaml"
    text = SPEC.read_text() + "# \ttabs, $(HOME), trailing  \n# ünïcödé: y\n\n"
    spec.write_text(text)
    manifest = rendered("--nodes", "1", spec=spec)
    assert job_of(manifest)["template"]["metadata"]["annotations"]["runner/spec"] == text
    (volume,) = pod_of(manifest)["volumes"]
    (item,) = volume["downwardAPI"]["items"]
    (mount,) = container_of(manifest)["volumeMounts"]
    assert item["fieldRef"]["fieldPath"] == "metadata.annotations['runner/spec']"
    assert mount["name"] == volume["name"]
    assert f"{mount['mountPath']}/{item['path']}" == container_of(manifest)["args"][2]


def test_overrides_and_variables_arrive_as_given(rendered):
    override = "directory=gs://bucket/$(HOME)"
    manifest = rendered("--nodes", "1", "--set", override, "--env", "A=$(B) $C", "--env", "JAX_PLATFORMS=cuda")
    assert container_of(manifest)["args"][3:5] == ["--set", escape_references(override)]
    assert expanded(escape_references(override), {"HOME": "/root"}) == override
    assert variables_of(manifest)["JAX_PLATFORMS"] == "cuda"
    assert expanded(variables_of(manifest)["A"], {"B": "b", "C": "c"}) == "$(B) $C"


def expanded(text, variables):
    """What the kubelet makes of an argument or a value: $$ is $, $(NAME) is the variable where there is one."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), text
    )


@pytest.mark.parametrize(
    "value", ["y", "N", "1e3", "0x1F", "1_000", "1:30", ".5", "-1", "no", "null", "", "~", "2024-01-01"]
)
def test_a_value_that_looks_like_another_type_is_quoted(capsys, value):
    assert launch("--dry-run", "--nodes", "1", "--env", f"A={value}") == 0
    assert re.search(rf"name: A\n +value: (['\"]){re.escape(value)}\1\n", capsys.readouterr().out)


def test_the_fast_tier_is_on_the_node_since_pods_are_made_anew(rendered):
    settings = ["--set", "checkpoint.local_directory=/mnt/disks/ssd0/fast", "--set", "checkpoint.local_every_steps=5"]
    manifest = rendered("--set", "topology.accelerator=v5e-16", *settings)
    volume, mount = pod_of(manifest)["volumes"][1], container_of(manifest)["volumeMounts"][1]
    assert volume["hostPath"] == {"path": "/mnt/disks/ssd0/fast", "type": "DirectoryOrCreate"}
    assert mount == {"name": volume["name"], "mountPath": "/mnt/disks/ssd0/fast"}


@pytest.mark.parametrize(
    ("directory", "options"),
    [("/runs/tiny", []), ("runs/tiny", ["--workdir", "/"]), ("tiny", ["--workdir", "/runs"]), ("/runs", [])],
)
def test_a_local_directory_may_be_in_a_shared_volume(rendered, directory, options):
    claim = ["--volume-claim", "team-disk=/runs", "--set", f"directory={directory}"]
    manifest = rendered("--nodes", "2", *claim, *options)
    assert pod_of(manifest)["volumes"][1]["persistentVolumeClaim"] == {"claimName": "team-disk"}
    assert container_of(manifest)["volumeMounts"][1]["mountPath"] == "/runs"


def test_secrets_are_named_and_never_shown(rendered):
    manifest = rendered("--nodes", "1", "--env-from-secret", "wandb", "--env-from-secret", "azure")
    assert container_of(manifest)["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"secretRef": {"name": "azure"}}]


# The failure policy


def message_of(rules, code, is_disrupted):
    """Reason and message of a Job whose pod ended so, in the words of Kubernetes' Job controller."""
    for index, rule in enumerate(rules):
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["operator"] == "In"
            if code in rule["onExitCodes"]["values"]:
                name = rule["onExitCodes"]["containerName"]
                return "PodFailurePolicy", (
                    f"Container {name} for pod research/tiny-gpt-slice-1-75-x2z1q failed with exit code {code} "
                    f"matching {rule['action']} rule at index {index}"
                )
        elif is_disrupted and {"type": "DisruptionTarget", "status": "True"} in rule["onPodConditions"]:
            return "PodFailurePolicy", (
                f"Pod research/tiny-gpt-slice-1-75-x2z1q has condition DisruptionTarget "
                f"matching {rule['action']} rule at index {index}"
            )
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def answer_to(manifest, *failures):
    """What JobSet does when Jobs have failed by pods that ended so: the first of its rules that fits any of them."""
    messages = [message_of(job_of(manifest)["podFailurePolicy"]["rules"], *failure) for failure in failures]
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        for reason, message in messages:
            patterns = rule.get("onJobFailureMessagePatterns", [])
            if reason in rule.get("onJobFailureReasons", [reason]) and (
                not patterns or any(re.search(pattern, message) for pattern in patterns)
            ):
                return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("code", "is_disrupted", "action"),
    [
        (1, False, "FailJobSet"),
        (2, False, "FailJobSet"),
        (1, True, "FailJobSet"),
        (75, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (75, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (143, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (76, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (76, False, "RestartJobSet"),
        (137, False, "RestartJobSet"),
        (134, False, "RestartJobSet"),
        (139, False, "RestartJobSet"),
        (127, False, "RestartJobSet"),
        (255, False, "RestartJobSet"),
        (12, False, "RestartJobSet"),
        (21, False, "RestartJobSet"),
        (175, False, "RestartJobSet"),
    ],
)
def test_the_end_of_a_pod_gets_its_answer(rendered, code, is_disrupted, action):
    assert answer_to(rendered("--nodes", "2"), (code, is_disrupted)) == action


@pytest.mark.parametrize(
    ("failures", "action"),
    [
        ([(76, False), (1, False)], "FailJobSet"),
        ([(75, False), (2, False)], "FailJobSet"),
        ([(76, False), (75, False)], "RestartJobSetAndIgnoreMaxRestarts"),
        ([(76, False), (137, True)], "RestartJobSetAndIgnoreMaxRestarts"),
        ([(76, False), (76, False)], "RestartJobSet"),
    ],
)
def test_the_ends_of_several_slices_get_the_answer_to_their_cause(rendered, failures, action):
    manifest = rendered("--set", "topology.accelerator=2xv5e-256")
    assert answer_to(manifest, *failures) == action
    assert answer_to(manifest, *failures[::-1]) == action


def test_the_failure_policy_meets_what_kubernetes_asks_beyond_its_schema(rendered):
    """Rules of the API server for pod failure policies, and of JobSet's webhook for names and reasons."""
    manifest = rendered("--nodes", "2", "--max-restarts", "7")
    policy, job = manifest["spec"]["failurePolicy"], job_of(manifest)
    assert policy["maxRestarts"] == 7
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    names = [rule["name"] for rule in policy["rules"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", name) for name in names)
    assert {reason for rule in policy["rules"] for reason in rule.get("onJobFailureReasons", [])} == {
        "PodFailurePolicy"
    }
    for rule in job["podFailurePolicy"]["rules"]:
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        values = rule.get("onExitCodes", {}).get("values", [1])
        assert values == sorted(set(values))
        assert 0 not in values


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --nodes N"),
        (["--set", "topology.accelerator=cpu"], "give --nodes N"),
        (["--set", "topology.accelerator=v5e"], "needs the number of chips too, such as v5e-16"),
        (["--set", "topology.accelerator=h100"], "needs the number of chips too, such as h100-16"),
        (["--set", "topology.accelerator=v5e-12"], "v5e has no slice of 12 chips"),
        (["--set", "topology.accelerator=v9-16"], "got 'v9-16', needs any, or"),
        (["--set", "topology.accelerator=2xv5e-4"], "GKE joins only slices that have several hosts"),
        (["--set", "topology.accelerator=h100-9"], "h100-9 does not divide into 2 nodes"),
        (["--set", "topology.accelerator=v5e-16", "--nodes", "4"], "--nodes 4 is for pods on CPUs"),
        (["--nodes", "2", "--set", "directory=runs/tiny"], "directory is runs/tiny, on the pods' own disks"),
        (
            ["--nodes", "2", "--set", "directory=/runs2", "--volume-claim", "a=/runs"],
            "directory is /runs2, on the pods'",
        ),
        (["--nodes", "2", "--env", "WANDB_API_KEY=1234"], "--env WANDB_API_KEY would be visible"),
        (["--nodes", "2", "--env", "HF_TOKEN=1234"], "--env HF_TOKEN would be visible"),
        (["--nodes", "2", "--set", "name=3b"], "3b cannot name a JobSet: needs a letter"),
        (["--nodes", "2", "--set", "name=gpt-"], "gpt- cannot name a JobSet: needs a letter"),
        (["--nodes", "2", "--name", "x" * 48], "at most 47 characters"),
        (["--nodes", "2000", "--name", "x" * 47], "at most 44 characters"),
        (
            ["--nodes", "1", "--set", "checkpoint.local_directory=fast", "--set", "checkpoint.local_every_steps=5"],
            "checkpoint.local_directory is fast; needs an absolute path",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_2_and_one_line(options, message, capsys):
    assert launch("--dry-run", *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize("options", [["--set", "nme=x", "--nodes", "1"], ["--set", "seed=x", "--nodes", "1"]])
def test_a_wrong_spec_is_refused_with_2(options, capsys):
    assert launch("--dry-run", *options) == 2
    assert capsys.readouterr().err.startswith(f"--set {options[1]}")


def test_a_missing_spec_is_refused_with_2(capsys):
    assert launch("--dry-run", "--nodes", "1", spec="specs/none.yaml") == 2
    assert "specs/none.yaml: cannot read the spec" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--image"], ["--image", "a", "--env", "A"], ["--image", "a", "--nodes", "0"]])
def test_a_bad_command_line_is_refused_with_2(options, capsys):
    assert main(["jobset", str(SPEC), *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_name_fits_when_the_longest_name_of_a_pod_does(rendered):
    manifest = rendered("--set", "topology.accelerator=2xv5e-256", "--name", "a" * 46)
    name = manifest["metadata"]["name"]
    assert len(f"{name}-slice-1-63-abcde") == 63
    assert manifest["spec"]["network"]["subdomain"] == name


# Submitting


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A program of that name, which answers `get` with what is `there`, and keeps what else it is given."""
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


def submitted_in(manifest):
    """What the pods are told of when they were submitted."""
    return variables_of(manifest).get(SUBMITTED)


def test_the_manifest_is_given_to_kubectl_as_the_dry_run_prints_it_with_when_it_was_submitted(kubectl, capfd):
    before = int(time.time())
    assert launch(*GOLDEN["jobset_cpu"]) == 0
    assert capfd.readouterr().out == "jobset.jobset.x-k8s.io/tiny-gpt created\n"
    get, apply = (kubectl / "arguments").read_text().splitlines()
    assert get == "get jobset tiny-gpt --namespace=research --ignore-not-found --output=json"
    assert apply == "apply -f -"
    given = yaml.safe_load((kubectl / "input").read_text())
    assert before <= int(submitted_in(given)) <= time.time()
    environment = container_of(given)["env"]
    container_of(given)["env"] = [each for each in environment if each["name"] != SUBMITTED]
    assert given == yaml.safe_load((SPEC.parent / "jobset_cpu.yaml").read_text())


@pytest.mark.parametrize("before", [[], ["--env", "RUNNER_SUBMITTED=17"]], ids=["now", "user's"])
def test_a_jobset_that_is_there_keeps_when_it_was_submitted_since_its_pods_cannot_change(kubectl, before, monkeypatch):
    clock = itertools.count(1_800_000_000, 10)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    assert launch("--nodes", "1", *before) == 0
    there = yaml.safe_load((kubectl / "input").read_text())
    (kubectl / "there").write_text(json.dumps(there | {"status": {"restarts": 3}}))
    assert launch("--nodes", "1") == 0
    again = yaml.safe_load((kubectl / "input").read_text())
    assert again == there
    assert submitted_in(again) == ("17" if before else "1800000000")
    assert launch("--nodes", "1", "--env", "RUNNER_SUBMITTED=23") == 0
    assert submitted_in(yaml.safe_load((kubectl / "input").read_text())) == "23"


def test_a_jobset_that_was_applied_from_a_dry_run_is_told_nothing_later(kubectl, rendered):
    (kubectl / "there").write_text(json.dumps(rendered("--nodes", "1")))
    assert launch("--nodes", "1") == 0
    assert submitted_in(yaml.safe_load((kubectl / "input").read_text())) is None


def test_a_jobset_of_somebody_else_is_not_touched(kubectl, capfd):
    for text in ("no JSON", '{"spec": {}}', '{"spec": {"replicatedJobs": [{"template": null}]}}'):
        (kubectl / "there").write_text(text)
        assert launch("--nodes", "1") == 1
        assert capfd.readouterr().err == f"kubectl get: the JobSet tiny-gpt was not made by this command: {text!r}\n"
    assert not (kubectl / "input").exists()


def test_the_dry_run_calls_nothing(kubectl):
    assert launch("--dry-run", "--nodes", "1") == 0
    assert not (kubectl / "arguments").exists()


def test_what_kubectl_says_is_passed_on_when_it_fails(kubectl, capfd):
    (kubectl / "end").write_text("echo 'error: no matches for kind JobSet' >&2; exit 3")
    assert launch("--nodes", "1") == 1
    assert capfd.readouterr().err == "error: no matches for kind JobSet\nkubectl apply ended with 3\n"


def test_a_missing_kubectl_is_one_line_and_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch("--nodes", "1") == 2
    error = capsys.readouterr().err
    assert error.startswith("cannot run kubectl: No such file or directory")
    assert len(error.splitlines()) == 1


# The pods


@pytest.mark.soak
def test_the_pods_on_cpus_do_the_job_as_a_kubelet_would_start_them(rendered, tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text((ROOT / "specs" / "counter.yaml").read_text())
    directory = tmp_path / "run"
    options = ["--set", f"directory={directory}", "--volume-claim", f"disk={tmp_path}"]
    options += ["--set", "config.total_steps=20", "--set", "config.step_seconds=0.0", "--set", "config.width=16"]
    manifest = rendered("--nodes", "2", *options, spec=spec)
    container = container_of(manifest)
    file = tmp_path / "annotation.yaml"
    file.write_text(job_of(manifest)["template"]["metadata"]["annotations"]["runner/spec"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    name = manifest["metadata"]["name"]
    pods = []
    for index in range(2):
        words = [expanded(word, {"JOB_COMPLETION_INDEX": str(index)}) for word in container["args"]]
        replaced = {"/etc/runner/spec.yaml": str(file), f"{name}-slice-0-0.{name}:8476": address}
        command = [sys.executable, *(replaced.get(word, word) for word in words)]
        pods.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | variables_of(manifest)))
    assert [pod.wait(timeout=DEADLINE_SECONDS) for pod in pods] == [0, 0]
    assert (directory / "result.json").exists()
