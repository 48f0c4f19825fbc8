"""Checks of a training job against the hardware, the other hosts and earlier attempts. Called on every host.

A job that is sized for other hardware is refused, with the options that make it run here, if slowly. All hosts must
train on the same data from the first step to the last. The micro-batch of an earlier attempt on the same hardware is
used again, because another one would change bits.
"""

import shlex

import jax

from runner.accelerator import parse_accelerator
from runner.checkpoint.manifest import read_newest_manifest
from runner.config import TrainerConfig
from runner.data import Dataset, is_available
from runner.distributed.agreement import Hosts
from runner.distributed.clock import SAVE
from runner.errors import DataError, InvalidError
from runner.parallel.mesh import AXES, is_mesh_possible
from runner.run.attempt import Attempt
from runner.spec import ExecutionSpec, Topology
from runner.storage import JsonObject, Store
from runner.train.setup import TrainSetup


def list_local_options(spec: ExecutionSpec, topology: Topology, config: TrainerConfig, num_devices: int) -> list[str]:
    """Return the `--set` options that make a trainer's spec run on `num_devices` local devices."""
    # Small enough for a laptop: what matters is that the same code runs.
    length = min(config.data.sequence_length, 128)
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
        f"config.data.sequence_length={length}": length != config.data.sequence_length,
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


def validate_hardware(spec: ExecutionSpec, topology: Topology, config: TrainerConfig) -> None:
    """Raise `InvalidError` if the local devices are not those that the job is sized for."""
    wanted = parse_accelerator(topology.accelerator)
    device, number = jax.devices()[0], jax.device_count()
    if wanted is not None and not wanted.matches(device.device_kind, number):
        options = list_local_options(spec, topology, config, number)
        raise InvalidError(
            f"sized for {topology.accelerator}, here: {number} x {device.device_kind}; "
            f"to run it here: {' '.join(f'--set {option}' for option in options)}"
        )


def share_ids(dataset: Dataset, store: Store, hosts: Hosts) -> None:
    """Share the ids in the token files with every host; only process 0 reads all files to find them.

    An earlier attempt on the same data has recorded them in its manifests: then files with many ids are not read again.
    """

    def find() -> JsonObject:
        manifest = read_newest_manifest(store) if dataset.needs_id_scan else None
        known = {} if manifest is None else manifest.identity
        is_same = known.get("config.data") == dataset.fingerprint
        believed = known.get("config.model.vocabulary_size") if is_same else None
        return {"believed": believed, "found": dataset.find_id_ranges(believed)}

    ids = hosts.run_on_main(find)
    if not hosts.is_main:
        dataset.set_id_ranges(ids["believed"], ids["found"])


def validate_same_on_all_hosts(digest: str, name: str, hosts: Hosts, prefix: str = "") -> None:
    """Raise `DataError` on every host if the digest of what one has read differs from that of process 0.

    Hosts with other data would make another batch, hosts with other questions another number of evaluation steps.
    """
    digests = hosts.gather(digest)
    different = [process for process, other in enumerate(digests) if other != digests[0]]
    if different:
        raise DataError(
            f"{prefix}processes {different} read other {name} than process 0; give every host the same files"
        )


def validate_data_unchanged(dataset: Dataset, attempt: Attempt) -> None:
    """Raise `DataError` if a token file has changed since the start. Called before a state is saved.

    Every host checks and learns what process 0 has found: where hosts share the files, all of them end with exit code
    2. A host that alone sees a change, in a copy of its own, ends alone; the others then lose a peer.
    """
    problem = None
    with attempt.progress.report_phase(SAVE):
        try:
            dataset.check()
        except DataError as error:
            problem = f"{error}; what was trained since the last commit is not saved"
        # Process 0 decides, so that hosts which share the files end the same way; an own problem ends this host too.
        problem = attempt.hosts.agree(problem) or problem
    if problem is not None:
        raise DataError(problem)


def find_known_micro_batch(train_setup: TrainSetup, store: Store, hosts: Hosts) -> int | None:
    """Return the micro-batch that an earlier attempt chose on the same hardware; None if there is none.

    Until this attempt has claimed the directory, an earlier one may still commit; only a call after that is final.
    """
    hardware = train_setup.describe_hardware(hosts.num_processes)
    ones = dict.fromkeys(AXES, 1)  # a manifest may be older than a mesh axis
    manifest = read_newest_manifest(store) if hosts.is_main else None
    record = hosts.agree(manifest and manifest.topology)
    if not record or hardware != {key: record.get(key) for key in hardware} | {"mesh": ones | record.get("mesh", {})}:
        return None
    return record.get("micro_batch_examples")
