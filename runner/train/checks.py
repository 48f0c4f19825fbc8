"""Checks of a training job against the hardware, the other hosts and earlier attempts. Called on every host.

A job that is sized for other hardware is refused, with options that make a small version of it run on the local
devices. All hosts must train on the same data, which must not change during the run. The micro-batch size of an earlier
attempt on the same hardware is reused, because another size would change the bits of the result. The loss of a job's
own `forward` must be a sum over targets.
"""

import inspect
import math
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from runner.accelerator import parse_accelerator
from runner.checkpoint.fork import find_continued_manifest
from runner.checkpoint.manifest import read_newest_manifest
from runner.config import TrainerConfig
from runner.console import warn
from runner.data import TRAIN, Dataset, adopt_records, default_cache_directory, is_available
from runner.distributed.agreement import Hosts, format_processes
from runner.errors import DataError, InvalidError, RetryableError
from runner.nvidia import explain_missing_gpus
from runner.parallel.mesh import AXES, count_batch_shards, is_mesh_possible
from runner.spec import ExecutionSpec, ForkConfig, Topology
from runner.spec.imports import format_install, is_extra_installed
from runner.storage import JsonObject, Store
from runner.train.layout import BatchLayout
from runner.train.setup import StepRecipe, TrainSetup
from runner.train.state import TrainState, get_variables

BEST_HOOK = "runner.hook:BestAtEnd"
_ROW_METRICS = ("train/", "perf/")
_VALIDATION_METRICS = ("loss", "accuracy", "perplexity", "bits_per_byte")
_LOSS_TOLERANCE = 1e-3  # relative; sums over other micro-batches are rounded differently
_MEAN = re.compile(r"\b(mean|average)\(|\breduction=")


def list_local_options(spec: ExecutionSpec, topology: Topology, config: TrainerConfig, num_devices: int) -> list[str]:
    """Return the `--set` options that make a trainer's spec run on `num_devices` local devices."""
    # Small enough for a laptop; the purpose is to run the same code.
    length = min(config.data.units_per_example, 128)
    total = f"total_tokens={100 * num_devices * length}" if config.train.total_tokens else "total_steps=100"
    data = config.data
    is_missing = not all(is_available(token_source.source) for token_source in data.sources)
    options = {
        "topology.accelerator=any": True,
        "topology.mesh={data: auto, fsdp: 1, tensor: 1}": not is_mesh_possible(topology.mesh, num_devices),
        f"directory={spec.directory}_here": True,
        "checkpoint.every_steps=10": True,
        f"config.train.global_batch_examples={num_devices}": True,
        f"config.train.{total}": True,
        "config.train.total_epochs=null": config.train.total_epochs is not None,
        f"config.data.sequence_length={length}": length != config.data.units_per_example,
        "config.memory.loss_chunk_positions=null": length % (config.memory.loss_chunk_positions or 1) != 0,
        "config.data.source=python-stdlib": is_missing and not data.mixture,
        "config.data.mixture=[]": is_missing and bool(data.mixture),
        "config.data.dtype=null": is_missing and data.dtype is not None,
        "config.data.options={}": is_missing and bool(data.options),
        "config.data.validation={}": not all(
            is_available(token_source.source) for token_source in data.validation.values()
        ),
        "config.schedule.warmup_steps=10": config.schedule.warmup_steps > 10,
        "config.eval.every_steps=50": config.eval.every_steps is not None,
        "config.precision.compute=float32": jax.default_backend() == "cpu",
    }
    return [shlex.quote(option) for option, is_needed in options.items() if is_needed]


def validate_hardware(spec: ExecutionSpec, topology: Topology, config: TrainerConfig, hosts: Hosts) -> None:
    """Raise `InvalidError` if the devices are not those that the job is sized for, or of several kinds."""
    kinds: dict[str, list[int]] = {}
    for device in jax.devices():
        kinds.setdefault(device.device_kind, []).append(device.process_index)
    if len(kinds) > 1:
        found = ", ".join(
            f"{len(processes)} x {kind} on {format_processes(sorted({*processes}))}"
            for kind, processes in sorted(kinds.items())
        )
        raise InvalidError(f"the devices of the job are of several kinds ({found}); give it devices of one kind")
    wanted = parse_accelerator(topology.accelerator)
    device, number = jax.devices()[0], jax.device_count()
    if wanted is not None and not wanted.matches(device.device_kind, _count_expected_devices(hosts)):
        missing = explain_missing_gpus() if device.platform == "cpu" and wanted.chip.processors is not None else None
        if missing is not None:
            raise InvalidError(f"sized for {topology.accelerator}, here: no GPU that JAX can use: {missing}")
        options = list_local_options(spec, topology, config, number)
        extra = "tpu" if wanted.chip.is_tpu else "cuda"
        # Without its plugin jax sees only the CPUs of a host that has accelerators.
        is_missing = device.platform == "cpu" and wanted.name != "cpu" and not is_extra_installed(extra)
        hint = f"on a host that has it, first run {format_install(extra)}; " if is_missing else ""
        raise InvalidError(
            f"sized for {topology.accelerator}, here: {number} x {device.device_kind}; {hint}"
            f"to run it here: {' '.join(f'--set {option}' for option in options)}"
        )
    if wanted is None and device.platform == "cpu" and (missing := explain_missing_gpus()) is not None:
        warn(f"trains on CPUs, and this host has an NVIDIA GPU: {missing}")


def validate_hosts(hosts: Hosts, fits: Callable[[int], bool]) -> None:
    """Raise `RetryableError` if an elastic job cannot run on the devices of the hosts that joined, but could on all."""
    num_devices = jax.device_count()
    if hosts.num_missing and not fits(num_devices) and fits(_count_expected_devices(hosts)):
        raise RetryableError(
            f"{hosts.num_processes} of {hosts.num_processes + hosts.num_missing} processes joined, and mesh and batch "
            f"do not divide over their {num_devices} devices; run the same command again when more have joined"
        )


def _count_expected_devices(hosts: Hosts) -> int:
    """Return the number of devices of the job, with those of missing processes; each process has the same number."""
    return jax.device_count() // hosts.num_processes * (hosts.num_processes + hosts.num_missing)


def find_unmeasured_saves(spec: ExecutionSpec, config: TrainerConfig[Any], total_steps: int) -> str | None:
    """Return a warning if `checkpoint.keep_best` could compare few of the steps that have its metric; else None.

    It compares only checkpoints of steps that have the metric. If the intervals of saves and evaluations are no
    multiples of each other, few steps or none are both. The last step is always saved and measured.
    """
    checkpoint, best = spec.checkpoint, spec.checkpoint.keep_best
    measured_steps = None if best is None else find_metric_interval(spec, config, best.metric)
    # The hook saves each best step, so nothing is missed.
    if best is None or measured_steps is None or any(entry.hook == BEST_HOOK for entry in spec.hook_entries):
        return None
    saves = [interval for interval in (checkpoint.every_steps, checkpoint.keep_every_steps) if interval is not None]
    num_saved = _count_multiples(saves, total_steps - 1)
    num_measured = _count_multiples([measured_steps], total_steps - 1)
    num_both = _count_multiples([math.lcm(save, measured_steps) for save in saves], total_steps - 1)
    if num_both >= min(max(num_saved, 1), num_measured):
        return None
    if not saves:
        hint = "saves by time or epochs rarely meet them"
    else:
        nearest = max(min(saves[0], total_steps - 1) // measured_steps, 1) * measured_steps
        every = " and ".join(map(str, saves))
        hint = f"saves are due every {every} steps: set checkpoint.every_steps: {nearest}"
    return (
        f"keep_best compares {best.metric}, which is measured every {measured_steps} steps, and {num_both} of these "
        f"{num_measured} steps before the end are saved by steps; {hint}, or add the hook {BEST_HOOK}, which saves "
        "each best step"
    )


def find_metric_interval(spec: ExecutionSpec, config: TrainerConfig[Any], metric: str) -> int | None:
    """Return the steps between two rows with a metric; None if it is none of the built-in ones, or never measured."""
    if metric.startswith(_ROW_METRICS):
        return spec.logging.every_steps
    for task in config.eval.multiple_choice:
        if metric.startswith(f"val/{task.name}/"):
            return task.every_steps or config.eval.every_steps
    is_built_in = metric.startswith("val/") and metric.endswith(_VALIDATION_METRICS)
    return config.eval.every_steps if is_built_in else None


def _count_multiples(intervals: Sequence[int], last_step: int) -> int:
    """Return the number of steps from 1 to `last_step` that are a multiple of one of two intervals."""
    counts = [last_step // interval for interval in intervals]
    return sum(counts) - (last_step // math.lcm(*intervals) if len(intervals) == 2 else 0)


def share_data(load: Callable[[], Dataset], is_in_bucket: bool, store: Store, hosts: Hosts) -> None:
    """Load the data on every host, and give all hosts what only process 0 reads of all token files.

    These are the range of the ids and, in a bucket, the layout of each file and the sample that identifies the data;
    there the other hosts load after process 0. Manifests of an earlier attempt on the same data record the vocabulary
    size, so that the files are not read again for the range.
    """
    if not is_in_bucket:
        load()  # on all hosts at the same time

    def find() -> JsonObject:
        dataset = load()
        manifest = read_newest_manifest(store) if dataset.needs_id_scan else None
        known = {} if manifest is None else manifest.identity
        is_same = known.get("config.data") == dataset.fingerprint
        recorded = known.get("config.model.vocabulary_size") if is_same else None
        ranges = dataset.find_id_ranges(recorded)
        return {"recorded": recorded, "ranges": ranges, "records": dataset.list_records()}

    found = hosts.run_on_main(find)
    if not hosts.is_main:
        adopt_records(default_cache_directory(), found["records"])
        load().set_id_ranges(found["recorded"], found["ranges"])


def validate_same_on_all_hosts(digest: str, name: str, hosts: Hosts, prefix: str = "") -> None:
    """Raise `DataError` on every host if the digest of one differs from that of process 0.

    `name` says what was digested. Hosts with different data would make different batches. Hosts with different
    evaluation questions would run different numbers of steps, and deadlock in a collective.
    """
    if different := _list_different_processes(digest, hosts):
        raise DataError(
            f"{prefix}{format_processes(different)} read other {name} than process 0; give every host the same files"
        )


def validate_same_program(digest: str, hosts: Hosts) -> None:
    """Raise `InvalidError` on every host if one of them has traced a different train step than process 0."""
    if different := _list_different_processes(digest, hosts):
        raise InvalidError(
            f"{format_processes(different)} traced another program of the step than process 0: their code, environment "
            "or arguments differ; give every host the same image and command"
        )


def _list_different_processes(digest: str, hosts: Hosts) -> list[int]:
    """Return the processes whose digest differs from that of process 0. Called on every host."""
    digests = hosts.gather(digest)
    return [process for process, other in enumerate(digests) if other != digests[0]]


def find_known_micro_batch(
    train_setup: TrainSetup, store: Store, hosts: Hosts, fork: ForkConfig | None = None, stage_start: int = 0
) -> int | None:
    """Return the micro-batch that an earlier attempt, or the parent, chose on the same hardware; None if none did.

    `stage_start` is the first step of the stage in question.

    Until this attempt has claimed the directory, an earlier one may still commit; only a call after that is final.
    """
    hardware = train_setup.describe_hardware(hosts.num_processes)
    ones = dict.fromkeys(AXES, 1)  # an older manifest may lack an axis that was added since
    manifest = find_continued_manifest(store, fork) if hosts.is_main else None
    record = hosts.agree(manifest and manifest.topology)
    if not record or hardware != {key: record.get(key) for key in hardware} | {"mesh": ones | record.get("mesh", {})}:
        return None
    return record.get("micro_batch_examples") if record.get("stage", 0) == stage_start else None


def validate_loss_is_sum(recipe: StepRecipe, setup: TrainSetup, state: TrainState, dataset: Dataset) -> None:
    """Raise `InvalidError` if `forward` of a recipe returns a mean. Called on every host, with the state of step 0.

    The step divides the loss of each micro-batch by the number of targets of the whole batch. A `forward` that has
    already divided, as in most other trainers, gives a loss and gradients that are too small by the targets of a
    micro-batch, and nothing fails. So the same examples are evaluated in one micro-batch and in two: a sum is the same
    in both, and a mean is twice as large in two.

    Returns at once if the class that defines `forward` states that it `returns_loss_sum`. Otherwise it compiles two
    small programs. The check is inconclusive, and passes, if the loss is 0 or not finite, or cannot be computed for one
    and two examples on each device.
    """
    owner = _find_owner(type(recipe), "forward")
    # A `val_step` of the job's own may do without `forward`.
    is_own_val_step = "returns_loss_sum" not in vars(_find_owner(type(recipe), "val_step"))
    if vars(owner).get("returns_loss_sum", False) or is_own_val_step:
        return
    shards = count_batch_shards(setup.mesh)
    abstract = setup.abstract_val_state
    weights = abstract.replace(params=state.params, variables=get_variables(state), step=np.int32(0))
    sums = []
    for num_examples in (2, 1):
        layout = BatchLayout(setup.mesh, 2 * shards, num_examples, dataset.fields)
        try:
            compiled = setup.compile_val(recipe.val_step, abstract, layout)
            loss_sum, *_ = compiled(weights, layout.batch(dataset, TRAIN, 0))
        except Exception:  # noqa: BLE001 - any error of the user's code, which may need other sizes
            return
        sums.append(float(loss_sum))
    whole, split = sums
    if whole and math.isfinite(split) and abs(split - 2 * whole) <= _LOSS_TOLERANCE * abs(split):
        raise InvalidError(
            f"{_locate_mean(owner)}: forward of {owner.__name__} returns a mean: for {2 * shards} examples in one "
            f"micro-batch {whole:.6g}, in two micro-batches {split:.6g}. Return the sum over the real targets instead, "
            "such as jnp.sum(...) in place of jnp.mean(...): the step divides by the targets of the whole batch. If it "
            "is a sum nevertheless, set returns_loss_sum = True in the class"
        )


def _find_owner(recipe_class: type, name: str) -> type:
    return next(each for each in recipe_class.__mro__ if name in vars(each))


def _locate_mean(owner: type) -> str:
    """Return file and line of the last mean in `forward` of a class, or else of its first line."""
    forward: Any = vars(owner)["forward"]
    function = getattr(forward, "__func__", forward)
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
    except (OSError, TypeError):  # defined in a prompt
        return f"{owner.__module__}:{owner.__qualname__}"
    number = next((index for index in reversed(range(len(lines))) if _MEAN.search(lines[index])), 0)
    return f"{file}:{first + number}"
