"""What is run on the hosts of a TPU VM: shell text, which knows neither gcloud nor the state of anything else.

In the directory `~/NAME` of each host:

| file | content |
|---|---|
| `code/`, `venv/`, `installed` | the commit, the environment that runs it, and which commit that is |
| `log` | all that setting up and the job have printed; `log.previous`: that of the job before |
| `lock` | locked by the job as long as any of its processes lives |
| `pid` | the job's process group |
| `exit_code` | how it ended, written once it has |

`attend` is the one step that brings a host from anything to a running job, and may be repeated at any moment: it starts
the job where it is not running and has not ended. The job outlives the connection that started it, and a host that was
rebooted is started again by the next look at it.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

SHOWN_AT_FIRST_LINES = 20
_WORD = "tpu-vm:"
_ANSWER = re.compile(rf"^{_WORD} worker (\d+) (empty|started|running|stopped|ended (\d+))(?: of ([0-9a-f]+))?$", re.M)
_LOG = re.compile(rf"^{_WORD} log from (\d+)$")

_WHO = """\
url=http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number
worker=$(curl -sf --retry 5 -H "Metadata-Flavor: Google" "$url")
answer() { echo "tpu-vm: worker $worker $*"; }"""

# JAX needs a newer Python than the images of TPU VMs have; uv brings one.
_SETUP = """\
make_venv() {
  for python in python3.13 python3.12 python3.11 python3; do
    "$python" -c "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || continue
    "$python" -m venv venv && return
    rm -rf venv
  done
  python3 -m pip install --quiet --user uv && python3 -m uv venv --seed --python 3.12 venv
}
setup() {
  [ "$(cat installed 2>/dev/null)" != "$commit" ] || return 0
  rm -rf code && mkdir code && tar -xzf "../$archive" -C code || return
  [ -x venv/bin/python ] || { rm -rf venv && make_venv; } || return
  venv/bin/python -m pip install --quiet --editable "./code[$extras]" || return
  echo "$commit" >installed
}"""


@dataclass(frozen=True)
class Answer:
    """What one host says of the job: empty (nothing shipped yet), started, running, ended or stopped."""

    state: str
    code: int | None = None
    commit: str = ""


@dataclass(frozen=True)
class Host:
    """The scripts of one job.

    Attributes:
        name: of its directory: letters, digits and hyphens, so that no shell reads more into it.
        commit: what is run, as shipped in `archive` (a file in the home directory) with this `sha256`.
        extras: of the project's package.
        arguments: of `python -m launch.worker`.
        environment: file in the home directory with NAME=value lines for the job, if any.
    """

    name: str
    commit: str
    archive: str
    sha256: str
    extras: Sequence[str]
    arguments: Sequence[str]
    environment: str | None = None

    def attend(self) -> str:
        """Start the job unless it runs or has ended; say which. One that was asked to stop (75) is started again."""
        return f"""\
mkdir -p {self._directory} && cd {self._directory} || exit
{_WHO}
exec 9>>lock
if ! flock -n 9; then answer running of "$(cat commit)"; exit; fi
if [ -e exit_code ] && [ "$(cat exit_code)" != 75 ]; then
  answer ended "$(cat exit_code)" of "$(cat commit)"
  exit
fi
if ! echo "{self.sha256}  ../{self.archive}" | sha256sum --check --status 2>/dev/null; then
  answer empty
  exit
fi
rm -f exit_code
echo {self.commit} >commit
setsid nohup bash -c {shlex.quote(self.job())} >>log 2>&1 </dev/null &
echo $! >pid
answer started of {self.commit}"""

    def job(self) -> str:
        """Set up and run the job, and write down how it ended. Runs detached, in the job's directory."""
        environment = ""
        if self.environment is not None:
            environment = f"chmod 600 ../{self.environment} && set -a && . ../{self.environment} && set +a || end 2\n"
        return f"""\
commit={self.commit}
archive={self.archive}
extras={",".join(self.extras)}
trap : TERM INT
end() {{ echo "$1" >exit_code.new && mv exit_code.new exit_code; exit; }}
{_SETUP}
setup || {{ sleep 10; setup; }} || {{ sleep 60; setup; }} || end 76
{environment}cd code
../venv/bin/python -u -m launch.worker {shlex.join(self.arguments)}
code=$?
cd ..
end "$code\""""

    def follow(self, first_line: int | None) -> str:
        """Print the log from a line on (None: the last few) until the job ends."""
        shown = SHOWN_AT_FIRST_LINES
        first = f"$((lines > {shown} ? lines - {shown - 1} : 1))" if first_line is None else first_line
        return f"""\
cd {self._directory} || exit
lines=$(wc -l <log)
first={first}
echo "{_WORD} log from $first"
flock -n -s lock true && exec tail -n "+$first" log
tail -n "+$first" -F log &
flock -s lock true
kill $!"""

    def stop(self) -> str:
        """End the job if it runs, at once if it must be, and forget how it ended: the next look starts it anew."""
        return f"""\
mkdir -p {self._directory} && cd {self._directory} || exit
{_WHO}
exec 9>>lock
if ! flock -n 9; then
  kill -TERM -- "-$(cat pid)"
  flock -w 30 9 || {{ kill -KILL -- "-$(cat pid)"; flock -w 10 9; }}
fi
rm -f exit_code
[ ! -e log ] || mv log log.previous
answer stopped"""

    @property
    def _directory(self) -> str:
        return f'"$HOME/{self.name}"'


def answers(output: str) -> dict[int, Answer]:
    """By worker, what `attend` or `stop` has printed on all workers of a slice, among gcloud's own lines."""
    return {
        int(worker): Answer(words.split()[0], int(code) if code else None, commit)
        for worker, words, code, commit in _ANSWER.findall(output)
    }


def log_begins_at(line: str) -> int | None:
    """The number of the next line of the log, if that is what this line of `follow` says."""
    match = _LOG.match(line)
    return None if match is None else int(match[1])


def lines_of_log(output: str) -> list[str]:
    """The lines of the log in what `follow` has printed."""
    lines = output.splitlines()
    begins = [number for number, line in enumerate(lines, start=1) if log_begins_at(line) is not None]
    return lines[begins[0] :] if begins else []
