"""Every kind of leaf that a state can have comes back with the same bits, or is refused before anything is committed.

The kinds are found: every element type that jax has, in every shape, strong and weak. A run that is stopped and resumed
is compared with an undisturbed one, on a disk and in a bucket.
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
WIDE = {"int64", "uint64", "float64", "complex128"}  # only with x64
REFUSED = {"int1", "uint1", "int2", "uint2", "int4", "uint4"}
REFUSED |= {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
SHAPES = ((), (5,), (4, 6), (0,), (3, 0))


def values(dtype: str, shape: tuple[int, ...]) -> jax.Array:
    """Different bits in every element."""
    number = int(np.prod(shape))
    return (jnp.arange(number) % 7 + 1).astype(dtype).reshape(shape)


def keys(implementation: str, shape: tuple[int, ...]) -> jax.Array:
    key = jax.random.key(3, impl=implementation)
    return jax.random.split(key, shape) if shape else key


LEAVES = {f"{dtype}{list(shape)}": (values, dtype, shape) for dtype, shape in itertools.product(DTYPES, SHAPES)}
LEAVES |= {
    f"key-{implementation}{list(shape)}": (keys, implementation, shape)
    for implementation, shape in itertools.product(("threefry2x32", "rbg", "unsafe_rbg"), ((), (3,), (2, 2), (0,)))
}
# Weakly typed: what a literal in `init` becomes.
LEAVES |= {f"weak-{value!r}": (lambda value: value, value) for value in (1.1, 3, True, 1.1 + 2j)}
LEAVES |= {f"weak-array-{value!r}": (jnp.asarray, value) for value in (1.1, 3, 1.1 + 2j)}
LEAVES |= {f"numpy-{dtype}": (np.ones, (3,), dtype) for dtype in ("float32", "int32", "bool")}
LEAVES |= {"none": (lambda: None,), "numpy-scalar": (np.float32, 1.1)}


def is_refused(kind: str) -> bool:
    return kind.split("[")[0] in REFUSED


class Keeper(RestoreableJob):
    """Carries leaves from step to step; products with bfloat16 numbers show whether they are still of the same type."""

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


def keeper(store: Any, make: Any, job_class: type[Keeper] = Keeper, **checkpoint: Any) -> Keeper:
    spec = ExecutionSpec(
        name="keeper",
        job="tests.checkpoint.test_leaves:Keeper",
        directory=str(store.root or "unused"),
        checkpoint={"every_steps": 100, **checkpoint},
    )
    job = job_class(spec)
    job.store, job.make = store, make
    return job


def forms(state: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.aval.weak_type), state)


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.soak)])
def make_store(request, tmp_path):
    return lambda name: LocalStore(tmp_path / name) if request.param == "disk" else make_memory_bucket()


def make_leaves(kinds: Any) -> dict[str, Any]:
    return {kind: LEAVES[kind][0](*LEAVES[kind][1:]) for kind in kinds}


def is_wide(kind: str) -> bool:
    return kind.split("[")[0] in WIDE


NARROW = [kind for kind in LEAVES if not is_refused(kind) and not is_wide(kind)]


def stop_resume_and_compare(make_store: Any, kinds: list[str]) -> None:
    whole, struck = (keeper(make_store(name), lambda: make_leaves(kinds)) for name in ("whole", "struck"))
    whole()
    stop_after(struck, 2)
    resumed = keeper(struck.store, struck.make)
    resumed()
    assert [event["step"] for event in read_log(struck.store, "events") if event["event"] == "restore"] == [2]
    assert forms(resumed.state) == forms(whole.state)
    assert compute_leaf_digests(resumed.state) == compute_leaf_digests(whole.state)
    manifest = read_committed(struck.store)[4]
    looked_at = {leaf.name: leaf for leaf in read_leaves(struck.store, "checkpoints/4", manifest, manifest.leaves)}
    assert [leaf.problem for leaf in looked_at.values() if leaf.problem is not None] == []
    assert describe_leaves(resumed.state) == {
        name: describe_leaves([leaf.array])["0"] for name, leaf in looked_at.items()
    }


def test_leaves_of_all_kinds_at_once_come_back_with_their_types_and_bits(make_store):
    stop_resume_and_compare(make_store, NARROW)


def test_wide_leaves_come_back_where_jax_has_64_bits(make_store):
    with jax.enable_x64(True):
        stop_resume_and_compare(make_store, [kind for kind in LEAVES if is_wide(kind)])


@pytest.mark.soak
@pytest.mark.parametrize("kind", NARROW)
def test_a_leaf_of_each_kind_comes_back_alone(make_store, kind):
    stop_resume_and_compare(make_store, [kind])


@pytest.mark.parametrize("kind", [kind for kind in LEAVES if is_refused(kind)])
def test_a_leaf_that_cannot_come_back_is_refused_with_nothing_claimed(tmp_path, kind):
    job = keeper(LocalStore(tmp_path), lambda: make_leaves([kind]))
    with pytest.raises(InvalidError, match=rf"leaf\..*: {kind.split('[')[0]} cannot be saved"):
        job()
    assert not list(tmp_path.iterdir())


# The tree.

TREES = {
    "one array": lambda: jnp.arange(4),
    "nested": lambda: {"a": [jnp.zeros(3), (jnp.ones(2), None)], "b": {"c": jnp.float32(1)}},
    "odd names": lambda: {name: jnp.float32(1) for name in ("a/b", "..", "a b", "ü", ".zarray", "%2F", "0", "\\", "'")},
    "long names": lambda: {"n" * 200: jnp.float32(1)},
}
REFUSED_TREES = {
    "no leaf": (dict, "no leaf"),
    "nothing": (lambda: None, "no leaf"),
    "one dotted path": (
        lambda: {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2)}},
        r"a\.b: 2 leaves have this dotted path",
    ),
    "a very long name": (lambda: {"n" * 201: jnp.float32(1)}, "its dotted path has 201 bytes"),
}


class Whole(Keeper):
    """The whole state is what `make` makes."""

    def init(self) -> Any:
        return self.make()

    def advance(self, state: Any) -> Any:
        return state


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_comes_back(make_store, kind):
    struck = keeper(make_store("struck"), TREES[kind], Whole)
    stop_after(struck, 2)
    resumed = keeper(struck.store, struck.make, Whole)
    resumed()
    assert jax.tree.structure(resumed.state) == jax.tree.structure(struck.state)
    assert compute_fingerprint(resumed.state) == compute_fingerprint(struck.state)


@pytest.mark.parametrize("kind", REFUSED_TREES)
def test_a_tree_that_cannot_be_kept_is_refused_with_nothing_claimed(make_store, kind):
    make, message = REFUSED_TREES[kind]
    job = keeper(make_store("refused"), make, Whole)
    with pytest.raises(InvalidError, match=message):
        job()
    assert not job.store.list_names("")


# On the way.

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
def test_a_state_that_changes_its_form_ends_the_run_before_it_is_committed(make_store, change):
    alter, message = CHANGES[change]

    class Changing(Whole):
        def advance(self, state):
            return {"leaf": alter(state["leaf"])} if self.step == 2 else state

    job = keeper(make_store("changing"), lambda: {"leaf": jnp.zeros(3)}, Changing, every_steps=1, keep_last=1)
    with pytest.raises(StateError, match=message):
        job()
    assert set(read_committed(job.store)) in ({1}, {2})  # in a bucket a save is left out while another is on its way


def test_strong_keeps_bits_and_dtypes():
    tree = {"weak": jnp.asarray(1.1), "strong": jnp.float32(2), "flag": True, "key": jax.random.key(0)}
    made = jax.jit(lambda: make_strongly_typed(tree))()
    assert describe_leaves(made) == describe_leaves({name: jnp.asarray(leaf) for name, leaf in tree.items()})
    assert not any(leaf.aval.weak_type for leaf in jax.tree.leaves(made))


# The first save of a run.


class Losing:
    """A writer that loses the bits of the first save once they are durable: the bytes are whole, and others."""

    def __init__(self, writer):
        self.writer, self.num_saves = writer, 0

    def start(self, target, leaves):
        self.num_saves += 1
        lost = {name: leaf + 1 if name == "leaf" and self.num_saves == 1 else leaf for name, leaf in leaves.items()}
        return self.writer.start(target, lost)

    def __getattr__(self, name):
        return getattr(self.writer, name)


class FirstSaveIsLost(Keeper):
    def restore_or_init(self):
        self.checkpointer._writer = Losing(self.checkpointer._writer)
        super().restore_or_init()

    def init(self):
        return {"leaf": self.make(), "count": jnp.int32(0)}

    def advance(self, state):
        self.checkpointer.wait_until_finished()
        return state | {"count": state["count"] + 1}


def test_the_first_save_of_a_run_is_read_back_before_it_is_committed(make_store, capsys, monkeypatch):
    read = []
    real = arrays.read_stored_block
    monkeypatch.setattr(
        arrays,
        "read_stored_block",
        lambda store, directory, *args: read.append(directory) or real(store, directory, *args),
    )
    mesh = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    job = keeper(make_store("lost"), lambda: jnp.arange(64.0), FirstSaveIsLost, every_steps=1, keep_last=9)
    job.abstract_state = lambda: {
        "leaf": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=mesh),
        "count": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh.mesh, PartitionSpec())),
    }
    job()
    assert list(read_committed(job.store)) == [2, 3, 4]
    assert (
        "SAVE FAILED at step 1: ValueError: what was read back of leaf is not what was saved" in capsys.readouterr().err
    )
    assert read == ["checkpoints/1"] * 2 + ["checkpoints/2"] * 2


# Many, and large.


def test_the_programs_that_a_save_compiles_do_not_grow_with_the_number_of_leaves(tmp_path):
    """A program over n leaves takes longer to compile, a leaf, the more there are."""

    def sizes(number: int) -> tuple[int, int]:
        job = keeper(LocalStore(tmp_path / str(number)), lambda: {str(n): jnp.full(7, n) for n in range(number)}, Whole)
        stop_after(job, 1)
        return _digest_shards._cache_size(), _copy._cache_size()

    assert sizes(2 * CHUNK_LEAVES) == sizes(5 * CHUNK_LEAVES)


def test_every_leaf_stands_in_one_chunk_whatever_their_kinds():
    leaves = [jnp.zeros(1 + n % 5, jnp.int8 if n % 3 else jnp.int16) for n in range(1000)]
    found = make_chunks(leaves)
    assert sorted(place for places in found for place in places) == list(range(1000))
    assert max(map(len, found)) == CHUNK_LEAVES
    assert len(found) == -(-1000 // CHUNK_LEAVES)
    assert make_chunks([]) == []


def keep_many_leaves(directory: Path) -> None:
    """20,000 of them, there and back."""

    def make() -> dict[str, jax.Array]:
        return {str(n): jnp.full(1 + n % 3, n, jnp.float32) for n in range(20_000)}

    stop_after(keeper(LocalStore(directory), make, Whole), 1)
    resumed = keeper(LocalStore(directory), make, Whole)
    resumed()
    assert compute_fingerprint(resumed.state) == compute_fingerprint(make())


@pytest.mark.soak
def test_a_state_of_20_000_leaves_comes_back(tmp_path, monkeypatch):
    """Compiled as users do: XLA's older emitters, which compile most tests sooner, need 22 GB for so many results."""
    monkeypatch.delenv("XLA_FLAGS")
    code = "import sys, tests.checkpoint.test_leaves as this; this.keep_many_leaves(this.Path(sys.argv[1]))"
    wait_for_output(start_python("-c", code, str(tmp_path), devices=8))


class OnOneDevice(Whole):
    """Eight copies of 3 GB are more than a small machine has."""

    def abstract_state(self) -> Any:
        place = SingleDeviceSharding(jax.devices()[0])
        shapes = jax.eval_shape(self.init)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)


@pytest.mark.soak
def test_a_leaf_of_3_gigabytes_comes_back(make_store):
    struck = keeper(make_store("struck"), lambda: {"huge": jnp.arange(750_000_000, dtype=jnp.uint32)}, OnOneDevice)
    stop_after(struck, 1)
    struck.state = None
    resumed = keeper(struck.store, struck.make, OnOneDevice)
    resumed()
    assert bool((resumed.state["huge"] == jnp.arange(750_000_000, dtype=jnp.uint32)).all())
    del struck, resumed
    gc.collect()  # what a job holds it holds in cycles, and the next of these needs the memory
