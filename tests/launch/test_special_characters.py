"""Values with special characters for every engine: each reaches the job unchanged or is rejected in one line."""

import json
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from launch.app import main
from launch.kubernetes import engine as jobset
from launch.kubernetes.engine import JobSetArguments
from launch.slurm.engine import SlurmArguments
from launch.tpu_vm.engine import TpuVmArguments
from tests.support.job_process import ROOT
from tests.support.special_characters import (
    CONTROL_CHARACTER_TEXTS,
    MULTILINE_OVERRIDE,
    TEXTS,
    UNPRINTABLE_TEXTS,
    Engine,
    extract_job_arguments,
    make_committed_project,
)

COUNTER = str(ROOT / "specs" / "counter.yaml")
ENGINE_OPTIONS = {
    "slurm": [],
    "jobset": ["--image", "registry/job:1", "--nodes", "2", "--set", "directory=gs://bucket/run"],
    "tpu-vm": ["--zone", "z", "--set", "directory=gs://bucket/run", "--set", "topology={accelerator: v5e-8}"],
}
ARGUMENTS = {"slurm": SlurmArguments, "jobset": JobSetArguments, "tpu-vm": TpuVmArguments}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Git repository with a spec, since TPU VMs ship a commit."""
    return make_committed_project(tmp_path_factory.mktemp("special") / "project")


@pytest.fixture
def render(project, monkeypatch, capsys):
    """Run an engine with `--dry-run`; return the exit code, the output and the error lines."""
    monkeypatch.chdir(project)

    def run_dry(engine, *options, spec="specs/counter.yaml"):
        code = main([engine, spec, *ENGINE_OPTIONS[engine], *options, "--dry-run"])
        output = capsys.readouterr()
        errors = [line for line in output.err.splitlines() if not line.startswith("launch: ")]
        return code, output.out, errors

    return run_dry


def list_text_options(engine):
    """Yield the options of an engine whose declared type is text."""
    hints = get_type_hints(ARGUMENTS[engine])
    for name, kind in hints.items():
        if kind in (str, str | None, list[str]) and name not in ("spec", *ARGUMENTS[engine].pairs):
            yield {"overrides": "--set"}.get(name, f"--{name.replace('_', '-')}")


@pytest.mark.daily(10)
@pytest.mark.parametrize(
    ("engine", "option"), [(engine, option) for engine in ENGINE_OPTIONS for option in list_text_options(engine)]
)
def test_text_options_reject_unprintable_values(engine, option, render):
    for text in UNPRINTABLE_TEXTS:
        code, output, errors = render(engine, f"{option}={text}")
        assert (code, output, len(errors)) == (2, "", 1), (text, errors)
        assert option in errors[0]


@pytest.mark.parametrize("number", ["2147483648", "9" * 30])
@pytest.mark.parametrize(
    ("engine", "option"),
    [
        ("jobset", "--nodes"),
        ("jobset", "--max-restarts"),
        ("jobset", "--grace-seconds"),
        ("slurm", "--nodes"),
        ("tpu-vm", "--max-restarts"),
        ("tpu-vm", "--poll-seconds"),
    ],
)
def test_a_number_too_large_for_an_engine_is_rejected(engine, option, number, render):
    code, output, errors = render(engine, option, f"{number}e9" if option == "--poll-seconds" else number)
    assert (code, output, len(errors)) == (2, "", 1)
    assert option in errors[0]


# --set: any text reaches the job, through all shells and YAML files.


@pytest.mark.daily(24)
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
@pytest.mark.parametrize("engine", ENGINE_OPTIONS)
def test_an_override_reaches_the_job_unchanged(engine, text, render, tmp_path):
    override = f"group={json.dumps(text)}"
    code, output, errors = render(engine, "--set", override, "--set", f"project={json.dumps(text, ensure_ascii=False)}")
    assert (code, errors) == (0, [])
    words = extract_job_arguments(Engine(engine), output, tmp_path)
    assert words[words.index(override) - 1] == "--set"
    assert f"project={json.dumps(text, ensure_ascii=False)}" in words


@pytest.mark.daily(20)
@pytest.mark.parametrize("text", [text for text in (*TEXTS, *CONTROL_CHARACTER_TEXTS) if "\0" not in text], ids=ascii)
def test_a_variable_and_a_spec_reach_the_pods_unchanged(text, render, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(f"{Path(COUNTER).read_text()}group: {json.dumps(text, ensure_ascii=False)}\n", newline="")
    code, output, errors = render("jobset", "--env", f"A={text}", spec=str(path))
    if code == 2:  # YAML cannot represent the text literally
        assert not text.isprintable()
        assert "unreadable YAML" in errors[0]
        return
    template = yaml.safe_load(output)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (value,) = [each["value"] for each in template["spec"]["containers"][0]["env"] if each["name"] == "A"]
    assert value.replace("$$", "$") == text
    assert template["metadata"]["annotations"][jobset.SPEC_ANNOTATION] == path.read_text()


@pytest.mark.parametrize("engine", ENGINE_OPTIONS)
def test_a_value_that_is_not_utf8_is_rejected(engine, render):
    code, output, errors = render(engine, "--set", "group=\udcff")
    assert (code, output, len(errors)) == (2, "", 1)
    assert "is not UTF-8" in errors[0]


@pytest.mark.parametrize("engine", ENGINE_OPTIONS)
def test_a_multiline_value_reaches_the_job_unchanged(engine, render, tmp_path):
    code, output, errors = render(engine, "--set", MULTILINE_OVERRIDE)
    assert (code, errors) == (0, [])
    assert MULTILINE_OVERRIDE in extract_job_arguments(Engine(engine), output, tmp_path)


def test_a_multiline_value_adds_no_line_to_the_batch_script(render):
    plain, special = (render("slurm", "--set", override)[1] for override in ("seed=1", MULTILINE_OVERRIDE))
    assert len(plain.split("\n")) == len(special.split("\n"))
    assert "\r" not in special  # sbatch rejects it


# Values that an API server rejects.

INVALID_VALUES = {
    "--image": ["Registry/Job", "a b", "job:", "job:t ag", "job@sha256:12", ":1", "-x", "http://job", "a" * 600],
    "--namespace": ["A", "a.b", "-a", "a-", "a_b", "a" * 64],
    "--name": ["x" * 64, "a/b", "-a", "a b"],
    "--service-account": ["A", "a_b", "a..b", "a" * 254],
    "--priority-class": ["A", "a/b"],
    "--cpu": ["four", "-1", "4 cores", "1e", "4KB", "0x4"],
    "--memory": ["16GB", "16 Gi", "lots", "1.2.3"],
    "--workdir": ["job", "/a:b"],
    "--node-selector": ["a b=c", "=c", "a/b/c=d", "-a=b", f"{'a' * 64}=b", "a=b c", "a=-b", f"a={'b' * 64}", "a"],
    "--exclude": ["a b", "-a", "a/b", "a,b", "a" * 64],
    "--env": ["A B=c", "1A=c", "A/B=c", "=c", "..=c", "A", "Ä=c"],
    "--env-from-secret": ["A", "a b", "a/b", "a" * 254],
    "--volume-claim": ["A=/a", "a b=/a", "a=b", "a=/a:b", "a=/etc/runner", "a=/x/../y", "a=", "a"],
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option in INVALID_VALUES for value in INVALID_VALUES[option]]
)
def test_values_that_kubernetes_rejects_are_rejected_first(option, value, render):
    code, output, errors = render("jobset", f"{option}={value}")
    assert (code, output, len(errors)) == (2, "", 1), errors
    assert option in errors[0] or (option, value) in [
        ("--volume-claim", "a=/etc/runner"),
        ("--volume-claim", "a=/x/../y"),
    ]


def test_the_table_of_invalid_values_covers_every_text_option():
    texts = set(list_text_options("jobset")) | {"--env", "--node-selector", "--volume-claim"}
    assert texts - {"--set"} == set(INVALID_VALUES)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--image", "gcr.io:5000/My-Project/".lower() + "a__b/c.d-e:Tag_1.2"),
        ("--image", f"job@sha256:{'0' * 64}"),
        ("--image", "job"),
        ("--node-selector", "cloud.google.com/Reservation_Name="),
        ("--node-selector", f"a.b/{'c' * 63}={'d' * 63}"),
        ("--env", "my.var-iable_1=a\nb\t' \" $ #"),
        ("--env", "_="),
        ("--cpu", "500m"),
        ("--cpu", "0.5"),
        ("--memory", "1e9"),
        ("--volume-claim", "a.b=/a b/c"),
        ("--namespace", "1a"),
    ],
)
def test_values_that_kubernetes_accepts_are_accepted(option, value, render):
    code, output, errors = render("jobset", f"{option}={value}")
    assert (code, errors) == (0, [])
    if option == "--env":
        name, _, text = value.partition("=")
        (container,) = yaml.safe_load(output)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
            "containers"
        ]
        assert {"name": name, "value": text.replace("$", "$$")} in container["env"]


def test_two_volumes_at_one_path_are_rejected(render):
    code, _, errors = render("jobset", "--volume-claim", "a=/data", "--volume-claim", "b=/data/")
    assert (code, errors) == (2, ["/data would be mounted twice; needs a path for each volume"])


def test_more_pods_than_a_job_can_have_are_rejected(render):
    assert render("jobset", "--nodes", "100001")[2] == ["--nodes 100001: a Job has at most 100000 pods"]
    code, _, (error,) = render("tpu-vm", "--name", "x" * 61)
    assert code == 2
    assert "--name" in error


def write_padded_spec(directory, num_bytes):
    """Write the counter's spec, padded to `num_bytes` by a comment."""
    spec = directory / "large.yaml"
    text = Path(COUNTER).read_text()
    spec.write_text(f"{text}# {'<' * (num_bytes - len(text))}\n")
    return str(spec)


def test_a_spec_too_large_for_an_annotation_is_rejected_with_the_sizes(render, tmp_path, monkeypatch):
    code, output, errors = render("jobset", spec=write_padded_spec(tmp_path, 300_000))
    assert (code, output, len(errors)) == (2, "", 1)
    assert "300003 of them the spec's" in errors[0]
    assert "ends at 262144" in errors[0]
    assert render("jobset", spec=write_padded_spec(tmp_path, 44_000))[0] == 2  # kubectl escapes each `<` as 6 bytes
    assert render("jobset", spec=write_padded_spec(tmp_path, 40_000))[0] == 0


def test_a_command_longer_than_the_system_limit_is_rejected(render):
    code, output, errors = render("tpu-vm", "--set", f'group="{chr(39) * 50_000}"')
    assert (code, output, len(errors)) == (2, "", 1)
    assert "needs less than 131072" in errors[0]


def test_every_rule_has_a_description_and_a_length():
    rules = [value for value in vars(jobset).values() if isinstance(value, jobset.Rule)]
    assert len(rules) == 8
    assert all(rule.words and rule.max_characters for rule in rules)
