"""Leaves of every kind: restored bit-identically, or rejected before anything is committed.

The kinds are enumerated: every element type of JAX in every shape, strongly and weakly typed. A stopped and resumed run
is compared with an uninterrupted one, on disk and in a bucket.
"""

import gc
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from runner import ExecutionSpec, RestoreableJob
from runner.checkpoint import arrays
from runner.checkpoint.arrays import read_leaves
from runner.checkpoint.fingerprint import (
    CHUNK_LEAVES,
    _digest_shards,
    compute_fingerprint,
    compute_leaf_digests,
    describe_leaves,
    make_chunks,
)
from runner.checkpoint.leaves import make_strongly_typed
from runner.checkpoint.manifest import read_committed
from runner.checkpoint.save import _copy
from runner.errors import InvalidError, StateError
from runner.storage import LocalStore, read_log
from tests.support.memory_bucket import make_memory_bucket
from tests.support.tiny_jobs import start_python, stop_after, wait_for_output

DTYPES = sorted(
    {found.dtype.name for found in vars(jnp).values() if isinstance(getattr(found, "dtype", None), np.dtype)}
)
X64_DTYPES = {"int64", "uint64", "float64", "complex128"}  # need x64
UNSUPPORTED_DTYPES = {"int1", "uint1", "int2", "uint2", "int4", "uint4"}
UNSUPPORTED_DTYPES |= {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
SHAPES = ((), (5,), (4, 6), (0,), (3, 0))


def make_values(dtype: str, shape: tuple[int, ...]) -> jax.Array:
    """Return an array with different bits in neighbouring elements."""
    number = int(np.prod(shape))
    return (jnp.arange(number) % 7 + 1).astype(dtype).reshape(shape)


def make_keys(implementation: str, shape: tuple[int, ...]) -> jax.Array:
    key = jax.random.key(3, impl=implementation)
    return jax.random.split(key, shape) if shape else key


LEAVES = {f"{dtype}{list(shape)}": (make_values, dtype, shape) for dtype, shape in itertools.product(DTYPES, SHAPES)}
LEAVES |= {
    f"key-{implementation}{list(shape)}": (make_keys, implementation, shape)
    for implementation, shape in itertools.product(("threefry2x32", "rbg", "unsafe_rbg"), ((), (3,), (2, 2), (0,)))
}
# Weakly typed leaves, like a Python literal in `init`.
LEAVES |= {f"weak-{value!r}": (lambda value: value, value) for value in (1.1, 3, True, 1.1 + 2j)}
LEAVES |= {f"weak-array-{value!r}": (jnp.asarray, value) for value in (1.1, 3, 1.1 + 2j)}
LEAVES |= {f"numpy-{dtype}": (np.ones, (3,), dtype) for dtype in ("float32", "int32", "bool")}
LEAVES |= {"none": (lambda: None,), "numpy-scalar": (np.float32, 1.1)}


def is_unsupported(kind: str) -> bool:
    return kind.split("[")[0] in UNSUPPORTED_DTYPES


class LeafJob(RestoreableJob):
    """Job that carries leaves through its steps; products with bfloat16 numbers show whether their types change."""

    make: Any = None
    total_steps = 4

    def init(self) -> Any:
        leaves = self.make()
        products = {name: jnp.bfloat16(1) for name, leaf in leaves.items() if leaf is not None}
        return {"count": jnp.int32(0), "product": products, "leaf": leaves}

    def advance(self, state: Any) -> Any:
        products = {name: multiply(product, state["leaf"][name]) for name, product in state["product"].items()}
        return state | {"count": state["count"] + 1, "product": products}

    def run(self) -> None:
        while self.step < self.total_steps:
            self.state = self.advance(self.state)
            self.step += 1
            self.save_or_stop()


def multiply(product: jax.Array, leaf: jax.Array) -> jax.Array:
    if leaf.shape == () and leaf.dtype in (jnp.float32, jnp.complex64):
        return (product * leaf).real.astype(jnp.bfloat16)
    return product


def make_job(store: Any, make: Any, job_class: type[LeafJob] = LeafJob, **checkpoint: Any) -> LeafJob:
    spec = ExecutionSpec(
        name="keeper",
        job="tests.checkpoint.test_leaves:LeafJob",
        directory=str(store.root or "unused"),
        checkpoint={"every_steps": 100, **checkpoint},
    )
    job = job_class(spec)
    job.store, job.make = store, make
    return job


def get_types(state: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.aval.weak_type), state)


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.soak)])
def make_store(request, tmp_path):
    return lambda name: LocalStore(tmp_path / name) if request.param == "disk" else make_memory_bucket()


def make_leaves(kinds: Any) -> dict[str, Any]:
    return {kind: LEAVES[kind][0](*LEAVES[kind][1:]) for kind in kinds}


def is_wide(kind: str) -> bool:
    return kind.split("[")[0] in X64_DTYPES


NARROW = [kind for kind in LEAVES if not is_unsupported(kind) and not is_wide(kind)]


def stop_resume_and_compare(make_store: Any, kinds: list[str]) -> None:
    whole, struck = (make_job(make_store(name), lambda: make_leaves(kinds)) for name in ("whole", "struck"))
    whole()
    stop_after(struck, 2)
    resumed = make_job(struck.store, struck.make)
    resumed()
    assert [event["step"] for event in read_log(struck.store, "events") if event["event"] == "restore"] == [2]
    assert get_types(resumed.state) == get_types(whole.state)
    assert compute_leaf_digests(resumed.state) == compute_leaf_digests(whole.state)
    manifest = read_committed(struck.store)[4]
    looked_at = {leaf.name: leaf for leaf in read_leaves(struck.store, "checkpoints/4", manifest, manifest.leaves)}
    assert [leaf.problem for leaf in looked_at.values() if leaf.problem is not None] == []
    assert describe_leaves(resumed.state) == {
        name: describe_leaves([leaf.array])["0"] for name, leaf in looked_at.items()
    }


# A vector and a matrix without elements are left to the soak.
DAILY_KINDS = [kind for kind in NARROW if not kind.endswith(("[5]", "[3, 0]"))]


@pytest.mark.parametrize("kinds", [DAILY_KINDS, pytest.param(NARROW, marks=pytest.mark.soak)], ids=["daily", "all"])
def test_leaves_of_all_kinds_are_restored_with_types_and_bits(make_store, kinds):
    stop_resume_and_compare(make_store, kinds)


def test_64_bit_leaves_are_restored_with_x64(make_store):
    with jax.enable_x64(True):
        stop_resume_and_compare(make_store, [kind for kind in LEAVES if is_wide(kind)])


@pytest.mark.soak
@pytest.mark.parametrize("kind", NARROW)
def test_a_single_leaf_of_each_kind_is_restored(make_store, kind):
    stop_resume_and_compare(make_store, [kind])


@pytest.mark.parametrize("kind", [kind for kind in LEAVES if is_unsupported(kind)])
def test_unsupported_leaves_are_rejected_before_the_run_starts(tmp_path, kind):
    job = make_job(LocalStore(tmp_path), lambda: make_leaves([kind]))
    with pytest.raises(InvalidError, match=rf"leaf\..*: {kind.split('[')[0]} cannot be saved"):
        job()
    assert not list(tmp_path.iterdir())


# Trees.

TREES = {
    "one array": lambda: jnp.arange(4),
    "nested": lambda: {"a": [jnp.zeros(3), (jnp.ones(2), None)], "b": {"c": jnp.float32(1)}},
    "odd names": lambda: {name: jnp.float32(1) for name in ("a/b", "..", "a b", "ü", ".zarray", "%2F", "0", "\\", "'")},
    "long names": lambda: {"n" * 200: jnp.float32(1)},
}
UNSUPPORTED_TREES = {
    "no leaf": (dict, "no leaf"),
    "nothing": (lambda: None, "no leaf"),
    "one dotted path": (
        lambda: {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2)}},
        r"a\.b: 2 leaves have this dotted path",
    ),
    "a very long name": (lambda: {"n" * 201: jnp.float32(1)}, "its dotted path has 201 bytes"),
}


class WholeStateJob(LeafJob):
    """Job whose whole state is the result of `make`."""

    def init(self) -> Any:
        return self.make()

    def advance(self, state: Any) -> Any:
        return state


@pytest.mark.parametrize("kind", TREES)
def test_trees_are_restored(make_store, kind):
    struck = make_job(make_store("struck"), TREES[kind], WholeStateJob)
    stop_after(struck, 2)
    resumed = make_job(struck.store, struck.make, WholeStateJob)
    resumed()
    assert jax.tree.structure(resumed.state) == jax.tree.structure(struck.state)
    assert compute_fingerprint(resumed.state) == compute_fingerprint(struck.state)


@pytest.mark.parametrize("kind", UNSUPPORTED_TREES)
def test_unsupported_trees_are_rejected_before_the_run_starts(make_store, kind):
    make, message = UNSUPPORTED_TREES[kind]
    job = make_job(make_store("refused"), make, WholeStateJob)
    with pytest.raises(InvalidError, match=message):
        job()
    assert not job.store.list_names("")


# Changes during a run.

CHANGES = {
    "dtype": (lambda leaf: leaf.astype(jnp.float16), r"leaf: was float32\[3\], is float16\[3\]"),
    "shape": (lambda leaf: jnp.zeros((3, 1)), r"leaf: was float32\[3\], is float32\[3,1\]"),
    "structure": (lambda leaf: {"inner": leaf}, r"leaf\.inner: was not there at the start"),
    "gone": (lambda leaf: None, "leaf: was there at the start and is gone"),
    "number": (lambda leaf: 1.5, "leaf: is a float, not a jax array"),
    "numpy": (lambda leaf: np.zeros(3, np.float32), "leaf: is a ndarray, not a jax array"),
    "weak": (lambda leaf: jnp.full(3, 1.1), "leaf: is weakly typed"),
    "donated": (lambda leaf: leaf.delete() or leaf, "leaf: was donated"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_changes_its_types_is_not_committed(make_store, change):
    alter, message = CHANGES[change]

    class Changing(WholeStateJob):
        def advance(self, state):
            return {"leaf": alter(state["leaf"])} if self.step == 2 else state

    job = make_job(make_store("changing"), lambda: {"leaf": jnp.zeros(3)}, Changing, every_steps=1, keep_last=1)
    with pytest.raises(StateError, match=message):
        job()
    assert set(read_committed(job.store)) in ({1}, {2})  # a bucket skips a save while another one is in flight


def test_strong_typing_keeps_bits_and_dtypes():
    tree = {"weak": jnp.asarray(1.1), "strong": jnp.float32(2), "flag": True, "key": jax.random.key(0)}
    made = jax.jit(lambda: make_strongly_typed(tree))()
    assert describe_leaves(made) == describe_leaves({name: jnp.asarray(leaf) for name, leaf in tree.items()})
    assert not any(leaf.aval.weak_type for leaf in jax.tree.leaves(made))


# First save of an attempt.


class LossyWriter:
    """A writer that stores other values in the first save, with intact files."""

    def __init__(self, writer):
        self.writer, self.num_saves = writer, 0

    def start(self, target, leaves):
        self.num_saves += 1
        lost = {name: leaf + 1 if name == "leaf" and self.num_saves == 1 else leaf for name, leaf in leaves.items()}
        return self.writer.start(target, lost)

    def __getattr__(self, name):
        return getattr(self.writer, name)


class LossyFirstSaveJob(LeafJob):
    def prepare(self):
        self.checkpointer._writer = LossyWriter(self.checkpointer._writer)

    def init(self):
        return {"leaf": self.make(), "count": jnp.int32(0)}

    def advance(self, state):
        self.checkpointer.wait_until_finished()
        return state | {"count": state["count"] + 1}


def test_the_first_save_of_an_attempt_is_compared_with_the_devices(make_store, capsys, monkeypatch):
    read = []
    real = arrays.ArrayReader.read_block
    monkeypatch.setattr(
        arrays.ArrayReader, "read_block", lambda reader, *args: read.append(reader._directory) or real(reader, *args)
    )
    mesh = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    job = make_job(make_store("lost"), lambda: jnp.arange(64.0), LossyFirstSaveJob, every_steps=1, keep_last=9)
    job.abstract_state = lambda: {
        "leaf": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=mesh),
        "count": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh.mesh, PartitionSpec())),
    }
    job()
    assert list(read_committed(job.store)) == [2, 3, 4]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "SAVE FAILED" in line]
    assert "at step 1: ValueError: what was read back of leaf is not what was saved" in line
    assert line.endswith("nothing is committed yet")
    # The eight blocks of the sharded leaf, the first of which is wrong, and one of the replicated leaf.
    assert [read.count(f"checkpoints/{step}") for step in (2, 3, 4)] == [9, 0, 0]
    assert 1 <= read.count("checkpoints/1") <= 9


# Many and large leaves.


@pytest.mark.soak
def test_the_size_of_compiled_programs_does_not_grow_with_the_number_of_leaves(tmp_path):
    """Programs with many leaves take superlinear time to compile."""

    def sizes(number: int) -> tuple[int, int]:
        job = make_job(
            LocalStore(tmp_path / str(number)), lambda: {str(n): jnp.full(7, n) for n in range(number)}, WholeStateJob
        )
        stop_after(job, 1)
        return _digest_shards._cache_size(), _copy._cache_size()

    assert sizes(2 * CHUNK_LEAVES) == sizes(5 * CHUNK_LEAVES)


def test_every_leaf_is_in_exactly_one_chunk():
    leaves = [jnp.zeros(1 + n % 5, jnp.int8 if n % 3 else jnp.int16) for n in range(1000)]
    found = make_chunks(leaves)
    assert sorted(place for places in found for place in places) == list(range(1000))
    assert max(map(len, found)) == CHUNK_LEAVES
    assert len(found) == -(-1000 // CHUNK_LEAVES)
    assert make_chunks([]) == []


def save_and_restore_many_leaves(directory: Path) -> None:
    """Save and restore 20,000 leaves."""

    def make() -> dict[str, jax.Array]:
        return {str(n): jnp.full(1 + n % 3, n, jnp.float32) for n in range(20_000)}

    stop_after(make_job(LocalStore(directory), make, WholeStateJob), 1)
    resumed = make_job(LocalStore(directory), make, WholeStateJob)
    resumed()
    assert compute_fingerprint(resumed.state) == compute_fingerprint(make())


@pytest.mark.soak
def test_a_state_of_20_000_leaves_is_restored(tmp_path, monkeypatch):
    """Use XLA's default emitters; the older ones, which most tests use, need 22 GB for so many results."""
    monkeypatch.delenv("XLA_FLAGS")
    code = "import sys, tests.checkpoint.test_leaves as this; this.save_and_restore_many_leaves(this.Path(sys.argv[1]))"
    wait_for_output(start_python("-c", code, str(tmp_path), devices=8))


class OneDeviceJob(WholeStateJob):
    """One device, because eight replicas of 3 GB exceed the memory of a small machine."""

    def abstract_state(self) -> Any:
        place = SingleDeviceSharding(jax.devices()[0])
        shapes = jax.eval_shape(self.init)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)


@pytest.mark.soak
def test_a_leaf_of_3_gigabytes_is_restored(make_store):
    struck = make_job(make_store("struck"), lambda: {"huge": jnp.arange(750_000_000, dtype=jnp.uint32)}, OneDeviceJob)
    stop_after(struck, 1)
    struck.state = None
    resumed = make_job(struck.store, struck.make, OneDeviceJob)
    resumed()
    assert bool((resumed.state["huge"] == jnp.arange(750_000_000, dtype=jnp.uint32)).all())
    del struck, resumed
    gc.collect()  # a job keeps its arrays in reference cycles, and the next test needs the memory
