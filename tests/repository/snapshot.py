"""Snapshots of the shipped specs (identity, train state, programs) and of what short runs of each job class write.

    python -m tests.repository.snapshot            writes all snapshots to `tests/golden/snapshots`
    python -m tests.repository.snapshot NAME ...   writes some, such as `specs/gpt_nano` or `short_runs/gpt`

A change of the code that is meant to change nothing leaves every snapshot equal, which `test_snapshot.py` tests:

- specs/NAME: trajectory and resolved spec of a shipped spec; dtype, shape and sharding of each leaf of the state on
  its topology; digests of the StableHLO of its train and validation step, lowered with libtpu and not compiled.
- short_runs/NAME: rows, result, events, manifests, file names and resolved spec of a run of 20 steps, without times,
  ids and facts of the host. Events are sorted by attempt, step and name, because commits have a thread of their own.

Each file records the versions and the CPU with which it was made. Digests of programs are compared if the versions are
the same. Fingerprints, digests of leaves, and floats of rows, results, events and manifests are compared if model and
number of CPUs are the same too, because XLA generates code for the CPUs at hand. Everything else is always compared.
"""

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from runner import BaseTrainer, RestoreableJob
from runner.accelerator import parse_accelerator
from runner.checkpoint.leaves import flatten_with_names, is_on_host
from runner.plan.checks import Findings, open_job
from runner.plan.program import open_machine
from runner.process import count_cpus, make_environment
from runner.spec import compute_trajectory, dump_spec, load_document, load_job_class, validate_spec
from runner.train.compile import compute_program_digest
from runner.train.layout import make_val_layout
from runner.train.weights import get_model_state
from tests.support.job_process import ROOT, WHOLE_RUN_DEADLINE_SECONDS, drop_speed_metrics, read_lines
from tests.support.libtpu import lock_libtpu
from tests.support.simulated_devices import FAST_COMPILATION
from tests.support.tiny_jobs import TEXT, stop_after

SNAPSHOTS = ROOT / "tests" / "golden" / "snapshots"
SPECS = {path.stem: path for path in sorted((ROOT / "specs").glob("*.yaml"))}
DEFAULT_ACCELERATOR = "v5e-4"  # for specs of any accelerator; simulated CPUs have none of the kernels
SOAK_SPECS = {
    "clip_nano",
    "distill_nano",
    "gpt_small",
}  # specs for any accelerator that are not compared daily; nor are those for one
_WIDTH = 120
_DISTRIBUTIONS = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy")
# Lines of /proc/cpuinfo on which the choice of instructions and of block sizes depends.
_CPU_LINES = re.compile(r"^(?:vendor_id|cpu family|model|model name|cache size|flags|Features)\s*:.*$", re.MULTILINE)
_NUM_THREADS = "2"  # XLA splits sums by the number of its threads

_TEXT = "text.txt"
_POISONED_TEXT = "poisoned.txt"  # has the byte at which the loss of `PoisonedLookup` is not finite
_SHORT = (
    "config.train={total_steps: 20, global_batch_examples: 8}",
    "config.schedule.warmup_steps=4",
    "config.eval={every_steps: 10, batches: 1}",
    "checkpoint.every_steps=10",
    "logging.every_steps=5",
)
_SHORT_TEXT = (*_SHORT, f"config.data.source={_TEXT}", "config.data.sequence_length=16")
_GPT = (*_SHORT_TEXT, "config.model={layers: 1, heads: 2, width: 16}")
# A lookup table with all keys of a GPT, which compiles in a fifth of the time.
_LOOKUP = (*_GPT, "job=tests.test_values:TrainLookup")
_FEATURES = (
    "config.train.micro_batch_examples=4",
    "config.train.replay_every_steps=6",
    "config.ema={decays: [0.9], evaluate: true}",
    "config.noise_scale={}",
    "config.stability.skip_update.grad_norm_above={sigmas: 1000, over_steps: 4}",
    "config.stability.roll_back={loss_above_sigmas: 1000, over_steps: 4, skip_examples: 8}",
    "config.metrics.norms=groups",
    "config.optimizer.groups=[{pattern: '*bias', rate: 2}]",
    "config.stages=[{from_step: 12, set: {optimizer.learning_rate: 1.0e-3}, why: anneal}]",
    "checkpoint.keep_best={metric: val/loss, mode: min}",
    "checkpoint.keep_every_steps=10",
    "checkpoint.keep_last=1",
    "hooks=[{hook: 'runner.hook:EarlyStopping', config: {patience: 9}}, {hook: 'runner.hook:BestAtEnd'}]",
)


@dataclass(frozen=True)
class ShortRun:
    """Run of a shipped spec with overrides, in a directory of its name. It may begin with another run of its group.

    Attributes:
        spec: name of the spec.
        overrides: overrides, whose paths are relative.
        stop_at: step at which the run is preempted, and resumes; None for no preemption.
    """

    spec: str
    overrides: tuple[str, ...]
    stop_at: int | None = None


# In the order in which they run.
DAILY_RUNS = {
    "counter": ShortRun("counter", ("config={total_steps: 20, width: 64}", "checkpoint.every_steps=10"), stop_at=7),
    "tokenise": ShortRun(
        "tokenise_stdlib",
        (f"config.source={_TEXT}", "config.tokenizer.vocabulary_size=300", "checkpoint.every_steps=500"),
    ),
    "gpt": ShortRun("gpt_nano", _GPT),
    "arrays": ShortRun(
        "gpt_nano",
        (
            *_SHORT,
            "job=tests.support.arrays:CountBright",
            "config.data={source: 'tests.support.arrays:Images'}",
            "config.model={}",
        ),
    ),
    "lookup": ShortRun("gpt_nano", _LOOKUP),
    "fork": ShortRun(
        "gpt_nano",
        (
            *_LOOKUP,
            "checkpoint.fork_from={run: lookup, step: 10, changes: [config.optimizer.learning_rate]}",
            "config.optimizer.learning_rate=1.0e-3",
        ),
    ),
    "adapter": ShortRun(
        "gpt_nano", (*_LOOKUP, "checkpoint.init_from=lookup", "config.adapter={rank: 2, targets: ['Embed_*']}")
    ),
    "same_bits": ShortRun(
        "gpt_nano", (*_LOOKUP, "config.train.micro_batch_examples=4", "config.train.same_bits_devices=2")
    ),
    "features": ShortRun("gpt_nano", (*_LOOKUP, *_FEATURES), stop_at=15),
    "roll_back": ShortRun(
        "gpt_nano",
        (
            *_GPT,
            "job=tests.train.test_stability:PoisonedLookup",
            f"config.data.source={_POISONED_TEXT}",
            "config.stability={non_finite: roll_back, roll_back: {skip_examples: 8, over_steps: 4}}",
            "checkpoint.every_steps=2",
        ),
    ),
}
SOAK_RUNS = {
    "llama": ShortRun("llama_nano", (*_SHORT_TEXT, "config.model={layers: 1, heads: 2, width: 16, mlp_width: 16}")),
    "gpt_features": ShortRun("gpt_nano", (*_GPT, *_FEATURES), stop_at=15),
    "moe": ShortRun(
        "moe_nano",
        (
            *_SHORT_TEXT,
            "config.model={layers: 2, heads: 2, width: 16, mlp_width: 16}",
            "config.model.moe={experts: 4, experts_per_token: 2, expert_width: 8, dense_layers: 1}",
        ),
    ),
    "clip": ShortRun("clip_nano", (*_SHORT, "config.model.image.layers=1")),
    "mae": ShortRun("mae_nano", (*_SHORT, "config.model.layers=1")),
    "vit": ShortRun("vit_nano", (*_SHORT, "config.model.layers=1")),
}
DAILY_SPECS = "daily specs"
RUNS = {"daily runs": DAILY_RUNS, "soak runs": SOAK_RUNS}
DAILY_GROUPS = (DAILY_SPECS, "daily runs")
# Keys of events and manifests that differ between two runs or two machines, or follow from others.
_VARIABLE_KEYS = {
    *(
        "time",
        "began",
        "submitted",
        "seconds",
        "blocked_seconds",
        "seconds_to_durable",
        "clock",
        "compiled",
        "from_cache",
    ),
    *("versions", "hosts", "nodes", "machines", "cpus", "options", "commit", "dirty", "environment"),
    *("known", "files", "config.source.files"),
}
# Keys whose values are compared with the same versions, and those that need the same CPU too.
_PROGRAM_KEYS = {"programs", "program"}
_BIT_KEYS = {"fingerprint", "digest"}
# Events that depend on how long something takes.
_VARIABLE_EVENTS = {"progress", "cadence", "slow_hook", "straggler", "grace"}


# Groups of snapshots. Each is made by a process of its own, which can open one machine only.


def get_group(spec: str) -> str:
    """Return the group of a shipped spec: its accelerator, or that of all quick specs for any accelerator."""
    topology = load_document(SPECS[spec]).data.get("topology") or {}
    accelerator = parse_accelerator(topology.get("accelerator", "any"))
    if accelerator is not None:
        return str(accelerator)
    return DEFAULT_ACCELERATOR if spec in SOAK_SPECS else DAILY_SPECS


def list_groups() -> dict[str, list[str]]:
    """Return the names of the snapshots of each group."""
    groups = {group: [f"short_runs/{name}" for name in runs] for group, runs in RUNS.items()}
    for spec in SPECS:
        groups.setdefault(get_group(spec), []).append(f"specs/{spec}")
    return groups


def make_group(group: str) -> dict[str, Any]:
    """Return the snapshots of a group by name, made by another process."""
    # Neither the number of CPUs nor the variables of this process may change bits.
    given = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "LIBTPU_"))}
    variables = make_environment(1, given | {"XLA_FLAGS": FAST_COMPILATION}) | {"NPROC": _NUM_THREADS}
    words = [sys.executable, "-m", "tests.repository.snapshot", "--group", group]
    with contextlib.nullcontext() if group in RUNS else lock_libtpu():
        done = subprocess.run(
            words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=WHOLE_RUN_DEADLINE_SECONDS
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def make_group_here(group: str) -> dict[str, Any]:
    """Return the snapshots of a group by name, made by this process, which can make no other group."""
    if group in RUNS:
        found = run_all(RUNS[group])
    else:
        machine = open_machine(parse_accelerator(DEFAULT_ACCELERATOR if group == DAILY_SPECS else group))
        found = {name: describe_spec(Path(name).name, machine.devices) for name in list_groups()[group]}
    return {name: {"made_with": describe_maker()} | contents for name, contents in found.items()}


def describe_maker() -> dict[str, Any]:
    """Return the versions of libraries, and a digest of model and number of the CPUs."""
    cpu_info = Path("/proc/cpuinfo")
    lines = sorted(set(_CPU_LINES.findall(cpu_info.read_text()))) if cpu_info.exists() else []
    # XLA splits the code of a program, and so its bits, by the number of CPUs, whatever the number of its threads is.
    cpu = "\n".join([platform.machine(), platform.processor(), str(count_cpus()), *lines])
    versions = {name: metadata.version(name) for name in _DISTRIBUTIONS}
    return {"versions": versions, "cpu": hashlib.sha256(cpu.encode()).hexdigest()[:16]}


# Shipped specs.


def open_shipped_job(spec: str) -> RestoreableJob:
    findings = Findings()
    job = open_job(load_document(SPECS[spec]), findings)
    assert job is not None, findings.problems
    return job


def describe_identity(job: RestoreableJob) -> dict[str, Any]:
    """Return the trajectory of a job as JSON values."""
    return json.loads(json.dumps(compute_trajectory(job.spec, job.config)))


def describe_spec(spec: str, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Return the snapshot of a shipped spec, lowered for devices that need not be present."""
    job = open_shipped_job(spec)
    identity = {"identity": describe_identity(job)}
    if not isinstance(job, BaseTrainer):
        # The default output of a corpus is an absolute path.
        return identity | {"spec": dump_spec(job.resolved_spec()).replace(str(ROOT), "ROOT").splitlines()}
    builder = job.setup_builder
    train_setup = builder.build_on_mesh(builder.make_mesh(devices), jax.random.key(job.spec.seed))
    layout = builder.list_layouts(train_setup)[0]
    weights = get_model_state(train_setup.abstract_state).replace(opt_state=(), riders={})
    val_layout = make_val_layout(builder.config, layout)
    return identity | {
        "leaves": {name: describe_leaf(leaf) for name, leaf in flatten_with_names(train_setup.abstract_state).items()},
        "programs": {
            "train": compute_program_digest(train_setup.lower_train(builder.train_step, layout)),
            "validation": compute_program_digest(train_setup.lower_val(builder.recipe.val_step, weights, val_layout)),
        },
        "spec": dump_spec(builder.resolve_spec(job.spec, train_setup, layout)).splitlines(),
    }


def describe_leaf(leaf: Any) -> list[Any]:
    """Return dtype, shape and mesh axes by dimension of an abstract array with a sharding."""
    axes = [axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis for axis in leaf.sharding.spec]
    axes += [None] * (leaf.ndim - len(axes))
    return [leaf.dtype.name, list(leaf.shape), axes, *(["on host"] if is_on_host(leaf) else [])]


# Short runs.


def run_all(runs: Mapping[str, ShortRun]) -> dict[str, Any]:
    """Return the snapshots of short runs, made in this order in one folder."""
    lines = TEXT.splitlines(keepends=True)
    # Relative paths, so that the place of the folder is in no spec and in no digest of one.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path(_TEXT).write_text(TEXT)
        Path(_POISONED_TEXT).write_text("".join([*lines[:17], "ÿ\n", *lines[17:140]]))
        text = json.dumps({f"short_runs/{name}": run_short(name, run) for name, run in runs.items()})
        # Some paths become absolute, and the id of a run is drawn at random.
        words = {os.getcwd(): "FOLDER"} | {json.loads(Path(name, "job.json").read_text())["id"]: name for name in runs}
        for word, replacement in words.items():
            text = text.replace(word, replacement)
        return json.loads(text)


def run_short(name: str, run: ShortRun) -> dict[str, Any]:
    """Return the snapshot of a short run in the directory `name`."""
    document = load_document(SPECS[run.spec], [f"directory={name}", *run.overrides])

    def make_job() -> RestoreableJob:
        return load_job_class(document, RestoreableJob)(validate_spec(document), document)

    if run.stop_at is not None:
        stop_after(make_job(), run.stop_at)
    job, directory = make_job(), Path(name)
    job()
    paths = sorted(directory.glob("checkpoints/*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    manifests = {path.parent.name: drop_variable_keys(json.loads(path.read_text())) for path in paths}
    for manifest in manifests.values():
        del manifest["digest"]  # of all keys, the time included
        manifest.get("topology", {}).get("program", {}).pop("facts", None)  # those of the event `compile`
        if manifest is not manifests[paths[-1].parent.name]:
            # The fingerprint stands for them, and one manifest shows their form.
            del manifest["leaves"], manifest["identity"]
    return {
        "result": json.loads((directory / "result.json").read_text()),
        "rows": drop_speed_metrics(read_lines(directory / "metrics.jsonl")),
        "events": list_events(directory),
        "manifests": manifests,
        "files": sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()),
        "spec": dump_spec(job.resolved_spec()).splitlines(),
    }


def list_events(directory: Path) -> list[Any]:
    """Return the events that do not depend on time, by attempt, step and name."""
    events = [event for event in read_lines(directory / "events.jsonl") if event["event"] not in _VARIABLE_EVENTS]
    events.sort(key=lambda event: (event["attempt"], -1 if event["step"] is None else event["step"], event["event"]))
    return [drop_variable_keys(event) for event in events]


def drop_variable_keys(value: Any) -> Any:
    """Return a JSON value without the keys that differ between two runs or two machines."""
    if isinstance(value, list):
        return [drop_variable_keys(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {key: each for key, each in value.items() if key not in _VARIABLE_KEYS}
    return {key: drop_variable_keys(each) for key, each in kept.items()}


# Golden files.


def get_path(name: str) -> Path:
    """Return the golden file of a snapshot."""
    return SNAPSHOTS / f"{name}.json"


def find_differences(name: str, found: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Return the lines that differ between a snapshot and its golden file, as far as they can be compared."""
    made, now = kept["made_with"], found["made_with"]
    has_programs = made["versions"] == now["versions"]
    has_bits = has_programs and made["cpu"] == now["cpu"]
    texts = [
        format_snapshot(hide(snapshot | {"made_with": None}, has_programs, has_bits)).splitlines()
        for snapshot in (kept, found)
    ]
    return list(difflib.unified_diff(*texts, f"golden {name}", "now", lineterm="", n=0))


def hide(value: Any, has_programs: bool, has_bits: bool) -> Any:
    """Return a snapshot without what cannot be compared."""
    if isinstance(value, list):
        return [hide(each, has_programs, has_bits) for each in value]
    if isinstance(value, float) and not has_bits:
        return "float"
    if not isinstance(value, dict):
        return value
    hidden = (set() if has_programs else _PROGRAM_KEYS) | (set() if has_bits else _BIT_KEYS)
    return {
        key: "hidden" if key in hidden else each if key == "identity" else hide(each, has_programs, has_bits)
        for key, each in value.items()
    }


def format_snapshot(value: Any, indent: str = "", head: str = "") -> str:
    """Return JSON in which a list or mapping that fits is one line, so that few lines change with a value."""
    line = f"{indent}{head}{json.dumps(value)}"
    if len(line) < _WIDTH or not isinstance(value, dict | list) or not value:
        return line
    heads = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    inner = value.values() if isinstance(value, dict) else value
    lines = [format_snapshot(each, f"{indent} ", head) for head, each in zip(heads, inner, strict=True)]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([f"{indent}{head}{first}", ",\n".join(lines), f"{indent}{last}"])


def write_snapshots(names: Sequence[str]) -> None:
    """Write the golden files of some snapshots, or of all, and delete those of specs and runs that no longer exist."""
    groups = list_groups()
    known = {name for members in groups.values() for name in members}
    if unknown := sorted({*names} - known):
        raise SystemExit(f"no snapshot is called {', '.join(unknown)}; choose from {', '.join(sorted(known))}")
    for group, members in groups.items():
        if names and not {*names} & {*members}:
            continue
        for name, snapshot in make_group(group).items():
            if not names or name in names:
                get_path(name).parent.mkdir(parents=True, exist_ok=True)
                get_path(name).write_text(format_snapshot(snapshot) + "\n")
                print(get_path(name).relative_to(ROOT))
    for path in SNAPSHOTS.glob("*/*.json"):
        if str(path.relative_to(SNAPSHOTS).with_suffix("")) not in known:
            path.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write snapshots.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--group", help="print the snapshots of a group as JSON instead")
    arguments = parser.parse_args()
    if arguments.group is None:
        write_snapshots(arguments.names)
    else:
        print(json.dumps(make_group_here(arguments.group)))
