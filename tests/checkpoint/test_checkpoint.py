"""The protocol of checkpoints: committed or not there, checked in three layers, restored on any mesh.

Every test runs on a disk, through orbax, and in a bucket, piece by piece.
"""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from runner.checkpoint import arrays, restore
from runner.checkpoint.arrays import BlockWriter, OrbaxWriter
from runner.checkpoint.fast_tier import FastTier
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.checkpoint.manifest import read_committed
from runner.checkpoint.policy import Retention, SaveKind, delete_step
from runner.checkpoint.restore import load_checkpoint, load_weights, restore_newest
from runner.checkpoint.save import Checkpointer, DoubleBuffer, SaveContents
from runner.errors import FencedError, ResumeError
from runner.spec import CheckpointConfig, hash_record
from runner.storage import LocalStore, compute_crc32c, read_log
from tests.support.attempt import make_attempt
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


def abstract(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state)


class Attempt:
    """One attempt on a directory."""

    def __init__(self, store, staging):
        self.store, self.staging = store, staging
        self.attempt = make_attempt(store)
        self.fence = self.attempt.fence
        hosts = self.attempt.hosts
        self.writer = OrbaxWriter(store, hosts) if store.root is not None else BlockWriter(store, hosts, staging)
        self.saver, self.structure = self.make_saver(make_state()), jax.tree.structure(make_state())

    def make_saver(self, like, **rule):
        """The checkpointer of a job whose states are like `like`, which deletes nothing."""
        rule = CheckpointConfig(keep_last=99, max_unsaved_minutes=1.0, **rule)
        return Checkpointer(self.attempt, rule, 1, {}, abstract(like), self.writer)

    def again(self):
        """The next attempt."""
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
        return restore_newest(self.attempt, None, abstract(make_state()) if like is None else like, {}.__eq__)

    def load(self, name, like):
        return load_checkpoint(self.attempt, name, like)

    def events(self, kind):
        self.attempt.background_writer.flush()
        return [event for event in read_log(self.store, "events") if event["event"] == kind]

    # What stands there, and damage to it.

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


@pytest.mark.parametrize(("details", "is_refused"), [({"tier": "fast"}, False), ({}, True)])
def test_who_has_lost_all_that_was_durable_is_refused_and_who_had_nothing_durable_starts_over(
    first, details, is_refused
):
    first.attempt.events.append("commit", 3, seconds_to_durable=0.1, **details)
    first.attempt.background_writer.flush()
    if is_refused:
        with pytest.raises(ResumeError, match="none can be restored"):
            first.restore()
    else:
        assert first.restore() is None


def test_a_saved_state_comes_back_bit_for_bit_with_its_manifest(first):
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
def test_a_state_saved_in_one_sharding_is_restored_in_any_other(first, sizes):
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
        restored = first.restore(abstract(state, target)).state
        assert are_leaves_equal(restored, state)
        assert all(leaf.sharding == target for leaf in jax.tree.leaves(restored))


def test_the_saved_bits_are_those_before_the_next_step_took_the_buffers(first):
    """The state is donated right after `save` returns, as in training, while orbax still writes."""
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
        restored = first.load(str(step), abstract(state)).state
        assert are_leaves_equal(restored, expected)


def test_retention_deletes_the_manifest_first(first, monkeypatch):
    """A kill in between leaves no directory that looks whole."""
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


def test_a_half_deleted_directory_is_not_a_checkpoint_and_is_cleared_away(first):
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


def test_what_a_newer_attempt_has_retired_can_never_be_committed(first):
    """The zombie has passed its last check of the fence when it is stopped, right before it creates the manifest."""
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


def test_a_zombie_that_was_first_has_a_checkpoint_that_counts(first):
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
def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_restored(first, damage, reason):
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
    assert not again.files("checkpoints/2")
    assert again.steps() == [1]


def test_bits_that_were_damaged_before_the_checksum_are_found_by_the_fingerprint(first):
    """Files and their sums agree, and still the arrays are not those that were saved."""
    first.save_all(1, 2)
    digest = first.manifest(1)["leaves"]["params.kernel"]["digest"]
    foreign = first.manifest(2)
    assert digest != foreign["leaves"]["params.kernel"]["digest"]
    foreign["leaves"]["params.kernel"]["digest"] = digest
    foreign.pop("digest")
    first.write_manifest(2, foreign | {"digest": hash_record(foreign)})
    with pytest.raises(ResumeError, match=r"the bits of params\.kernel are not those that were saved"):
        first.load("2", abstract(make_state()))


def test_bits_that_a_piece_has_lost_are_found_by_its_digest_and_else_by_the_fingerprint(first):
    """Damage before the bytes were read for their CRC: sizes and sums are right, the fingerprint is not."""
    first.save_all(1, 2)
    name = first.largest_file(2)
    first.flip_bit(name)
    manifest = first.manifest(2)
    manifest.pop("digest")
    relative = name.removeprefix("checkpoints/2/")
    manifest["files"][relative][1] = compute_crc32c(first.store.read(name))
    first.write_manifest(2, manifest | {"digest": hash_record(manifest)})
    assert first.again().restore().manifest.step == 1


def test_if_none_can_be_restored_it_is_refused_and_nothing_is_touched(first):
    first.save_all(1, 2)
    for step in (1, 2):
        first.flip_bit(first.largest_file(step))
    again = first.again()
    again.events("commit")
    before = again.content()
    with pytest.raises(ResumeError, match=r"(?s)nothing was touched.*step 2: .*step 1: "):
        again.restore()
    assert again.content() == before


def test_if_all_are_gone_it_is_refused_rather_than_started_over(first):
    first.save_all(1)
    first.events("commit")
    first.store.remove_tree("checkpoints/1")
    with pytest.raises(ResumeError, match="all are missing"):
        first.again().restore()


def test_a_state_with_other_leaves_is_refused_with_their_names(first):
    first.save_all(1)
    changed = make_state()
    changed["params"] = {"kernel": jnp.zeros((16, 32)), "bias": jnp.zeros(32)}
    del changed["flags"]
    with pytest.raises(ResumeError) as caught:
        first.restore(abstract(changed))
    text = str(caught.value)
    assert "params.kernel: checkpoint has float32[16,64], the job float32[16,32]" in text
    assert "params.bias: checkpoint has nothing, the job float32[32]" in text
    assert "flags: checkpoint has bool[24], the job nothing" in text
    assert first.steps() == [1]


def test_a_committed_checkpoint_is_never_written_again(first):
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


def test_before_and_after_the_commit_is_what_it_says(first, monkeypatch):
    seen = []
    monkeypatch.setattr(Retention, "add", lambda _, manifest: seen.append((manifest.step, first.steps())))
    first.save("1", make_state(1), before_commit=lambda: seen.append(first.steps()))
    assert first.saver.wait_until_finished()
    assert seen == [[], (1, [1])]


def test_a_save_that_fails_is_loud_and_leaves_the_last_commit_and_the_next_save(first, capsys):
    first.save_all(1)

    def full():
        raise OSError(28, "No space left on device")

    first.save("2", make_state(2), before_commit=full)
    assert not first.saver.wait_until_finished()
    assert "SAVE FAILED at step 2: OSError" in capsys.readouterr().err
    assert len(first.events("save_failed")) == 1
    assert first.steps() == [1]
    if first.store.root is not None:
        assert not first.files("checkpoints/2")
    first.save_all(3)
    assert first.again().restore().manifest.step == 3


def test_a_named_checkpoint_is_not_resumed_from(first):
    first.save_all(1)
    first.save("best", make_state(9))
    assert first.saver.wait_until_finished()
    assert first.steps() == [1]
    again = first.again()
    assert again.restore().manifest.step == 1
    found = again.load("best", abstract(make_state()))
    assert are_leaves_equal(found.state, make_state(9))
    assert found.manifest.name == "best"


def test_a_name_that_is_not_there_is_refused(first):
    with pytest.raises(ResumeError, match="never committed"):
        first.load("none", abstract(make_state()))


def test_on_a_cpu_training_goes_on_in_the_memory_of_the_save_before():
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


def test_memory_that_a_save_still_reads_is_taken_by_nobody(tmp_path, monkeypatch):
    """Between a durable save that is slow to begin and its end, saves for the fast tier may come."""
    attempt, may_read, start = Attempt(LocalStore(tmp_path), tmp_path), threading.Event(), OrbaxWriter.start

    def start_late(*arguments):
        may_read.wait()
        return start(*arguments)

    monkeypatch.setattr(OrbaxWriter, "start", start_late)
    state = attempt.save("1", {"a": jnp.arange(5000.0)})
    for _ in range(3):
        state = attempt.saver._buffer.swap(state, None)
    may_read.set()
    assert attempt.saver.wait_until_finished()


def test_a_state_of_the_fast_tier_that_the_job_cannot_go_on_from_is_left_for_the_durable_one(tmp_path):
    first = Attempt(LocalStore(tmp_path / "run"), tmp_path)
    first.save_all(1)
    saver = first.make_saver(make_state(), local_directory=str(tmp_path / "fast"), local_every_steps=1)
    contents = SaveContents(attachments=lambda: {"rows": b"1"})
    saver.save(make_state(2), 2, contents, SaveKind.FAST)
    saver.close()

    again, asked = first.again(), []
    fast = FastTier(tmp_path / "fast" / again.attempt.run_id / "0")

    def restore(problem):
        def find_problem(attachments):
            asked.append(attachments)
            return problem

        return restore_newest(again.attempt, fast, abstract(make_state()), {}.__eq__, find_problem)

    found = restore(None)
    assert (found.manifest.step, found.tier, found.attachments) == (2, "fast", {"rows": b"1"})
    found = restore("its rows are gone")
    assert (found.manifest.step, found.tier) == (1, "durable")
    assert asked == [{"rows": b"1"}] * 2
    assert "its rows are gone" in again.events("fallback")[0]["reason"]
    assert fast.list_steps({}.__eq__) == []


def fail(writer, target, *_):
    writer._orbax.wait_until_finished()
    raise OSError("disk full")


@pytest.mark.parametrize("is_last", [False, True])
def test_what_a_thread_of_a_failed_save_writes_after_the_failure_is_deleted_too(tmp_path, monkeypatch, is_last):
    """Orbax tells the first failure while its other threads still write: seen on a full disk with busy processors."""
    attempt = Attempt(LocalStore(tmp_path), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(OrbaxWriter, "_finish", fail)
        attempt.save("1", make_state(1))
        assert not attempt.saver.wait_until_finished()
    place = tmp_path / "checkpoints" / "1"
    late = place / f"arrays.{attempt.attempt.number}" / "d" / "late"
    late.parent.mkdir(parents=True)
    late.touch()
    if is_last:
        attempt.saver.close()
        assert attempt.steps() == []
    else:
        attempt.save_all(2)
        assert attempt.steps() == [2]
    assert not place.exists()


def test_a_step_whose_save_has_failed_may_be_saved_again(tmp_path, monkeypatch):
    attempt = Attempt(LocalStore(tmp_path), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(OrbaxWriter, "_finish", fail)
        attempt.save("1", make_state(1))
        assert not attempt.saver.wait_until_finished()
    attempt.save_all(1, 2)
    attempt.saver.close()
    assert attempt.steps() == [1, 2]


@pytest.mark.parametrize(
    ("owner", "name"), [(restore, "list_steps"), (restore, "read_manifest"), (arrays, "read_arrays")]
)
def test_weights_of_a_run_that_deletes_its_old_checkpoints_are_looked_for_again(
    first, owner, name, tmp_path, monkeypatch
):
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
