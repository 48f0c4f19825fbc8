"""Texts with characters that shells, YAML or batch systems interpret, and the arguments that a job gets from them."""

import enum
import re
import shlex
import subprocess
from pathlib import Path

import yaml

from tests.support.job_process import ROOT

# Characters that only YAML 1.1 or only Python takes for line breaks, byte-order marks, and characters that terminals or
# manifests cannot represent; each inside a text, alone, and after a blank.
_CHARACTERS = "\x85\u2028\u2029\ufeff\r\t\x00\x0b\x1c\x7f\x80\xa0\ufffe"
_CONTEXTS = (("a", "b"), ("", ""), ("a ", "\n"))
CONTROL_CHARACTER_TEXTS = [f"{before}{character}{after}" for character in _CHARACTERS for before, after in _CONTEXTS]
TEXTS = (
    "it's",
    'say "no"',
    "back\\slash \\n \\\\",
    "$HOME $(touch pwned) `touch pwned` ${x} $$ %j %x",
    "two\nlines",
    "\n#SBATCH --nodes=7\n",
    "#SBATCH --nodes=7",
    "a\r\nb",
    "tab\there",
    "-x --nodes=7",
    "; exit 0; & | > pwned < x",
    "* ? [a-z] ~ {a,b}",
    "@{commit} @{arguments}",
    "ünïcödé 数 \u2028 \x85 \x1b[31m",
    " blanks around ",
    "EOF\nEOF",
    "1e3",
    "# no comment",
    "\x85",
    "a\x85b",
    "a \u2028b",
    "\ufeffa",
)
# An override whose YAML value contains comments on lines of their own.
MULTILINE_OVERRIDE = 'seed=1\n#SBATCH --nodes=7\r\n# it\'s "raw" $HOME \\\n#SBATCH --qos=none\n'
UNPRINTABLE_TEXTS = ("", " ", " a", "a ", "a\nb", "a\tb", "a\rb", "\x1b[31m", "\x7f", "\udcff")
_SPEC = "specs/counter.yaml"


class Engine(enum.Enum):
    """Engine that starts the job."""

    SLURM = "slurm"
    JOBSET = "jobset"
    TPU_VM = "tpu-vm"


def make_committed_project(directory: Path) -> Path:
    """Create a Git repository with one committed spec."""
    (directory / "specs").mkdir(parents=True)
    (directory / _SPEC).write_text((ROOT / _SPEC).read_text())
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "All of it"]):
        subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True)
    return directory


def extract_job_arguments(engine: Engine, output: str, scratch: Path) -> list[str]:
    """Return the arguments of `python -m runner`, or of its worker, that the output of a dry run would pass."""
    if engine is Engine.JOBSET:
        pod = yaml.safe_load(output)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        return [word.replace("$$", "$") for word in pod["containers"][0]["args"]]
    if engine is Engine.SLURM:
        assert output.count("\n#SBATCH") == output.partition("\nset -u\n")[0].count("\n#SBATCH")
        (command,) = re.findall(r"^command=\(.*\)$", output, re.MULTILINE)
        return _run_bash(f'{command}\nprintf "%s\\0" "${{command[@]}}"')
    (attend, *_) = [line for line in output.split("\ngcloud ") if "job.sh" in line or "launch.worker" in line]
    script = next(word for word in shlex.split(f"gcloud {attend}") if word.startswith("--command="))
    (job,) = re.findall(r"setsid nohup bash -c (.*) >>log 2>&1", script, re.DOTALL)
    program = shlex.split(job)[0]
    (arguments,) = re.findall(r"launch\.worker (.*)\ncode=", program, re.DOTALL)
    return _run_bash(f'printf "%s\\0" {arguments}')


def _run_bash(program: str) -> list[str]:
    output = subprocess.run(["bash", "-c", program], capture_output=True, check=True).stdout
    return output.decode().split("\0")[:-1]
