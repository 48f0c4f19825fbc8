"""Every single file of a committed checkpoint damaged in turn, on a disk and in three kinds of buckets.

Each time `--verify` names the file, and a restore falls back to the older checkpoint and sets the bad one aside. Most
of it happens in this process, on the real servers; some is told by whole processes.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from runner.checkpoint import inspect
from runner.checkpoint.arrays import ArrayWriter
from runner.checkpoint.manifest import read_committed
from runner.checkpoint.policy import SaveKind
from runner.checkpoint.restore import restore_newest
from runner.checkpoint.save import Checkpointer, SaveContents
from runner.errors import EXIT_DONE
from runner.spec import CheckpointConfig
from runner.storage import LocalStore, Store, open_store
from tests.support.attempt import make_attempt
from tests.support.cloud_job import (
    CloudAttempt,
    CloudJob,
    assert_same_outcome,
    check_output_lines,
    make_backend_params,
    make_unique_name,
    run_scenario,
)
from tests.support.job_process import make_uninterrupted_counter_run
from tests.support.memory_bucket import MemoryLog
from tests.support.object_stores import Backend, route_stores_to, start_backend
from tests.support.tiny_jobs import are_leaves_equal, make_full_mesh

OLDER, NEWEST = 5, 10
COUNTER_SPEC = "specs/counter.yaml"
COUNTER = ("config.total_steps=100", "config.step_seconds=0.03", "config.width=1000", "checkpoint.every_steps=5")
MIN_CASES = 36  # of the manifest, the blocks of one process, and their table


def flip_first_bit(content: bytes, chance: random.Random) -> bytes | None:
    return bytes([content[0] ^ 1]) + content[1:]


def flip_any_bit(content: bytes, chance: random.Random) -> bytes | None:
    position, bit = chance.randrange(len(content)), chance.randrange(8)
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def empty(content: bytes, chance: random.Random) -> bytes | None:
    """Truncate the file to nothing."""
    return b""


def truncate(content: bytes, chance: random.Random) -> bytes | None:
    """Truncate the end, at least one byte."""
    return content[: chance.randrange(len(content))]


def delete(content: bytes, chance: random.Random) -> bytes | None:
    """Delete the file."""
    return None


Damage = Callable[[bytes, random.Random], bytes | None]
DAMAGES: tuple[Damage, ...] = (flip_first_bit, *6 * [flip_any_bit], empty, *3 * [truncate], delete)  # at random places


def make_state(seed: int) -> dict[str, jax.Array]:
    """Return a state with a large leaf, sharded over four devices, and some small ones."""
    generator = np.random.default_rng(seed)
    mesh = make_full_mesh(2, 4, 1)
    cut, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    return {
        "kernel": jax.device_put(jnp.asarray(generator.normal(size=(16, 32)), jnp.float32), cut),
        "moment": jax.device_put(jnp.asarray(generator.normal(size=(16, 32)), jnp.bfloat16), whole),
        "count": jax.device_put(jnp.arange(8, dtype=jnp.uint32) + seed, whole),
        "scale": jax.device_put(jnp.asarray(generator.normal(size=5), jnp.float16), whole),
        "flags": jax.device_put(jnp.asarray(generator.integers(0, 2, 24), jnp.bool_), whole),
        "step": jax.device_put(jnp.int32(seed), whole),
    }


def abstract_state() -> dict[str, jax.ShapeDtypeStruct]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state(0))


def save_both(store: Store, staging: Path) -> None:
    """Commit the two steps."""
    attempt = make_attempt(store, MemoryLog())
    writer = ArrayWriter(store, attempt.hosts, staging)
    rule = CheckpointConfig(keep_last=99, max_unsaved_minutes=1.0)
    saver = Checkpointer(attempt, rule, 1, {}, abstract_state(), writer)
    for step in (OLDER, NEWEST):
        saver.save(make_state(step), step, SaveContents(), SaveKind.REQUIRED)
        assert saver.wait_until_finished()
    saver.close()


def check_case(store: Store, name: str, damage: Damage, content: bytes, chance: random.Random) -> None:
    """Damage one file of the newest checkpoint, and see that it is named, passed over and set aside."""
    damaged = damage(content, chance)
    if damaged is None:
        store.remove(f"checkpoints/{NEWEST}/{name}")
    else:
        assert damaged != content
        store.write(f"checkpoints/{NEWEST}/{name}", damaged)
    never_committed = name == "manifest.json" and damaged is None

    (older, newest, problem), code = inspect.format_report(store, inspect.VerifyDepth.FILES)
    assert older.split()[:2] == [str(OLDER), "good"]
    assert newest.split()[:2] == [str(NEWEST), "not" if never_committed else "DAMAGED"]
    assert name in problem
    assert (code == EXIT_DONE) == never_committed

    records = MemoryLog()
    attempt = make_attempt(store, records)
    found = restore_newest(attempt, None, abstract_state(), {}.__eq__)
    assert found is not None
    assert found.manifest.step == OLDER
    assert are_leaves_equal(found.state, make_state(OLDER))
    assert list(read_committed(store)) == [OLDER]
    quarantined = store.list_sizes(f"quarantine/{NEWEST}.{attempt.number}")
    events = [(row["event"], row["step"]) for row in records.rows]
    if never_committed:
        assert events == [("fallback", OLDER)]
        assert not quarantined
    else:
        assert events == [("quarantine", NEWEST), ("fallback", OLDER)]
        # The arrays stay where they are, as they are.
        kept = store.list_sizes(f"checkpoints/{NEWEST}") | quarantined
        assert kept.get(name) == (None if damaged is None else len(damaged))
        assert name in records.rows[0]["reason"] or name == "manifest.json"


def damage_every_file(store: Store, staging: Path) -> int:
    """Every file of the newest checkpoint, every damage, each alone; how many cases that were."""
    save_both(store, staging)
    before = read_all(store)
    prefix = f"checkpoints/{NEWEST}/"
    files = {name.removeprefix(prefix): content for name, content in before.items() if name.startswith(prefix)}
    cases = [(name, damage) for name in files if files[name] for damage in DAMAGES]
    chance = random.Random(0)
    with ThreadPoolExecutor(4) as pool:
        for name, damage in cases:
            try:
                check_case(store, name, damage, files[name], chance)
            except BaseException as error:
                error.add_note(f"{store.url}: {damage.__name__} of {name}")
                raise
            list(pool.map(lambda file: store.write(prefix + file, files[file]), files))
    assert read_all(store) == before
    return len(cases)


def read_all(store: Store) -> dict[str, bytes]:
    """Every file of every checkpoint."""
    return {f"checkpoints/{name}": store.read(f"checkpoints/{name}") for name in store.list_sizes("checkpoints")}


@pytest.mark.soak
@pytest.mark.parametrize("where", ["disk", "gs", "s3", "az"])
def test_verify_names_every_damaged_file_and_restore_falls_back(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "disk":
        assert damage_every_file(LocalStore(tmp_path / "run"), tmp_path) >= MIN_CASES
        return
    with start_backend(where) as backend:
        route_stores_to(monkeypatch, backend)
        store = open_store(backend.url(make_unique_name("damage")))
        assert damage_every_file(store, tmp_path / "staging") >= MIN_CASES


def has_committed_twice(job: CloudJob, attempt: CloudAttempt) -> bool:
    """Whether two checkpoints of this attempt are committed."""
    manifests = [manifest for manifest in job.manifests().values() if "void" not in manifest]
    return sum(manifest["attempt"] == attempt.number for manifest in manifests) >= 2


def damage_and_restart(backend: Backend) -> None:
    job = CloudJob(backend, make_unique_name("damaged"), COUNTER_SPEC, COUNTER)
    attempt = job.start()
    attempt.wait_for_server(lambda: has_committed_twice(job, attempt), "two commits")
    attempt.kill()
    chance = random.Random(1)
    for damage in (flip_any_bit, delete):
        older, newest = job.committed()[-2:]
        files = job.files(f"checkpoints/{newest}/arrays")
        name = max(files, key=lambda name: files[name])
        damaged = damage(job.read(name), chance)
        job.delete(name)
        if damaged is not None:
            job.write(name, damaged)
        code, output = job.verify()
        assert code == 1, output
        assert name.removeprefix(f"checkpoints/{newest}/") in output
        attempt = job.start()
        attempt.wait_for_server(lambda attempt=attempt: has_committed_twice(job, attempt), "two commits")
        attempt.kill()
        lines = check_output_lines(attempt)
        assert any(line.startswith(f"checkpoint {newest} (durable) not restored") for line in lines), attempt.output
        assert f"restored step {older} from the run's directory" in lines
        assert job.files(f"quarantine/{newest}.")
    job.finish()
    assert_same_outcome(job, make_uninterrupted_counter_run(COUNTER))


@pytest.mark.parametrize("name", make_backend_params(None))
def test_a_restart_on_damaged_checkpoints_has_equal_bits(name: str) -> None:
    make_uninterrupted_counter_run(COUNTER)
    run_scenario(name, damage_and_restart)
