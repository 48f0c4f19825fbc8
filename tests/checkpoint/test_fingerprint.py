"""Fingerprint of a state: independent of devices and sharding, and changed by every bit."""

import hashlib
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from runner.checkpoint.fingerprint import (
    LeafLayout,
    ReplicaError,
    _digest_shards,
    combine_digests,
    compute_block_digest,
    compute_fingerprint,
    compute_leaf_digest,
    compute_leaf_digests,
    describe_leaves,
    list_leaf_names,
)

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.int8, np.int32, np.uint32, np.bool_]
DEVICES_8 = np.array(jax.devices())
SHARDINGS = [
    *(NamedSharding(Mesh(DEVICES_8[:n], ("a",)), PartitionSpec("a")) for n in (1, 2, 4, 8)),
    NamedSharding(Mesh(DEVICES_8, ("a",)), PartitionSpec()),
    NamedSharding(Mesh(DEVICES_8, ("a",)), PartitionSpec(None, "a")),
    NamedSharding(Mesh(DEVICES_8[::-1].reshape(4, 2), ("a", "b")), PartitionSpec("b", "a")),
    NamedSharding(Mesh(DEVICES_8.reshape(4, 2), ("a", "b")), PartitionSpec(("b", "a"))),
    SingleDeviceSharding(DEVICES_8[5]),
]


def make_random_bits(dtype, shape, seed=0):
    """Return random bits, including NaNs."""
    generator = np.random.default_rng(seed)
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(np.bool_)
    return generator.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]


def get_words(array):
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def compute_reference_digest(array):
    """Compute the documented digest of a leaf with Python integers."""
    lanes = [0, 0]
    for position, word in enumerate(get_words(array).ravel().tolist()):
        mixed = word ^ (position * 0x9E3779B1 % 2**32)
        mixed ^= mixed >> 16
        for lane, (multiplier, shift) in enumerate(((0x85EBCA6B, 15), (0x27D4EB2F, 13))):
            mixed = mixed * multiplier % 2**32
            mixed ^= mixed >> shift
            lanes[lane] = (lanes[lane] + mixed) % 2**32
    return lanes


@pytest.mark.parametrize("dtype", [*DTYPES, np.float64, np.complex64])
@pytest.mark.parametrize("part_bytes", [16, 1 << 20])
def test_host_and_device_digests_of_blocks_are_equal(monkeypatch, dtype, part_bytes):
    monkeypatch.setattr("runner.checkpoint.fingerprint._PART_BYTES", part_bytes)
    array = make_random_bits(dtype, (8, 6))
    with jax.enable_x64(True):
        on_device = jax.jit(compute_leaf_digest, static_argnums=1)
        for start, block in (((0, 0), array), ((4, 0), array[4:]), ((2, 3), array[2:4, 3:]), ((0, 0), array[:0])):
            assert (
                compute_block_digest(block, array.shape, start).tolist()
                == on_device(block, array.shape, start).tolist()
            )
        scalar = array[0, 0].reshape(())
        assert compute_block_digest(scalar, (), ()).tolist() == on_device(scalar, ()).tolist()


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=() if dtype in (np.float32, ml_dtypes.bfloat16, np.bool_) else pytest.mark.soak)
        for dtype in DTYPES
    ],
)
def test_digest_does_not_depend_on_devices_and_sharding(dtype):
    array = make_random_bits(dtype, (8, 16))
    digests = {
        tuple(np.asarray(compute_leaf_digest(jax.device_put(array, sharding))).tolist()) for sharding in SHARDINGS
    }
    assert digests == {tuple(compute_reference_digest(array))}


@pytest.mark.parametrize("dtype", [*DTYPES, jax.random.key(0).dtype], ids=str)
def test_no_device_computes_on_leaves_without_elements(dtype):
    """Such a computation crashes the compiler of some versions of XLA."""
    mesh, replicated = Mesh(DEVICES_8, ("a",)), PartitionSpec()
    leaves = [jnp.zeros(0, dtype), jnp.zeros((3, 0), dtype), jnp.int32(4)]
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        leaves[:2] = jax.random.split(jax.random.key(0), 0), jax.random.split(jax.random.key(0), (3, 0))
    leaves = jax.device_put(leaves, NamedSharding(mesh, replicated))
    assert list(compute_leaf_digests(leaves).values())[:2] == ["0" * 16] * 2
    program = _digest_shards.lower(leaves, mesh, (replicated,) * 3).as_text()
    assert "tensor<i32>" in program
    assert not re.search(r"tensor<(\d+x)*0x", program)


def test_fingerprint_of_a_tree_does_not_depend_on_sharding():
    tree = {"w": make_random_bits(np.float32, (8, 8)), "b": [make_random_bits(ml_dtypes.bfloat16, (8, 8))]}
    prints = {compute_fingerprint(jax.device_put(tree, sharding)) for sharding in SHARDINGS}
    assert len(prints) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_changes_both_lanes(dtype):
    array = make_random_bits(dtype, (4, 7))
    bits = 1 if dtype == np.bool_ else array.dtype.itemsize * 8
    flipped = np.repeat(array[None], array.size * bits, axis=0)
    for variant, (element, bit) in enumerate(itertools.product(range(array.size), range(bits))):
        flat = get_words(flipped[variant]).reshape(-1)
        flat[element] ^= flat.dtype.type(1 << bit)
    assert all((get_words(variant) != get_words(array)).sum() == 1 for variant in flipped)
    digests = np.asarray(jax.jit(jax.vmap(compute_leaf_digest))(flipped))
    assert (digests != np.asarray(compute_leaf_digest(jnp.asarray(array)))).all()
    assert len({tuple(digest) for digest in digests.tolist()}) == len(digests)


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_swapping_two_elements_changes_the_digest(dtype):
    array = np.arange(24).astype(dtype).reshape(4, 6)
    pairs = list(itertools.combinations(range(array.size), 2))
    swapped = np.repeat(array.reshape(1, -1), len(pairs), axis=0)
    for variant, (a, b) in enumerate(pairs):
        swapped[variant, [a, b]] = swapped[variant, [b, a]]
    digests = np.asarray(jax.vmap(compute_leaf_digest)(swapped.reshape(-1, 4, 6)))
    assert not (digests == np.asarray(compute_leaf_digest(jnp.asarray(array)))).all(axis=1).any()


def test_two_flipped_sign_bits_do_not_cancel():
    """Products carry bits only upwards, so weak mixing would lose the highest bit."""
    array = make_random_bits(np.uint32, (1 << 14,))
    digests = jax.jit(
        jax.vmap(lambda word, position: compute_leaf_digest(jnp.where(jnp.arange(64) == position, word, 0)))
    )
    position = jnp.arange(array.size) % 64
    change = np.asarray(digests(array, position) - digests(array ^ np.uint32(1 << 31), position))
    assert len(np.unique(change, axis=0)) > 0.99 * len(change)


def test_shape_dtype_and_name_are_part_of_the_fingerprint():
    zeros = jnp.zeros((4, 6), jnp.float32)
    trees = [
        {"w": zeros},
        {"w": zeros.reshape(6, 4)},
        {"w": zeros.reshape(-1)},
        {"w": zeros.astype(jnp.int32)},
        {"v": zeros},
        {"w": {"w": zeros}},
        {"w": zeros, "v": zeros},
    ]
    assert len({compute_fingerprint(tree) for tree in trees}) == len(trees)


def test_swapping_two_leaves_changes_the_fingerprint():
    a, b = jnp.arange(4.0), jnp.arange(4.0) + 1
    assert compute_fingerprint({"x": a, "y": b}) != compute_fingerprint({"x": b, "y": a})


def test_random_keys_and_wide_types_have_a_digest():
    assert compute_fingerprint({"key": jax.random.key(0)}) != compute_fingerprint({"key": jax.random.key(1)})
    assert compute_fingerprint({"z": jnp.asarray([1 + 2j])}) != compute_fingerprint({"z": jnp.asarray([2 + 1j])})


def test_negative_zero_and_zero_have_different_digests():
    assert compute_fingerprint({"w": jnp.asarray([0.0])}) != compute_fingerprint({"w": jnp.asarray([-0.0])})


def test_the_fingerprint_is_blake2b_over_sorted_leaf_lines():
    leaves = {
        "w": {"shape": [2, 3], "dtype": "float32", "digest": "00000000000000ff"},
        "b.x": {"shape": [], "dtype": "int32", "digest": "0123456789abcdef"},
    }
    text = b"b.x int32  0123456789abcdef\nw float32 2,3 00000000000000ff\n"
    assert combine_digests(leaves) == hashlib.blake2b(text, digest_size=16).hexdigest()
    assert combine_digests(dict(reversed(leaves.items()))) == combine_digests(leaves)


def test_the_fingerprint_never_changes_between_versions():
    """Manifests on disk contain the fingerprint; if this fails, no existing checkpoint verifies."""
    tree = {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "step": jnp.int32(7)}
    assert compute_leaf_digests(tree)["step"] == "{:08x}{:08x}".format(
        *compute_reference_digest(np.full((), 7, np.int32))
    )
    assert compute_fingerprint(tree) == "192489f757e2661fcc846ca44b505c32"


def test_leaf_names_are_dotted_paths_in_the_order_of_leaves():
    tree = {"b": [jnp.zeros(2), jnp.zeros(3)], "a": {"k": jnp.zeros((4, 5), jnp.int8)}}
    assert list_leaf_names(tree) == ["a.k", "b.0", "b.1"]
    assert describe_leaves(tree)["a.k"] == {"shape": [4, 5], "dtype": "int8"}
    assert list(describe_leaves(tree)) == list_leaf_names(tree)


def test_arrays_can_be_donated_once_the_digest_is_dispatched():
    array = jnp.arange(1 << 20, dtype=jnp.float32)
    (expected,) = jax.device_get(LeafLayout([array]).dispatch([array]))
    for _ in range(5):
        pending = LeafLayout([array]).dispatch([array])
        array = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        assert (jax.device_get(pending)[0] == expected).all()
        array = jax.jit(lambda x: x - 1, donate_argnums=0)(array)


def make_array_of_copies(sharding, shape, copies):
    """Return an array whose replicas have the contents `copies` by device id, instead of equal ones."""
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    parts = []
    for device, index in sharding.devices_indices_map(shape).items():
        part = whole[index].copy()
        part.flat[0] += copies.get(device.id, 0)
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


@pytest.mark.parametrize(
    ("mesh", "spec", "copies", "named"),
    [
        ((8,), PartitionSpec(), {3: 1.0}, "device 3 (process 0) has"),
        ((4, 2), PartitionSpec("b"), {2: 1.0}, "device 2 (process 0) has"),
        ((4, 2), PartitionSpec("a"), {5: 1.0}, "device 4 (process 0), device 5 (process 0) have"),  # two replicas
        ((8,), PartitionSpec(), {1: 1.0, 6: 2.0}, "device 1 (process 0), device 6 (process 0) have"),
    ],
)
def test_a_device_with_a_differing_replica_is_reported_with_its_leaf(mesh, spec, copies, named):
    sharding = NamedSharding(Mesh(DEVICES_8.reshape(mesh), ("a", "b")[: len(mesh)]), spec)
    good = jax.device_put(jnp.ones((8, 4)), sharding)
    tree = {"bad": make_array_of_copies(sharding, (8, 4), copies), "good": good}
    with pytest.raises(ReplicaError) as caught:
        compute_leaf_digests(tree)
    assert str(caught.value) == f"bad: {named} other bits than the replicas of the same shard"
    whole = make_array_of_copies(sharding, (8, 4), {})
    assert compute_leaf_digests({"bad": whole}) == compute_leaf_digests(
        {"bad": jax.device_put(np.asarray(whole), DEVICES_8[0])}
    )
