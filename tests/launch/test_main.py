"""The command line of `python -m launch`: help and usage errors of every engine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import worker
from launch.app import main

ROOT = Path(__file__).parents[2]
REQUIRED_OPTIONS = {
    "local": [],
    "slurm": [],
    "jobset": ["--image", "registry/job:1"],
    "tpu-vm": ["--zone", "z"],
    "image": ["--tag", "job:1"],
    "sweep": ["--grid", "seed=0,1"],
    "ladder": ["--sizes", "1,2,3,4"],
}
OPTIONS = {
    "local": "--set --processes --devices-per-process --max-restarts --standby-seconds --grace-seconds --take-over",
    "slurm": "--set --nodes --spare-nodes --gpus-per-node --tasks-per-node --cpus-per-task --time --partition "
    "--account --exclude --output --grace-seconds --max-restarts --standby-seconds --python --sbatch-option "
    "--srun-option --skip-checks --dry-run",
    "jobset": "--set --image --skip-checks --dry-run --name --namespace --nodes --cpu --memory --spot --node-selector "
    "--exclude --label --annotation --max-restarts --standby-seconds --grace-seconds --workdir --env --env-from-secret "
    "--volume-claim --service-account --priority-class",
    "tpu-vm": "--set --zone --project --name --spot --reserved --runtime-version --service-account --network "
    "--subnetwork --internal-ips --environment-file --runner --requirements --max-restarts --standby-seconds --keep "
    "--poll-seconds --skip-checks --dry-run",
    "image": "--set --tag --base --runner --requirements --extra --builder --push --dry-run",
    "sweep": "--set --grid --random --search --number --file --sweep-seed --root --metric --maximise --halving "
    "--engine --at-once --skip-checks --dry-run",
    "ladder": "--set --root --engine --at-once --sizes --tokens-per-parameter --width-per-layer --head-size --forecast "
    "--then",
}
ALL_ENGINES = pytest.mark.parametrize("engine", list(REQUIRED_OPTIONS))


@pytest.fixture
def run_launch(monkeypatch, capsys):
    """Call the command line in this process; return its exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["__main__.py"])

    def run_launch(*words, main=main):
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run_launch


@ALL_ENGINES
def test_each_engine_has_its_own_help(engine, run_launch):
    code, output, problems = run_launch(engine, "--help")
    assert (code, problems) == (0, "")
    assert output.startswith(f"Usage: python -m launch {engine} [OPTIONS] SPEC")
    assert "Exit codes: " in output
    listed = re.findall(r"^  (-.*?)(?:  |$)", output, re.MULTILINE)
    assert {option for line in listed for option in re.findall(r"--[\w-]+", line)} == {
        "--help",
        *OPTIONS[engine].split(),
    }


@ALL_ENGINES
def test_an_unknown_option_suggests_the_nearest_in_one_line(engine, run_launch):
    assert run_launch(engine, "x.yaml", *REQUIRED_OPTIONS[engine], "--nonsense")[0] == 2
    for option in OPTIONS[engine].split():
        code, output, problems = run_launch(engine, "x.yaml", *REQUIRED_OPTIONS[engine], f"{option}x")
        assert (code, output, problems.count("\n")) == (2, "", 1)
        assert f"did you mean {option}?" in problems


@ALL_ENGINES
def test_missing_and_superfluous_arguments_are_reported_in_one_line(engine, run_launch):
    for words in ([], ["x.yaml", *REQUIRED_OPTIONS[engine], "superfluous"]):
        code, output, problems = run_launch(engine, *words)
        assert (code, output, problems.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "missing command"),
        (["slrum", "x.yaml"], "did you mean slurm?"),
        (["nowhere", "x.yaml"], "choose from local, slurm, jobset, tpu-vm, image, sweep"),
        (["local", "x.yaml", "--processes", "0"], "--processes: "),
        (["local", "x.yaml", "--max-restarts", "-1"], "--max-restarts: "),
        (["jobset", "x.yaml"], "missing option '--image'"),
        (["tpu-vm", "x.yaml"], "missing option '--zone'"),
        (["image", "x.yaml"], "missing option '--tag'"),
        (["tpu-vm", "x.yaml", "--zone", "z", "--environment-file", "none"], "--environment-file none: no such file"),
    ],
)
def test_a_bad_command_line_is_reported_in_one_line(words, message, run_launch):
    code, output, problems = run_launch(*words)
    assert (code, output, problems.count("\n")) == (2, "", 1)
    assert message in problems


@pytest.mark.parametrize("engine", ["slurm", "jobset"])
def test_ctrl_c_gives_one_line(engine, run_launch, monkeypatch):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"launch.{'kubernetes' if engine == 'jobset' else engine}.engine.run", interrupt)
    code, output, problems = run_launch(engine, "x.yaml", *REQUIRED_OPTIONS[engine])
    assert (code, output, problems.count("\n")) == (75, "", 1)
    assert "look whether the job was submitted" in problems


def test_the_help_lists_the_engines(run_launch):
    code, output, _ = run_launch("--help")
    assert code == 0
    commands = output.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in commands] == list(REQUIRED_OPTIONS)


def test_the_worker_has_help_and_reports_mistakes(run_launch):
    code, output, _ = run_launch("--help", main=worker.main)
    assert code == 0
    assert output.startswith("Usage: python -m launch.worker [OPTIONS] SPEC")
    assert "--max-restarts" in output
    code, output, problems = run_launch("x.yaml", "--max-restart", "1", main=worker.main)
    assert (code, output, problems.count("\n")) == (2, "", 1)
    assert "did you mean --max-restarts?" in problems


def test_the_command_line_does_not_import_jax():
    program = "import sys; sys.argv = ['x', '--help']; from launch.app import main\n"
    program += "try: main()\nfinally: print(sorted({'jax', 'rich'} & set(sys.modules)), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.stderr == "[]\n"
