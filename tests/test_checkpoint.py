"""The protocol of checkpoints: committed or not there, checked in three layers, restored on any mesh."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from runner.checkpoint import Checkpoints
from runner.errors import FencedError, ResumeError
from runner.fingerprint import fingerprint
from runner.hosts import Hosts
from runner.ledger import Fence, Ledger
from runner.manifest import committed_steps
from runner.spec import hash_of

from .tiny import FACTORISATIONS, leaves_equal, mesh_of

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


class Store:
    """One attempt on a directory."""

    def __init__(self, directory):
        self.fence = Fence(directory)
        self.fence.claim()
        self.ledger = Ledger(directory, self.fence.attempt, 0)
        self.checkpoints = Checkpoints(directory, Hosts(None, 0, 1), self.fence, self.ledger)
        self.directory = directory / "checkpoints"

    def save(self, name, state, before_commit=lambda: None, after_commit=lambda: None):
        record = {"step": int(name) if name.isdecimal() else 0, "job": "x", "identity": {}}
        self.checkpoints.save(name, state, record, before_commit, after_commit)

    def save_all(self, *steps):
        for step in steps:
            self.save(str(step), make_state(step))
            assert self.checkpoints.wait()

    def steps(self):
        return committed_steps(self.directory)

    def restore(self):
        return self.checkpoints.restore(abstract(make_state()))

    def events(self, kind):
        return [event for event in self.ledger.events() if event["event"] == kind]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def largest_file(directory):
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_an_empty_directory_has_nothing_to_restore(store):
    assert store.steps() == []
    assert store.restore() is None


def test_a_saved_state_comes_back_bit_for_bit_with_its_manifest(store):
    store.save_all(50)
    state, manifest = store.restore()
    assert leaves_equal(state, make_state(50))
    assert manifest["step"] == 50
    assert manifest["fingerprint"] == fingerprint(state) == fingerprint(make_state(50))
    (commit,) = store.events("commit")
    assert commit["fingerprint"] == manifest["fingerprint"]
    assert commit["step"] == 50


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 4, 2), (2, 2, 2)])
def test_a_state_saved_in_one_sharding_is_restored_in_any_other(store, sizes):
    mesh = mesh_of(*sizes)
    state = {"w": make_state()["params"]["kernel"], "m": make_state()["moments"][0]}
    sharded = jax.device_put(state, NamedSharding(mesh, PartitionSpec(AXES)))
    store.save("1", sharded)
    assert store.checkpoints.wait()
    targets = [
        *(NamedSharding(mesh_of(*other), PartitionSpec("fsdp", ("data", "tensor"))) for other in FACTORISATIONS[::3]),
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ]
    for target in targets:
        restored, _ = store.checkpoints.restore(abstract(state, target))
        assert leaves_equal(restored, state)
        assert all(leaf.sharding == target for leaf in jax.tree.leaves(restored))


def test_the_saved_bits_are_those_before_the_next_step_took_the_buffers(store):
    """The state is donated right after `save` returns, as in training, while orbax still writes."""
    mesh = mesh_of(1, 8, 1)
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x * 3 + 1, tree), donate_argnums=0)
    state = {"w": jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32).reshape(1024, 1024), place)}
    for step in range(1, 4):
        expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
        store.save(str(step), state)
        for _ in range(5):
            state = advance(state)
        assert store.checkpoints.wait()
        restored, _ = store.checkpoints.load(str(step), abstract(state))
        assert leaves_equal(restored, expected)


def test_retention_keeps_the_last_two_as_the_issue_says(store):
    store.save_all(800, 900, 1000)
    store.checkpoints.retain(keep_last=2, keep_every_steps=None)
    assert store.steps() == [900, 1000]
    assert not (store.directory / "800").exists()


@pytest.mark.parametrize(
    ("keep_last", "keep_every_steps", "kept"),
    [
        (1, None, [500]),
        (2, 200, [200, 400, 500]),
        (1, 100, [100, 200, 300, 400, 500]),
        (9, None, [100, 200, 300, 400, 500]),
    ],
)
def test_permanent_checkpoints_stay_beside_the_last(store, keep_last, keep_every_steps, kept):
    for step in (100, 200, 300, 400, 500):
        (store.directory / str(step)).mkdir(parents=True)
        (store.directory / str(step) / "manifest.json").write_text("{}")
    store.checkpoints.retain(keep_last, keep_every_steps)
    assert store.steps() == kept


def test_steps_are_numbers_and_not_text(store):
    for step in (900, 1000, 99):
        (store.directory / str(step)).mkdir(parents=True)
        (store.directory / str(step) / "manifest.json").write_text("{}")
    assert store.steps() == [99, 900, 1000]


def test_retention_deletes_the_manifest_first(store, monkeypatch):
    """A kill in between leaves no directory that looks whole."""
    store.save_all(1, 2)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("runner.checkpoint.remove_tree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.checkpoints.retain(1, None)
    assert (store.directory / "1").exists()
    assert store.steps() == [2]


def test_a_half_deleted_directory_is_not_a_checkpoint_and_is_cleared_away(tmp_path, store):
    store.save_all(1, 2)
    (store.directory / "2" / "manifest.json").unlink()
    (store.directory / "3").mkdir()
    _, manifest = Store(tmp_path).restore()
    assert manifest["step"] == 1
    assert sorted(path.name for path in store.directory.iterdir()) == ["1"]


def damage_bits(directory):
    flip_bit(largest_file(directory))


def damage_length(directory):
    path = largest_file(directory)
    path.write_bytes(path.read_bytes()[:-1])


def damage_missing(directory):
    largest_file(directory).unlink()


def damage_manifest(directory):
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"step": 1}))


def damage_torn(directory):
    (directory / "manifest.json").write_bytes(b'{"step": ')


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
def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_restored(tmp_path, store, damage, reason):
    store.save_all(1, 2)
    damage(store.directory / "2")
    again = Store(tmp_path)
    state, manifest = again.restore()
    assert manifest["step"] == 1
    assert leaves_equal(state, make_state(1))
    (quarantine,) = again.events("quarantine")
    (fallback,) = again.events("fallback")
    assert reason in quarantine["reason"]
    assert (fallback["rejected"], fallback["step"]) == (2, 1)
    assert [path.name for path in (tmp_path / "quarantine").iterdir()] == ["2.2"]
    assert again.steps() == [1]


def test_bits_that_were_damaged_before_the_checksum_are_found_by_the_fingerprint(tmp_path, store):
    """Files and their sums agree, and still the arrays are not those that were saved."""
    store.save_all(1)
    other = Store(tmp_path / "other")
    other.save_all(2)
    manifest = json.loads((store.directory / "1" / "manifest.json").read_text())
    foreign = json.loads((other.directory / "2" / "manifest.json").read_text())
    digest = foreign["leaves"]["params.kernel"]["digest"]
    assert digest != manifest["leaves"]["params.kernel"]["digest"]
    foreign["leaves"]["params.kernel"]["digest"] = manifest["leaves"]["params.kernel"]["digest"]
    foreign.pop("digest")
    (other.directory / "2" / "manifest.json").write_text(json.dumps(foreign | {"digest": hash_of(foreign)}))
    with pytest.raises(ResumeError, match=r"the bits of params\.kernel are not those that were saved"):
        other.checkpoints.load("2", abstract(make_state()))


def test_if_none_can_be_restored_it_is_refused_and_nothing_is_touched(tmp_path, store):
    store.save_all(1, 2)
    for step in (1, 2):
        damage_bits(store.directory / str(step))
    again = Store(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ResumeError, match=r"(?s)nothing was touched.*step 2: .*step 1: "):
        again.restore()
    assert sorted(tmp_path.rglob("*")) == before


def test_if_all_are_gone_it_is_refused_rather_than_started_over(tmp_path, store):
    store.save_all(1)
    shutil.rmtree(store.directory / "1")
    with pytest.raises(ResumeError, match="all are missing"):
        Store(tmp_path).restore()


def test_a_state_with_other_leaves_is_refused_with_their_names(store):
    store.save_all(1)
    changed = make_state()
    changed["params"] = {"kernel": jnp.zeros((16, 32)), "bias": jnp.zeros(32)}
    del changed["flags"]
    with pytest.raises(ResumeError) as caught:
        store.checkpoints.restore(abstract(changed))
    text = str(caught.value)
    assert "params.kernel: checkpoint has float32[16,64], the job float32[16,32]" in text
    assert "params.bias: checkpoint has nothing, the job float32[32]" in text
    assert "flags: checkpoint has bool[24], the job nothing" in text
    assert store.steps() == [1]


def test_a_committed_checkpoint_is_never_written_again(tmp_path, store):
    store.save_all(1)
    files = {path: path.read_bytes() for path in (store.directory / "1").rglob("*") if path.is_file()}
    again = Store(tmp_path)
    again.save("1", make_state(7))
    assert not again.checkpoints.wait()
    assert {path: path.read_bytes() for path in files} == files
    state, _ = again.restore()
    assert leaves_equal(state, make_state(1))


def test_a_zombie_cannot_commit_over_a_newer_attempt(tmp_path, store):
    store.save_all(1)
    newer_ones = []
    store.save("2", make_state(2), before_commit=lambda: newer_ones.append(Store(tmp_path)))
    with pytest.raises(FencedError, match="attempt 2 has taken over"):
        store.checkpoints.wait()
    (newer,) = newer_ones
    assert newer.steps() == [1]
    with pytest.raises(FencedError):
        store.save("3", make_state(3))
    assert not (newer.checkpoints.directory / "3").exists()
    newer.save_all(2)
    state, _ = newer.restore()
    assert leaves_equal(state, make_state(2))
    with pytest.raises(FencedError):
        store.checkpoints.retain(1, None)
    assert newer.steps() == [1, 2]


def test_before_and_after_the_commit_is_what_it_says(store):
    seen = []
    store.save(
        "1",
        make_state(1),
        before_commit=lambda: seen.append(store.steps()),
        after_commit=lambda: seen.append(store.steps()),
    )
    assert store.checkpoints.wait()
    assert seen == [[], [1]]


def test_a_save_that_fails_is_loud_and_leaves_the_last_commit_and_the_next_save(tmp_path, store, capsys):
    store.save_all(1)

    def full():
        raise OSError(28, "No space left on device")

    store.save("2", make_state(2), before_commit=full)
    assert not store.checkpoints.wait()
    assert "SAVE FAILED at step 2: OSError" in capsys.readouterr().err
    assert len(store.events("save_failed")) == 1
    assert store.steps() == [1]
    assert not list(store.directory.glob("2/arrays*"))
    store.save_all(3)
    _, manifest = Store(tmp_path).restore()
    assert manifest["step"] == 3


def test_a_named_checkpoint_is_neither_resumed_from_nor_retained_by_count(tmp_path, store):
    store.save_all(1)
    store.save("best", make_state(9))
    assert store.checkpoints.wait()
    store.save_all(2, 3)
    store.checkpoints.retain(1, None)
    assert store.steps() == [3]
    again = Store(tmp_path)
    assert again.restore()[1]["step"] == 3
    state, manifest = again.checkpoints.load("best", abstract(make_state()))
    assert leaves_equal(state, make_state(9))
    assert manifest["name"] == "best"


def test_a_name_that_is_not_there_is_refused(store):
    with pytest.raises(ResumeError, match="never committed"):
        store.checkpoints.load("none", abstract(make_state()))
