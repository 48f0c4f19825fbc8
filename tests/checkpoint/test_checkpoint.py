"""Checkpoint protocol: a checkpoint is committed or absent, verified in three layers, and restored on any mesh.

Every test runs on disk with Orbax and in a bucket with block files.
"""

import gc
import json
import shutil
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from runner.checkpoint import arrays, restore
from runner.checkpoint.arrays import ArrayWriter
from runner.checkpoint.fast_tier import FastTier
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.checkpoint.manifest import read_committed
from runner.checkpoint.parts import PartDirectory
from runner.checkpoint.policy import Retention, SaveKind, delete_step, read_step_metric
from runner.checkpoint.restore import load_checkpoint, load_weights, restore_newest
from runner.checkpoint.save import Checkpointer, DoubleBuffer, SaveContents
from runner.errors import FencedError, ResumeError
from runner.spec import CheckpointConfig, hash_record
from runner.storage import LocalStore, compute_crc32c, read_log
from tests.support.attempt import make_attempt
from tests.support.job_process import DEADLINE_SECONDS
from tests.support.memory_bucket import make_memory_bucket
from tests.support.tiny_jobs import FACTORISATIONS, are_leaves_equal, make_full_mesh

AXES = ("data", "fsdp", "tensor")


def make_state(seed=0):
    generator = np.random.default_rng(seed)
    return {
        "step": jnp.int32(seed),
        "params": {"kernel": jnp.asarray(generator.normal(size=(16, 64)), jnp.float32)},
        "moments": [jnp.asarray(generator.normal(size=(16, 64)), jnp.bfloat16), jnp.arange(8, dtype=jnp.uint32)],
        "flags": jnp.asarray(generator.integers(0, 2, 24), jnp.bool_),
    }


def make_abstract(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state)


class Attempt:
    """An attempt of a run directory, with helpers to save, restore and damage checkpoints."""

    def __init__(self, store, staging):
        self.store, self.staging = store, staging
        self.attempt = make_attempt(store)
        self.fence = self.attempt.fence
        hosts = self.attempt.hosts
        self.writer = ArrayWriter(store, hosts, staging)
        self.saver, self.structure = self.make_saver(make_state()), jax.tree.structure(make_state())

    def make_saver(self, like, **rule):
        """Return the checkpointer of a job whose states have the structure of `like`, with retention disabled."""
        rule = CheckpointConfig(keep_last=99, max_unsaved_minutes=1.0, **rule)
        return Checkpointer(self.attempt, rule, 1, {}, make_abstract(like), self.writer)

    def again(self):
        """Start the next attempt."""
        return Attempt(self.store, self.staging)

    def save(self, name, state, before_commit=lambda: None):
        if jax.tree.structure(state) != self.structure:
            self.saver, self.structure = self.make_saver(state), jax.tree.structure(state)
        step = int(name) if name.isdecimal() else 0
        return self.saver.save(state, step, SaveContents(flush=before_commit), SaveKind.REQUIRED, name)

    def save_all(self, *steps):
        for step in steps:
            self.save(str(step), make_state(step))
            assert self.saver.wait_until_finished()

    def steps(self):
        return sorted(read_committed(self.store))

    def restore(self, like=None):
        return restore_newest(
            self.attempt,
            None,
            make_abstract(make_state()) if like is None else like,
            lambda identity, step: identity == {},
        )

    def load(self, name, like):
        return load_checkpoint(self.attempt, name, like)

    def events(self, kind):
        self.attempt.background_writer.flush()
        return [event for event in read_log(self.store, "events") if event["event"] == kind]

    # Stored files and damage to them.

    def files(self, prefix=""):
        return self.store.list_sizes(prefix)

    def content(self):
        return {name: self.store.read(name) for name in self.files()}

    def largest_file(self, step):
        sizes = self.files(f"checkpoints/{step}")
        return f"checkpoints/{step}/{max(sizes, key=lambda name: sizes[name])}"

    def flip_bit(self, name):
        content = bytearray(self.store.read(name))
        content[len(content) // 2] ^= 1
        self.store.write(name, bytes(content))

    def manifest(self, name):
        return json.loads(self.store.read(f"checkpoints/{name}/manifest.json"))

    def write_manifest(self, name, manifest):
        self.store.write(f"checkpoints/{name}/manifest.json", json.dumps(manifest).encode())


@pytest.fixture(params=["disk", "bucket"])
def first(request, tmp_path):
    store = LocalStore(tmp_path / "run") if request.param == "disk" else make_memory_bucket()
    return Attempt(store, tmp_path / "staging")


def test_an_empty_directory_has_nothing_to_restore(first):
    assert first.steps() == []
    assert first.restore() is None


def test_a_metric_measured_while_its_step_is_saved_is_kept(first):
    is_measuring = threading.Event()
    first.save("4", make_state(4), before_commit=is_measuring.wait)
    threading.Timer(0.2, is_measuring.set).start()
    first.saver.add_metric(4, 0.5, is_end=False)
    assert first.saver.wait_until_finished()
    assert read_step_metric(first.store, read_committed(first.store)[4]).at_end == 0.5


@pytest.mark.parametrize(("details", "is_refused"), [({"tier": "fast"}, False), ({}, True)])
def test_losing_all_durable_checkpoints_is_an_error(first, details, is_refused):
    first.attempt.events.append("commit", 3, seconds_to_durable=0.1, **details)
    first.attempt.background_writer.flush()
    if is_refused:
        with pytest.raises(ResumeError, match="none can be restored"):
            first.restore()
    else:
        assert first.restore() is None


def test_a_restored_state_is_bit_identical(first):
    first.save_all(50)
    found = first.restore()
    state, manifest = found.state, found.manifest
    assert are_leaves_equal(state, make_state(50))
    assert manifest.step == 50
    assert manifest.fingerprint == compute_fingerprint(state) == compute_fingerprint(make_state(50))
    (commit,) = first.events("commit")
    assert commit["fingerprint"] == manifest.fingerprint
    assert commit["step"] == 50


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 4, 2), (2, 2, 2)])
def test_a_state_is_restored_in_any_sharding(first, sizes):
    mesh = make_full_mesh(*sizes)
    state = {"w": make_state()["params"]["kernel"], "m": make_state()["moments"][0]}
    sharded = jax.device_put(state, NamedSharding(mesh, PartitionSpec(AXES)))
    first.save("1", sharded)
    assert first.saver.wait_until_finished()
    targets = [
        *(
            NamedSharding(make_full_mesh(*other), PartitionSpec("fsdp", ("data", "tensor")))
            for other in FACTORISATIONS[::3]
        ),
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ]
    for target in targets:
        restored = first.restore(make_abstract(state, target)).state
        assert are_leaves_equal(restored, state)
        assert all(leaf.sharding == target for leaf in jax.tree.leaves(restored))


def test_donating_the_state_after_save_does_not_change_the_checkpoint(first):
    """Donate the state right after `save` returns, as training does, while Orbax still writes."""
    mesh = make_full_mesh(1, 8, 1)
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x * 3 + 1, tree), donate_argnums=0)
    state = {"w": jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32).reshape(1024, 1024), place)}
    for step in range(1, 4):
        expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
        state = first.save(str(step), state)
        for _ in range(5):
            state = advance(state)
        assert first.saver.wait_until_finished()
        restored = first.load(str(step), make_abstract(state)).state
        assert are_leaves_equal(restored, expected)


def test_retention_deletes_the_manifest_first(first, monkeypatch):
    """A kill between the two deletions leaves no directory that looks complete."""
    first.save_all(1, 2)

    def killed(prefix):
        raise KeyboardInterrupt

    monkeypatch.setattr(first.store, "remove_tree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete_step(first.attempt, 1)
    assert first.files("checkpoints/1")
    assert first.steps() == [2]


def test_a_deleted_step_leaves_nothing(first):
    first.save_all(1, 2)
    delete_step(first.attempt, 1)
    assert first.store.list_names("checkpoints") == ["2"]


def test_a_partly_deleted_directory_is_no_checkpoint_and_is_removed(first):
    first.save_all(1, 2)
    first.store.remove("checkpoints/2/manifest.json")
    first.store.write("checkpoints/3/arrays.1/x", b"x")
    again = first.again()
    assert again.restore().manifest.step == 1
    assert again.steps() == [1]
    left = {name for step in (2, 3) for name in again.files(f"checkpoints/{step}")}
    assert left <= {"manifest.json"}
    again.save_all(2, 3)
    assert again.steps() == [1, 2, 3]


def test_a_step_retired_by_a_newer_attempt_cannot_be_committed(first):
    """The zombie is stopped after its last fence check, right before it creates the manifest."""
    first.save_all(1)
    newer = []

    def overtaken():
        first.fence.check = lambda: None
        newer.append(first.again())
        newer[0].restore()

    first.save("2", make_state(2), before_commit=overtaken)
    assert not first.saver.wait_until_finished()
    assert newer[0].steps() == [1]
    newer[0].save_all(2)
    assert are_leaves_equal(newer[0].again().restore().state, make_state(2))


def test_a_checkpoint_that_a_zombie_committed_first_is_valid(first):
    first.save_all(1)
    newer = first.again()
    first.fence.check = first.fence.check_locally = lambda: None
    first.save_all(2)
    assert newer.restore().manifest.step == 2


def damage_bits(attempt):
    attempt.flip_bit(attempt.largest_file(2))


def damage_length(attempt):
    name = attempt.largest_file(2)
    attempt.store.write(name, attempt.store.read(name)[:-1])


def damage_missing(attempt):
    attempt.store.remove(attempt.largest_file(2))


def damage_manifest(attempt):
    attempt.write_manifest(2, attempt.manifest(2) | {"step": 1})


def damage_torn(attempt):
    attempt.store.write("checkpoints/2/manifest.json", b'{"step": ')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_bits, "CRC-32C"),
        (damage_length, "bytes, the manifest says"),
        (damage_missing, "is missing"),
        (damage_manifest, "manifest.json"),
        (damage_torn, ""),
    ],
)
def test_a_damaged_checkpoint_is_quarantined_and_the_older_one_restored(first, damage, reason):
    first.save_all(1, 2)
    damage(first)
    again = first.again()
    found = again.restore()
    assert found.manifest.step == 1
    assert are_leaves_equal(found.state, make_state(1))
    (quarantine,) = again.events("quarantine")
    (fallback,) = again.events("fallback")
    assert reason in quarantine["reason"]
    assert (fallback["rejected"], fallback["step"]) == (2, 1)
    assert again.store.list_names("quarantine") == ["2.2"]
    if again.store.root is None:
        # The arrays have stayed, and an object says so.
        assert "arrays.1" in again.store.list_names("quarantine/2.2")
        assert again.store.read("quarantine/2.2/arrays.1").decode().endswith("/checkpoints/2/arrays.1")
        assert {name.partition("/")[0] for name in again.files("checkpoints/2")} == {"arrays.1", "manifest.json"}
    else:
        assert not again.files("checkpoints/2")
    assert again.steps() == [1]


def read_arrays(attempt, name):
    return {file: attempt.store.read(f"{name}/{file}") for file in attempt.files(name)}


def test_arrays_in_quarantine_outlive_later_checkpoints_of_their_step_until_they_are_released(tmp_path):
    first = Attempt(make_memory_bucket(), tmp_path)
    first.save_all(1, 2)
    kept = read_arrays(first, "checkpoints/2/arrays.1")
    damage_torn(first)
    second = first.again()
    assert second.restore().manifest.step == 1
    second.save_all(2)
    assert second.files("checkpoints/2/arrays.2")
    delete_step(second.attempt, 2)
    assert not second.files("checkpoints/2/arrays.2")
    assert read_arrays(second, "checkpoints/2/arrays.1") == kept
    second.store.remove("quarantine/2.2/arrays.1")
    third = second.again()
    assert third.restore().manifest.step == 1
    assert not third.files("checkpoints/2/arrays.1")


def test_a_step_that_is_saved_again_after_a_load_leaves_its_arrays_in_quarantine_alone(tmp_path):
    first = Attempt(make_memory_bucket(), tmp_path)
    first.save_all(1, 2)
    first.saver.begin(make_state(2), 2)
    kept = read_arrays(first, "checkpoints/2/arrays.1")
    first.saver.go_back(first.load("1", make_abstract(make_state())))
    assert first.steps() == [1]
    first.save_all(2)
    assert first.manifest(2)["arrays"] == "arrays.1.1"
    assert read_arrays(first, "checkpoints/2/arrays.1") == kept
    assert first.again().restore().manifest.step == 2


def test_damage_before_the_checksum_is_found_by_the_fingerprint(first):
    """Files and checksums agree, but the arrays are not those that were saved."""
    first.save_all(1, 2)
    digest = first.manifest(1)["leaves"]["params.kernel"]["digest"]
    foreign = first.manifest(2)
    assert digest != foreign["leaves"]["params.kernel"]["digest"]
    foreign["leaves"]["params.kernel"]["digest"] = digest
    foreign.pop("digest")
    first.write_manifest(2, foreign | {"digest": hash_record(foreign)})
    with pytest.raises(ResumeError, match=r"the bits of params\.kernel are not those that were saved"):
        first.load("2", make_abstract(make_state()))


def test_a_damaged_file_with_a_matching_checksum_is_not_restored(first):
    """The bytes were damaged before their CRC was computed: sizes and checksums agree, but the fingerprint differs."""
    first.save_all(1, 2)
    name = first.largest_file(2)
    first.flip_bit(name)
    manifest = first.manifest(2)
    manifest.pop("digest")
    relative = name.removeprefix("checkpoints/2/")
    manifest["files"][relative][1] = compute_crc32c(first.store.read(name))
    first.write_manifest(2, manifest | {"digest": hash_record(manifest)})
    assert first.again().restore().manifest.step == 1


def test_having_no_restorable_checkpoint_is_an_error_and_changes_nothing(first):
    first.save_all(1, 2)
    for step in (1, 2):
        first.flip_bit(first.largest_file(step))
    again = first.again()
    again.events("commit")
    before = again.content()
    with pytest.raises(ResumeError, match=r"(?s)nothing was touched.*step 2: .*step 1: "):
        again.restore()
    assert again.content() == before


def test_missing_checkpoints_are_an_error_and_not_a_fresh_start(first):
    first.save_all(1)
    first.events("commit")
    first.store.remove_tree("checkpoints/1")
    with pytest.raises(ResumeError, match="all are missing"):
        first.again().restore()


def test_a_state_with_other_leaves_is_rejected_with_their_names(first):
    first.save_all(1)
    changed = make_state()
    changed["params"] = {"kernel": jnp.zeros((16, 32)), "bias": jnp.zeros(32)}
    del changed["flags"]
    with pytest.raises(ResumeError) as caught:
        first.restore(make_abstract(changed))
    text = str(caught.value)
    assert "params.kernel: checkpoint has float32[16,64], the job float32[16,32]" in text
    assert "params.bias: checkpoint has nothing, the job float32[32]" in text
    assert "flags: checkpoint has bool[24], the job nothing" in text
    assert first.steps() == [1]


def test_a_committed_checkpoint_is_never_overwritten(first):
    first.save_all(1)
    files = {name: first.store.read(f"checkpoints/1/{name}") for name in first.files("checkpoints/1")}
    again = first.again()
    again.save("1", make_state(7))
    assert not again.saver.wait_until_finished()
    assert {name: first.store.read(f"checkpoints/1/{name}") for name in files} == files
    assert are_leaves_equal(again.restore().state, make_state(1))


def test_a_zombie_cannot_commit_over_a_newer_attempt(first):
    first.save_all(1)
    newer_ones = []
    first.save("2", make_state(2), before_commit=lambda: newer_ones.append(first.again()))
    with pytest.raises(FencedError, match="attempt 2 has taken over"):
        first.saver.wait_until_finished()
    (newer,) = newer_ones
    assert newer.steps() == [1]
    with pytest.raises(FencedError):
        first.save("3", make_state(3))
    assert not newer.files("checkpoints/3")
    newer.save_all(2)
    assert are_leaves_equal(newer.restore().state, make_state(2))
    with pytest.raises(FencedError):
        delete_step(first.attempt, 1)
    assert newer.steps() == [1, 2]


def test_flush_runs_before_the_commit_and_retention_after_it(first, monkeypatch):
    seen = []
    monkeypatch.setattr(Retention, "add", lambda _, manifest: seen.append((manifest.step, first.steps())))
    first.save("1", make_state(1), before_commit=lambda: seen.append(first.steps()))
    assert first.saver.wait_until_finished()
    assert seen == [[], (1, [1])]


def test_a_failed_save_is_reported_and_affects_no_other_save(first, capsys):
    first.save_all(1)

    def full():
        raise OSError(28, "No space left on device")

    first.save("2", make_state(2), before_commit=full)
    assert not first.saver.wait_until_finished()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "SAVE FAILED at step 2: OSError" in line]
    assert line.endswith("the last commit is intact")
    assert len(first.events("save_failed")) == 1
    assert first.steps() == [1]
    if first.store.root is not None:
        assert not first.files("checkpoints/2")
    first.save_all(3)
    assert first.again().restore().manifest.step == 3


def test_a_run_does_not_resume_from_a_named_checkpoint(first):
    first.save_all(1)
    first.save("best", make_state(9))
    assert first.saver.wait_until_finished()
    assert first.steps() == [1]
    again = first.again()
    assert again.restore().manifest.step == 1
    found = again.load("best", make_abstract(make_state()))
    assert are_leaves_equal(found.state, make_state(9))
    assert found.manifest.name == "best"


def test_loading_an_unknown_name_is_an_error(first):
    with pytest.raises(ResumeError, match="never committed"):
        first.load("none", make_abstract(make_state()))


def test_cpu_saves_alternate_between_two_buffers():
    def places(state):
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]

    buffer = DoubleBuffer()
    first = {"a": jnp.arange(5000.0), "b": jnp.ones((70, 90), jnp.int32)}
    expected = jax.tree.map(np.array, first)
    first_places = places(first)
    second = buffer.swap(first, None)
    assert not set(places(second)) & set(first_places)
    third = buffer.swap(second, None)
    assert places(third) == first_places
    jax.tree.map(np.testing.assert_array_equal, third, expected)
    jax.tree.map(np.testing.assert_array_equal, second, expected)


def test_a_buffer_that_a_save_still_reads_is_not_reused(tmp_path, monkeypatch):
    """A durable save reads its buffers late, while the fast tier saves in between."""
    attempt, may_read, start = Attempt(LocalStore(tmp_path), tmp_path), threading.Event(), ArrayWriter.start

    def start_late(*arguments):
        may_read.wait()
        return start(*arguments)

    monkeypatch.setattr(ArrayWriter, "start", start_late)
    state = attempt.save("1", {"a": jnp.arange(5000.0)})
    for _ in range(3):
        state = attempt.saver._buffer.swap(state, None)
    may_read.set()
    assert attempt.saver.wait_until_finished()


def test_an_unusable_fast_tier_state_falls_back_to_the_durable_one(tmp_path):
    first = Attempt(LocalStore(tmp_path / "run"), tmp_path)
    first.save_all(1)
    saver = first.make_saver(make_state(), local_directory=str(tmp_path / "fast"), local_every_steps=1)
    contents = SaveContents(attachments=lambda: {"rows": b"1"})
    saver.save(make_state(2), 2, contents, SaveKind.FAST)
    saver.close()

    again, asked = first.again(), []
    parts = PartDirectory(tmp_path / "fast" / again.attempt.run_id / "0")
    fast = FastTier(parts, again.attempt.hosts)

    def restore(problem):
        def find_problem(attachments):
            asked.append(attachments)
            return problem

        return restore_newest(
            again.attempt, fast, make_abstract(make_state()), lambda identity, step: identity == {}, find_problem
        )

    found = restore(None)
    assert (found.manifest.step, found.tier, found.attachments) == (2, "fast", {"rows": b"1"})
    found = restore("its rows are gone")
    assert (found.manifest.step, found.tier) == (1, "durable")
    assert asked == [{"rows": b"1"}] * 2
    assert "its rows are gone" in again.events("fallback")[0]["reason"]
    assert parts.list_parts(lambda identity, step: identity == {}, {}) == {}


def test_a_zombie_deletes_no_state_of_the_fast_tier(tmp_path):
    zombie = Attempt(LocalStore(tmp_path / "run"), tmp_path)
    zombie.save_all(1)
    newer = zombie.again()
    saver = newer.make_saver(make_state(), local_directory=str(tmp_path / "fast"), local_every_steps=1)
    saver.save(make_state(2), 2, SaveContents(), SaveKind.FAST)
    saver.close()
    parts = PartDirectory(tmp_path / "fast" / newer.attempt.run_id / "0")
    fast = FastTier(parts, newer.attempt.hosts)

    def is_own(identity, step):
        return identity == {}

    with pytest.raises(FencedError):
        restore_newest(zombie.attempt, fast, make_abstract(make_state()), is_own, lambda _: "is older than the state")
    assert [*parts.list_parts(is_own, {})] == [2]


def leave(checkpoint):
    pass


def lose(checkpoint):
    shutil.rmtree(checkpoint)


def damage_manifest(checkpoint):
    (checkpoint / "manifest.json").write_bytes(b"{")


def replace_by_other_bits(checkpoint):
    """Put the state of an attempt with another number of devices, which differs by rounding."""
    other = Attempt(LocalStore(checkpoint.parents[1].with_name("other")), checkpoint.parents[2])
    other.save("2", make_state(5))
    assert other.saver.wait_until_finished()
    shutil.rmtree(checkpoint)
    shutil.copytree(other.store.root / "checkpoints/2", checkpoint)


@pytest.mark.parametrize(
    ("change", "tier", "seed", "attempt"),
    [
        (leave, "fast", 2, 1),
        (lose, "fast", 2, 2),
        (damage_manifest, "fast", 2, 2),
        (replace_by_other_bits, "durable", 5, 1),
    ],
)
def test_a_step_of_both_tiers_is_restored_and_saved_once(change, tier, seed, attempt, tmp_path):
    """A kill after the last commit, before `result.json`: the next start ends the job with a save of the same step."""
    fast = {"local_directory": str(tmp_path / "fast"), "local_every_steps": 1}
    first = Attempt(LocalStore(tmp_path / "run"), tmp_path)
    saver = first.make_saver(make_state(), **fast)
    first.save_all(1)
    saver.save(make_state(2), 2, SaveContents(), SaveKind.REQUIRED)
    assert saver.wait_until_finished()
    saver.close()
    change(tmp_path / "run/checkpoints/2")

    again = first.again()
    saver = again.make_saver(make_state(), **fast)
    found = saver.restore(lambda attachments: None)
    assert (found.manifest.step, found.tier) == (2, tier)
    assert are_leaves_equal(found.state, make_state(seed))
    saver.save(found.state, 2, SaveContents(), SaveKind.REQUIRED)
    saver.wait_until_committed(2)
    assert read_committed(again.store)[2].attempt == attempt
    assert again.events("save_failed") == []


@pytest.mark.parametrize(("host", "is_deleted"), [("this", True), ("another", False), (None, False)])
def test_parts_of_a_former_number_of_this_host_are_deleted(host, is_deleted, tmp_path):
    attempt, root = Attempt(LocalStore(tmp_path / "run"), tmp_path), tmp_path / "fast"
    former = root / attempt.attempt.run_id / "2"
    (former / "7").mkdir(parents=True)
    if host is not None:
        (former / "host").write_text(socket.gethostname() if host == "this" else host)
    for _ in range(2):
        saver = attempt.make_saver(make_state(), local_directory=str(root), local_every_steps=1)
        saver.save(make_state(2), 2, SaveContents(), SaveKind.FAST)
        saver.close()
        attempt = attempt.again()
        assert sorted(path.name for path in former.parent.iterdir()) == (["0"] if is_deleted else ["0", "2"])
        assert (former.parent / "0" / "2" / "part.json").exists()


def test_space_of_parts_of_a_former_number_counts_as_free(tmp_path, monkeypatch):
    attempt, root = Attempt(LocalStore(tmp_path / "run"), tmp_path), tmp_path / "fast"
    former = root / attempt.attempt.run_id / "2"
    former.mkdir(parents=True)
    (former / "host").write_text(socket.gethostname())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0 if former.exists() else 1 << 30))
    attempt.make_saver(make_state(), local_directory=str(root), local_every_steps=1).close()


def fail_after_writing(writer, target, *_):
    (writer._store.root / target).mkdir(parents=True)
    (writer._store.root / target / "0.0.bin").write_bytes(b"a part")
    raise OSError("disk full")


@pytest.mark.parametrize("is_last", [False, True])
def test_files_of_a_failed_save_are_deleted(tmp_path, monkeypatch, is_last):
    """Those of another process, which may still be writing, once the job ends."""
    attempt = Attempt(LocalStore(tmp_path), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ArrayWriter, "write_part", fail_after_writing)
        attempt.save("1", make_state(1))
        assert not attempt.saver.wait_until_finished()
    place = tmp_path / "checkpoints" / "1"
    assert not place.exists()
    late = place / f"arrays.{attempt.attempt.number}" / "1.0.bin"
    late.parent.mkdir(parents=True)
    late.touch()
    if not is_last:
        attempt.save_all(2)
        assert attempt.steps() == [2]
        assert late.exists()
    attempt.saver.close()
    assert not place.exists()


def test_a_step_whose_save_failed_can_be_saved_again(tmp_path, monkeypatch):
    attempt = Attempt(LocalStore(tmp_path), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ArrayWriter, "write_part", fail_after_writing)
        attempt.save("1", make_state(1))
        assert not attempt.saver.wait_until_finished()
    attempt.save_all(1, 2)
    attempt.saver.close()
    assert attempt.steps() == [1, 2]


@pytest.mark.parametrize(
    ("owner", "name"), [(restore, "list_steps"), (restore, "read_manifest"), (arrays, "read_arrays")]
)
def test_loading_weights_retries_if_retention_deletes_the_checkpoint(first, owner, name, tmp_path, monkeypatch):
    first.save_all(1)
    original, has_advanced = getattr(owner, name), False

    def advance(*arguments):
        nonlocal has_advanced
        result = original(*arguments) if name != "read_arrays" else None
        if not has_advanced:
            has_advanced = True
            first.save_all(2)
            delete_step(first.attempt, 1)
        return original(*arguments) if name == "read_arrays" else result

    other = make_attempt(LocalStore(tmp_path / "other"))
    monkeypatch.setattr(restore, "open_store", lambda _: first.store)
    monkeypatch.setattr(owner, name, advance)
    params = make_state()["params"]
    found = load_weights(other, "runs/first", {"params": params})
    assert are_leaves_equal(found["params"], make_state(2)["params"])


@pytest.mark.parametrize("make_store", [lambda path: LocalStore(path / "run"), lambda path: make_memory_bucket()])
def test_retention_keeps_the_newest_checkpoint_that_was_read_back_in_full(make_store, tmp_path):
    """On a disk that is each newest one; in a bucket the first of each attempt."""
    store = make_store(tmp_path)
    kept = []
    for steps in ((1, 2, 3), (4, 5, 6)):
        attempt = Attempt(store, tmp_path / "staging")
        attempt.saver._retention = Retention(attempt.attempt, keep_last=1)
        attempt.saver.begin(make_state(), 0)
        attempt.save_all(*steps)
        kept.append(attempt.steps())
    assert kept == ([[3], [6]] if store.root is not None else [[1, 3], [4, 6]])
    assert [read_committed(store)[step].read_back for step in kept[1]] == [True] * (store.root is not None) + [
        True,
        False,
    ] * (store.root is None)


@pytest.mark.parametrize("make_store", [lambda path: LocalStore(path / "run"), lambda path: make_memory_bucket()])
def test_a_save_is_committed_while_an_older_checkpoint_is_deleted(make_store, tmp_path, monkeypatch):
    attempt = Attempt(make_store(tmp_path), tmp_path / "staging")
    attempt.saver._retention = Retention(attempt.attempt, keep_last=1)
    may_delete, remove_tree = threading.Event(), attempt.store.remove_tree
    monkeypatch.setattr(
        attempt.store, "remove_tree", lambda name: may_delete.wait(DEADLINE_SECONDS) and remove_tree(name)
    )
    deadline = time.monotonic() + DEADLINE_SECONDS
    # In a bucket the first checkpoint, which is read back in full, is kept.
    kept, deleted = ([], 1) if attempt.store.root is not None else ([1], 2)
    newest = deleted + 2
    for step in range(1, newest + 1):  # the last save begins after the deletion
        attempt.save(str(step), make_state(step))
    while attempt.steps() != [*kept, deleted + 1, newest]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert attempt.files(f"checkpoints/{deleted}")
    may_delete.set()
    assert attempt.saver.wait_until_finished()
    assert {int(name.split("/")[0]) for name in attempt.files("checkpoints")} == {*kept, newest}
    assert attempt.restore().manifest.step == newest


def test_a_save_leaves_nothing_in_memory(tmp_path):
    """A month of saves each minute is 43,200 saves."""
    attempt, counts = Attempt(LocalStore(tmp_path / "run"), tmp_path / "staging"), []
    for step in range(1, 101):
        attempt.save(str(step), {"a": jnp.arange(8.0)})
        assert attempt.saver.wait_until_finished()
        delete_step(attempt.attempt, step)
        attempt.saver._retention.forget_after(0)
        if step % 50 == 0:
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 2 * 50, counts
