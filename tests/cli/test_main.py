"""Command line: help and errors of every command, the exit code of every kind of error, and a fast start."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from pydantic import BaseModel

from runner import errors
from runner.cli import app, arguments
from runner.cli.app import COMMANDS, main
from runner.errors import InvalidError
from runner.inference.open_run import SampleRequest
from runner.process import count_cpus
from runner.spec import ExecutionSpec
from runner.storage import LocalStore, read_log
from tests.support import forked_python, run_outcomes
from tests.support.job_process import DEADLINE_SECONDS, drop_plugin_messages

ROOT = Path(__file__).parents[2]

# Required arguments of each command, and whether it can run without arguments.
REQUIRED_ARGUMENTS = {
    (): ["x.yaml"],
    ("plan",): ["x.yaml"],
    ("status",): ["run"],
    ("lineage",): ["run"],
    ("report",): ["run", "-o", "x.html"],
    ("dashboard",): ["runs"],
    ("sample",): ["run"],
    ("evaluate",): ["run"],
    ("predict",): ["run", "--data", "x.txt", "-o", "out.npz"],
    ("export",): ["run", "-o", "out"],
    ("checkpoints",): ["run"],
    ("checkpoints", "copy"): ["run", "other"],
    ("verify-resume",): ["x.yaml"],
    ("schema",): [],
    ("spec",): [],
    ("init",): ["mine"],
    ("spec-from",): ["weights"],
    ("scale",): ["x.yaml", "--depth", "3"],
    ("explain",): ["run", "--step", "3"],
    ("replay",): ["run", "--step", "3"],
    ("trial",): ["runs/x", "--steps", "32", "--set", "seed=1"],
    ("bundle",): ["run", "-o", "x.zip"],
    ("reproduce",): ["x.zip", "-o", "out"],
    ("metrics",): ["run"],
    ("profile",): ["run"],
}
OPTIONS = {
    (): "--set --profile --take-over --coordinator --num-processes --process-id",
    (
        "plan",
    ): "--set --topology --quick --anyway --search --chips --hours --minutes --json --profile --trace --against",
    ("status",): "--json --watch --hosts",
    ("lineage",): "--json",
    ("report",): "-o --output",
    ("dashboard",): "--port --host --token",
    ("sample",): "--prompt --chat --step --weights --tokens --temperature --top-p --seed --trust",
    ("evaluate",): "--data --step --all --weights --follow -o --output --save-top-k --harness --include-path --json "
    "--coordinator --num-processes --process-id --trust",
    ("predict",): "--data --step --weights -o --output --coordinator --num-processes --process-id --trust",
    ("export",): "--step --weights --dtype --adapter --context --tokenizer --trust -o --push --public --license "
    "--base-model",
    ("checkpoints",): "--verify --deep",
    ("checkpoints", "copy"): "",
    ("verify-resume",): "--set --steps --kills --processes --devices-per-process --seed",
    ("schema",): "--set --batch",
    ("spec",): "",
    ("init",): "",
    ("spec-from",): "--topology --data --lora --ignore-config-key -o --output",
    ("scale",): "--depth --tokens-per-parameter --width-per-layer --head-size --set --json -o --output",
    ("explain",): "--step --steps --spike --top --data-only --json --set --code --any-device --trust",
    (
        "replay",
    ): "--step --spot-check --inspect --save --page --against --against-set --against-code --against-commit --json "
    "--set --code --any-device --trust",
    ("bundle",): "-o --output --trust",
    ("trial",): "--steps -o --output --set --code --python --judge --step --adopt --json --any-device --trust",
    ("reproduce",): "-o --output --install --json --set --any-device --trust",
    ("metrics",): "--csv -o --output",
    ("profile",): "--steps",
}
ALL = pytest.mark.parametrize("command", list(REQUIRED_ARGUMENTS), ids=" ".join)


def run(*words, env=os.environ):
    return forked_python.run(["runner", *words], env, DEADLINE_SECONDS)


@pytest.fixture
def run_in_process(monkeypatch, capsys):
    """Run the command line in this process and return its exit code, output and errors."""
    monkeypatch.setattr("runner.distributed.preemption.StopNotice.install_signal_handlers", lambda self: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["__main__.py"])

    def ask(*words):
        code = main(words)
        return code, *capsys.readouterr()

    return ask


@ALL
def test_each_command_has_its_own_help(command, run_in_process):
    words = command or ("x.yaml",)
    for option in ("--help", "-h"):
        code, output, problems = run_in_process(*words, option)
        assert (code, problems) == (0, "")
        assert output.startswith(" ".join(["Usage: python -m runner", *command, "[OPTIONS]"]))
        assert "Exit codes: 0 " in output
        assert output.isprintable() or "\x1b" not in output
    listed = re.findall(r"^  (-.*?)(?:  |$)", output, re.MULTILINE)
    shown = {option for line in listed for option in re.findall(r"(?<![\w-])--?[\w-]+", line)}
    assert shown - {"-h", "--help"} == set(OPTIONS[command].split())


@ALL
def test_an_unknown_option_gives_one_line_with_the_nearest_name(command, run_in_process):
    words = command or ("x.yaml",)
    code, output, problems = run_in_process(*words, *REQUIRED_ARGUMENTS[command], "--nonsense")
    assert (code, output, problems.count("\n")) == (2, "", 1)
    assert "--nonsense is not an option" in problems
    for option in [each for each in OPTIONS[command].split() if each.startswith("--")]:
        code, output, problems = run_in_process(*words, *REQUIRED_ARGUMENTS[command], f"{option}x")
        assert (code, output, problems.count("\n")) == (2, "", 1)
        assert f"did you mean {option}?" in problems


@ALL
def test_a_missing_argument_gives_one_line(command, run_in_process):
    if REQUIRED_ARGUMENTS[command]:
        code, output, problems = run_in_process(*command)
        assert (code, output, problems.count("\n")) == (2, "", 1)
        assert "missing" in problems


@ALL
def test_an_extra_argument_gives_one_line(command, run_in_process):
    if command == ("report",):
        return  # takes any number of arguments
    words = REQUIRED_ARGUMENTS[command] or ["x.yaml"]
    code, output, problems = run_in_process(*command, *words, "superfluous")
    assert (code, output, problems.count("\n")) == (2, "", 1)
    assert "superfluous" in problems


def test_the_program_help_lists_each_command(run_in_process):
    code, output, _ = run_in_process("--help")
    assert code == 0
    commands = output.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [re.split(r"  +", line.strip())[0] for line in commands] == [
        "SPEC",
        *(" ".join(each) for each in REQUIRED_ARGUMENTS if each),
    ]
    assert not any(line.endswith("...") for line in commands)


def test_the_version_is_that_of_the_package(run_in_process):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run_in_process("--version") == (0, f"runner {version}\n", "")


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (("stauts", "runs/x"), "did you mean status?"),
        (("verify_resume", "x.yaml"), "did you mean verify-resume?"),
        (("checkpoint", "runs/x"), "did you mean checkpoints?"),
        (("qqq",), "choose from plan, status, lineage, report"),
        (("specs/gpt_nan.yaml",), "did you mean specs/gpt_nano.yaml?"),
        (("plan", "specs/gpt_nan.yaml"), "did you mean specs/gpt_nano.yaml?"),
        (("--set", "a=1", "spec/gpt_nano.yaml"), "did you mean specs/gpt_nano.yaml?"),
        (("status", "specs/gpt_nan.yml"), "did you mean specs/gpt_nano.yaml?"),
    ],
    ids=" ".join,
)
def test_a_mistyped_command_or_spec_gives_one_line_with_the_nearest_name(
    words, suggestion, run_in_process, monkeypatch
):
    monkeypatch.chdir(ROOT)
    code, output, problems = run_in_process(*words)
    assert suggestion in problems
    if words[0] != "plan":  # lists all problems of a spec
        assert (code, output, problems.count("\n")) == (2, "", 1)


def test_the_arguments_of_a_job_are_parsed():
    parsed = COMMANDS.parse(["x.yaml", "--set", "a=1", "--set", "b.c=2", "--profile", "3:5"])
    assert isinstance(parsed, arguments.JobArguments)
    assert (parsed.spec, parsed.all_overrides) == ("x.yaml", ["a=1", "b.c=2", "logging.profile=3:5"])
    assert parsed.coordinator is None
    placed = COMMANDS.parse(["--coordinator", "h:1", "--num-processes", "4", "--process-id", "3", "x.yaml"])
    assert (placed.coordinator, placed.num_processes, placed.process_id) == ("h:1", 4, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "missing command"),
        (["x.yaml", "y.yaml"], "y.yaml"),
        (["x.yaml", "--coordinator", "h:1"], "give all three or none"),
        (["x.yaml", "--process-id", "0"], "give all three or none"),
        (["x.yaml", "--coordinator", "h:1", "--num-processes", "2"], "give all three or none"),
        (["x.yaml", "--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"], "2 is not in 0 .. 1"),
        (["x.yaml", "--coordinator", "h:1", "--num-processes", "2", "--process-id", "-1"], "-1 is not in 0 .. 1"),
        *(
            (["x.yaml", "--coordinator", address, "--num-processes", "2", "--process-id", "0"], "needs HOST:PORT")
            for address in ("h", "h:", ":1", "h:x", "h:0", "h:65536", "http://h:1", "")
        ),
        (["x.yaml", "--coordinator", "h:1", "--num-processes", "two", "--process-id", "0"], "--num-processes: "),
        (["x.yaml", "--set"], "requires an argument"),
        (["plan", "x.yaml", "--chips", "some", "--hours", "1"], "'some' is not one of 'auto'"),
        (["export", "x", "-o", "out", "--dtype", "int8"], "'int8' is not one of"),
    ],
)
def test_an_invalid_command_line_is_rejected(words, message):
    with pytest.raises(InvalidError, match=message) as caught:
        COMMANDS.parse(words)
    assert "\n" not in str(caught.value)


def test_a_removed_working_directory_gives_one_line(tmp_path):
    (tmp_path / "gone").mkdir()
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    words = ["bash", "-c", script, "bash", tmp_path / "gone", sys.executable, "-m", "runner", "status", "run"]
    ended = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "working directory was removed" in ended.stderr


def test_the_defaults_are_those_of_the_implementation():
    sample = COMMANDS.parse(["sample", "run"])
    request = SampleRequest()
    assert (sample.prompt, sample.step, sample.num_tokens) == (request.prompt, request.step, request.num_tokens)
    assert (sample.temperature, sample.top_p, sample.seed) == tuple(vars(request.sampling).values())
    assert sample.weights == request.weights


def test_every_command_has_an_implementation_that_takes_its_arguments():
    declared = {
        each for each in vars(arguments).values() if isinstance(each, type) and each.__name__.endswith("Arguments")
    }
    assert set(app._IMPLEMENTATIONS) == declared - {arguments.JobArguments}
    for kind, (module, function) in app._IMPLEMENTATIONS.items():
        assert get_type_hints(getattr(app._import(module), function)) == {"arguments": kind, "return": int}


@pytest.mark.parametrize("words", [["plan", "--help"], ["specs/none.yaml"], ["specs/gpt_nano.yaml", "--set", "seed"]])
def test_help_and_a_spec_that_cannot_be_read_do_not_import_jax(words):
    program = "import sys; from runner.cli.app import main; code = main(sys.argv[1:]); "
    program += "print(code, sorted({'jax', 'flax', 'optax', 'orbax', 'rich'} & set(sys.modules)), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True)
    code = 0 if "--help" in words else 2
    assert result.stderr.splitlines()[-1] == f"{code} []"


def test_a_shell_completes_commands_options_and_the_options_of_a_job():
    def complete(line):
        variables = {"_RUNNER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        result = run(env=os.environ | variables)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    assert complete("runner s") == ["status", "sample", "schema", "spec", "spec-from", "scale"]
    assert complete("runner plan --t") == ["--topology", "--trace"]
    assert complete("runner specs/x.yaml --co") == ["--coordinator"]
    script = run("--show-completion", "bash")
    if shutil.which("bash"):
        subprocess.run(["bash", "-n"], input=script.stdout, text=True, check=True)


def test_console_scripts_call_the_same_entry_point():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"runner": "runner.__main__:main", "runner-launch": "launch.__main__:main"}
    program = "import sys; sys.argv[0] = '/bin/runner'; from runner.__main__ import main; sys.exit(main())"
    variables = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}  # a second start would run -c again
    command = [sys.executable, "-c", program, "status", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    assert result.stdout.startswith("Usage: runner status [OPTIONS]")
    assert result.returncode == 0


def test_a_read_only_command_works_on_a_run(tmp_path, run_in_process):
    run_outcomes.make_job(tmp_path / "run")()
    code, output, problems = run_in_process("checkpoints", str(tmp_path / "run"))
    assert (code, problems) == (0, "")
    assert "40" in output


def test_a_missing_spec_ends_with_2_and_one_line():
    result = run("specs/none.yaml")
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["specs/none.yaml: cannot read the spec: No such file or directory"]


# Environment variable of JAX with which nothing works -> part of the line that says so.
BAD_VARIABLES = {
    "JAX_DISABLE_JIT=1": "JAX_DISABLE_JIT is set",
    "JAX_NO_EXECUTION=1": "JAX_NO_EXECUTION is set",
    "JAX_DEFAULT_MATMUL_PRECISION=nonsense": '"nonsense" for JAX flag jax_default_matmul_precision',
    "JAX_NO_TRACING=1": "JAX_NO_TRACING is set",
    "JAX_ENABLE_X64=nonsense": "'nonsense' for environment 'jax_enable_x64'",
    "JAX_NUM_CPU_DEVICES=nonsense": '"nonsense" for JAX flag jax_num_cpu_devices',
    "JAX_PLATFORMS=nonsense": "initialize backend 'nonsense'",
}
# One that is set, one of each kind of value, and one that only the backend reads.
DAILY_BAD_VARIABLES = {
    "JAX_DISABLE_JIT=1",
    "JAX_DEFAULT_MATMUL_PRECISION=nonsense",
    "JAX_ENABLE_X64=nonsense",
    "JAX_PLATFORMS=nonsense",
}


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    "variable",
    [pytest.param(each, marks=() if each in DAILY_BAD_VARIABLES else pytest.mark.soak) for each in BAD_VARIABLES],
)
def test_a_variable_with_which_jax_does_not_work_ends_with_2_and_one_line(variable, tmp_path):
    name, value = variable.split("=", 1)
    result = run("specs/counter.yaml", "--set", f"directory={tmp_path / 'run'}", env=os.environ | {name: value})
    lines = result.stderr.splitlines()
    assert (result.returncode, len(lines)) == (2, 1), result.stderr
    assert BAD_VARIABLES[variable].lower() in lines[0].lower()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variable", ["XLA_FLAGS=--xla_force_host_platform_device_count={}", "JAX_NUM_CPU_DEVICES={}"])
def test_a_plain_start_with_simulated_devices_gets_threads_for_them(variable, tmp_path):
    """Without these a collective may wait for ever for a thread."""
    num_devices = count_cpus() + 1
    name, value = variable.format(num_devices).split("=", 1)
    variables = {key: text for key, text in os.environ.items() if key not in ("NPROC", "XLA_FLAGS")}
    options = (f"directory={tmp_path / 'run'}", "config.total_steps=2", "config.width=8")
    words = [word for option in options for word in ("--set", option)]
    result = run("specs/counter.yaml", *words, env=variables | {name: value})
    assert result.returncode == 0, result.stderr
    (start,) = (event for event in read_log(LocalStore(tmp_path / "run"), "events") if event["event"] == "start")
    assert (start["devices"], start["cpus"]) == (num_devices, 4 * num_devices)


# Settings for the checks of one's own code, which libraries of JAX do not pass.
CHECKS = {
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_TRANSFER_GUARD": "disallow",
    "JAX_ARRAY_GARBAGE_COLLECTION_GUARD": "fatal",
    "JAX_THREAD_GUARD": "1",
    "JAX_ERROR_CHECKING_BEHAVIOR_NAN": "raise",
}


@pytest.mark.daily(1)
@pytest.mark.parametrize("variables", [CHECKS, {"JAX_TRANSFER_GUARD": "log"}], ids=["all", "one"])
def test_checks_of_jax_are_set_back_with_one_line(variables):
    program = """
import jax, numpy
from runner.cli.app import _import
_import("runner.errors")
_import("runner.errors")
x = jax.numpy.ones((2, 3)) + jax.numpy.ones(3, int)
assert float(jax.jit(lambda y: y + 1)(numpy.ones(3))[0]) + float(x[0, 0]) == 4
"""
    result = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    (line,) = drop_plugin_messages(result.stderr).splitlines()
    assert line.startswith("environment: " + ", ".join(f"{name}={value}" for name, value in variables.items()))


@pytest.mark.soak
def test_a_trainer_runs_beside_checks_of_jax(tmp_path):
    words = ["--set", f"directory={tmp_path / 'run'}", "--set", "config.train.total_steps=2"]
    words += ["--set", "config.schedule.warmup_steps=0", "--set", "config.model={layers: 1, heads: 1, width: 8}"]
    result = run("specs/gpt_nano.yaml", *words, env=os.environ | CHECKS)
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) < 4, result.stderr


def test_other_variables_of_jax_are_left_alone():
    program = "import jax, runner.cli.app as app; app._import('json'); print(jax.config.jax_transfer_guard)"
    variables = {"JAX_NUMPY_RANK_PROMOTION": "allow", "JAX_LOG_COMPILES": "0"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert (result.returncode, result.stdout, drop_plugin_messages(result.stderr)) == (0, "None\n", "")


def test_a_trainer_without_topology_runs_on_any_devices(tmp_path):
    text = (ROOT / "specs" / "gpt_nano.yaml").read_text().splitlines()
    start = text.index("topology:")
    path = tmp_path / "x.yaml"
    path.write_text("\n".join(text[:start] + text[start + 3 :]))
    words = ["--set", f"directory={tmp_path / 'run'}", "--set", "config.train.total_steps=2"]
    result = run(str(path), *words, "--set", "config.schedule.warmup_steps=0")
    assert result.returncode == 0, result.stderr
    resolved = yaml.safe_load((tmp_path / "run/spec.yaml").read_text())
    assert resolved["topology"]["accelerator"] == "any"


def test_the_schema_is_the_json_schema_of_the_spec():
    result = run("schema")
    assert result.returncode == 0
    schema = json.loads(result.stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == set(ExecutionSpec.model_fields)
    assert schema["required"] == ["name", "job", "directory"]
    assert schema["additionalProperties"] is False
    assert "learning_rate" in json.dumps(schema["$defs"])
    assert issubclass(ExecutionSpec, BaseModel)


def test_every_error_has_the_exit_code_of_its_kind():
    kinds = {
        1: [
            "RunnerError",
            "FailedError",
            "DivergedError",
            "FencedError",
            "HookError",
            "MiscountError",
            "PhaseError",
            "StateError",
        ],
        2: ["InvalidError", "SpecError", "DataError", "EncodeError", "ResumeError", "RemovedError", "NewerFormatError"],
        75: ["PreemptedError"],
        76: ["RetryableError", "PeerLostError", "DeviceError", "StorageError"],
    }
    found = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert sorted(found) == sorted(name for names in kinds.values() for name in names)
    for code, names in kinds.items():
        assert {getattr(errors, name).exit_code for name in names} == {code}


def test_invalid_errors_are_value_errors_and_lost_peers_connection_errors():
    assert issubclass(errors.InvalidError, ValueError)
    assert issubclass(errors.PeerLostError, ConnectionError)
    assert issubclass(errors.StorageError, OSError)


def test_a_bug_in_a_job_ends_with_1_and_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from experiments.counter import Counter\n"
        "class Broken(Counter):\n    def run(self):\n        raise KeyError('here')\n"
    )
    (tmp_path / "x.yaml").write_text(
        f"name: x\njob: broken:Broken\ndirectory: {tmp_path}/run\nconfig: {{total_steps: 3}}\n"
    )
    command = [sys.executable, "-m", "runner", "x.yaml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=None)
    assert result.returncode == 1
    assert "KeyError: 'here'" in result.stderr
