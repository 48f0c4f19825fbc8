"""Arrays in block files: written by the holders of shards, read on any mesh, and verified byte by byte."""

import copy
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from runner.checkpoint import blocks
from runner.checkpoint.arrays import encode_index, read_index
from runner.checkpoint.manifest import parse_manifest, seal
from runner.storage import LocalStore, compute_crc32c
from tests.support.tiny_jobs import FACTORISATIONS, are_leaves_equal, make_full_mesh

SHARDED = PartitionSpec("fsdp", ("data", "tensor"))
SHARDINGS = {
    **{f"mesh {sizes}": NamedSharding(make_full_mesh(*sizes), SHARDED) for sizes in FACTORISATIONS},
    "first axis": NamedSharding(make_full_mesh(2, 2, 2), PartitionSpec(("data", "fsdp", "tensor"))),
    "second axis": NamedSharding(make_full_mesh(2, 2, 2), PartitionSpec(None, "tensor")),
    "copies": NamedSharding(make_full_mesh(2, 2, 2), PartitionSpec()),
    "one device": SingleDeviceSharding(jax.devices()[3]),
}
WHOLE = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
SMALL_PIECE_BYTES = 99  # bytes; splits elements


class BlockDirectory:
    """The files that one process has written to a directory."""

    def __init__(self, directory, leaves):
        self.directory = directory
        (directory / "arrays.1").mkdir(parents=True, exist_ok=True)
        self.table = blocks.write_packs(directory, "arrays.1/0", blocks.copy_to_host(leaves))
        self.reads = []

    def open(self, name, begin, end):
        self.reads.append((name, begin, end))
        return (self.directory / name).read_bytes()[begin:end]

    def fetch(self, run):
        return blocks.read_pieces(self.open, run)

    def read(self, abstract):
        return blocks.read_blocks(self.fetch, self.table.shards, abstract)


def make_abstract(array, sharding):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def make_matrix(place):
    return jax.device_put(WHOLE, SHARDINGS[place])


@pytest.mark.parametrize("written", SHARDINGS)
def test_blocks_written_in_one_sharding_are_read_in_every_other(tmp_path, written):
    array = make_matrix(written)
    files = BlockDirectory(tmp_path, {"w": array})
    for sharding in SHARDINGS.values():
        read = files.read({"w": make_abstract(array, sharding)})["w"]
        assert read.sharding == sharding
        assert are_leaves_equal(read, array)


@pytest.mark.parametrize("written", ["mesh (2, 2, 2)", "second axis", "copies"])
@pytest.mark.parametrize("read", ["mesh (1, 8, 1)", "first axis", "one device"])
def test_a_shard_can_be_split_at_any_byte(tmp_path, monkeypatch, written, read):
    monkeypatch.setattr(blocks, "PIECE_BYTES", SMALL_PIECE_BYTES)
    array = make_matrix(written)
    files = BlockDirectory(tmp_path, {"w": array})
    shards = files.table.shards["w"]
    sizes = [[piece.size for piece in shard.pieces] for shard in shards]
    assert all(len(pieces) > 1 for pieces in sizes)
    assert all(set(pieces[:-1]) == {SMALL_PIECE_BYTES} and 0 < pieces[-1] <= SMALL_PIECE_BYTES for pieces in sizes)
    assert sum(map(sum, sizes)) == WHOLE.nbytes, "each element is stored once, regardless of replicas"
    assert are_leaves_equal(files.read({"w": make_abstract(array, SHARDINGS[read])})["w"], array)


LEAVES = {
    "bool": np.arange(24) % 3 == 0,
    "bfloat16": jnp.linspace(-3, 3, 16, dtype=jnp.bfloat16),
    "float16": np.linspace(-3, 3, 16, dtype=np.float16),
    "int8": np.arange(-8, 8, dtype=np.int8),
    "uint32": np.arange(16, dtype=np.uint32) * 0x0FFFFFFF,
    "int32 matrix": np.arange(64, dtype=np.int32).reshape(8, 8),
    "cube": np.arange(8 * 3 * 5, dtype=np.float32).reshape(8, 3, 5),
    "scalar": np.int32(-7),
    "float scalar": np.float32(0.1),
    "bool scalar": np.bool_(True),
    "empty": np.zeros((0, 8), np.float32),
    "empty inside": np.zeros((8, 0, 2), np.int8),
    "nan": np.array([np.nan, -0.0, np.inf, 0.0, 1.0, 2.0, 3.0, 4.0], np.float32),
    "params/deep.kernel:0 %": np.arange(8, dtype=np.float32),
    "..": np.arange(8, dtype=np.float32),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("piece_bytes", [3, 64 << 20])
def test_every_kind_of_leaf_is_restored_bit_identically(tmp_path, monkeypatch, name, piece_bytes):
    monkeypatch.setattr(blocks, "PIECE_BYTES", piece_bytes)
    value = LEAVES[name]
    axis = PartitionSpec() if value.ndim == 0 else PartitionSpec("fsdp")
    places = [NamedSharding(make_full_mesh(2, 4, 1), axis), NamedSharding(make_full_mesh(2, 2, 2), PartitionSpec())]
    for number, place in enumerate(places):
        array = jax.device_put(value, place)
        files = BlockDirectory(tmp_path / str(number), {name: array})
        assert all((tmp_path / str(number) / piece).is_file() for piece in files.table.files)
        assert all(piece.startswith("arrays.1/0.") for piece in files.table.files)
        for other in places:
            read = files.read({name: make_abstract(array, other)})[name]
            assert (read.shape, read.dtype, read.sharding) == (array.shape, array.dtype, other)
            assert are_leaves_equal(read, array)


def test_leaves_with_similar_names_are_kept_apart(tmp_path):
    place = SHARDINGS["one device"]
    names = ["a.b", "a/b", "a%2Fb", "a b", "a.0", "a", "a.0.0"]
    leaves = {name: jax.device_put(np.float32([n, -n]), place) for n, name in enumerate(names)}
    files = BlockDirectory(tmp_path, leaves)
    read = files.read({name: make_abstract(leaf, place) for name, leaf in leaves.items()})
    assert list(read) == names
    assert all(are_leaves_equal(read[name], leaves[name]) for name in names)


def test_the_table_lists_size_and_crc_of_every_file(tmp_path):
    files = BlockDirectory(tmp_path, {"w": make_matrix("mesh (2, 2, 2)"), "empty": jnp.zeros((0, 2))})
    on_disk = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files.table.files.keys() == on_disk
    for name, (size, digest) in files.table.files.items():
        content = (tmp_path / name).read_bytes()
        assert [len(content), compute_crc32c(content)] == [size, digest]


def test_a_process_fetches_only_the_pieces_that_it_needs(tmp_path):
    files = BlockDirectory(tmp_path, {"w": make_matrix("first axis"), "other": make_matrix("first axis")})
    quarter = jax.ShapeDtypeStruct((2, 24), np.float32, sharding=SHARDINGS["one device"])
    rows = files.table.shards["w"]
    assert [shard.start for shard in rows] == [[2 * n, 0] for n in range(8)]
    read = files.read({"w": quarter})["w"]
    assert files.reads == [(piece.file, piece.begin, piece.end) for piece in rows[0].pieces]
    assert (np.asarray(read) == WHOLE[:2]).all()


def test_tables_of_several_processes_are_merged(tmp_path):
    """Merge the tables of two processes with four devices each, in any order."""
    array = make_matrix("first axis")
    host = blocks.copy_to_host({"w": array})
    files = BlockDirectory(tmp_path, {})
    parts = [blocks.write_packs(tmp_path, f"arrays.1/{n}", {"w": host["w"][4 * n : 4 * n + 4]}) for n in range(2)]
    files.table.shards = {"w": [shard for part in reversed(parts) for shard in part.shards["w"]]}
    read = files.read({"w": make_abstract(array, SHARDINGS["mesh (2, 2, 2)"])})
    assert are_leaves_equal(read["w"], array)


def test_arrays_can_be_donated_after_the_copy_to_the_host(tmp_path):
    array = make_matrix("mesh (2, 2, 2)")
    host = blocks.copy_to_host({"w": array})
    jax.jit(lambda x: x * 0, donate_argnums=0)(array).block_until_ready()
    files = BlockDirectory(tmp_path, {})
    files.table = blocks.write_packs(tmp_path, "arrays.1/0", host)
    read = files.read({"w": jax.ShapeDtypeStruct(WHOLE.shape, WHOLE.dtype, sharding=SHARDINGS["copies"])})
    assert (np.asarray(read["w"]) == WHOLE).all()


# Damage.


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_bit, "does not match its CRC-32C"),
        (truncate, r"has \d+ bytes from \d+ on, the manifest says \d+"),
        (remove, "is missing"),
    ],
)
def test_a_damaged_block_is_reported_by_name(tmp_path, monkeypatch, damage, reason):
    monkeypatch.setattr(blocks, "PIECE_BYTES", SMALL_PIECE_BYTES)
    monkeypatch.setattr(blocks, "PACK_BYTES", WHOLE.nbytes)
    array = make_matrix("mesh (2, 2, 2)")
    files = BlockDirectory(tmp_path, {"a": array, "w": array})
    piece = files.table.shards["w"][-1].pieces[-1]
    damage(tmp_path / piece.file)
    abstract = {name: make_abstract(array, SHARDINGS["first axis"]) for name in ("a", "w")}
    with pytest.raises(blocks.DamagedBlockError, match=reason) as caught:
        files.read(abstract)
    assert str(caught.value).startswith(f"{piece.file} ")
    del abstract["w"]
    if len(files.table.files) > 1:
        assert are_leaves_equal(files.read(abstract)["a"], array)


def test_packs_are_cut_at_their_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "PIECE_BYTES", 64)
    monkeypatch.setattr(blocks, "PACK_BYTES", 200)
    array = make_matrix("mesh (2, 2, 2)")
    files = BlockDirectory(tmp_path, {"a": array, "w": array})
    assert {size for size, _ in files.table.files.values()} == {192}
    assert list(files.table.files) == [f"arrays.1/0.{n}.bin" for n in range(2 * WHOLE.nbytes // 192)]
    assert are_leaves_equal(files.read({"w": make_abstract(array, SHARDINGS["first axis"])})["w"], array)


def test_adjacent_pieces_are_read_at_once(tmp_path):
    leaves = {str(n): jax.device_put(WHOLE + n, SHARDINGS["mesh (2, 2, 2)"]) for n in range(20)}
    files = BlockDirectory(tmp_path, leaves)
    files.read({name: make_abstract(leaf, SHARDINGS["copies"]) for name, leaf in leaves.items()})
    assert files.reads == [("arrays.1/0.0.bin", 0, 20 * WHOLE.nbytes)]
    files.reads.clear()
    files.read({name: make_abstract(leaves[name], SHARDINGS["copies"]) for name in ("3", "4", "9")})
    size = WHOLE.nbytes
    assert sorted(files.reads) == [("arrays.1/0.0.bin", 3 * size, 5 * size), ("arrays.1/0.0.bin", 9 * size, 10 * size)]


@pytest.mark.parametrize("kind", ["pipe", "link", "file"])
def test_a_pack_replaces_what_lies_at_its_name(tmp_path, kind):
    """A pipe would wait for its reader, and a link lead to a file of somebody else."""
    (tmp_path / "arrays.1").mkdir()
    path, elsewhere = tmp_path / "arrays.1" / "0.0.bin", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"untouched")
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(elsewhere), "file": lambda path: path.touch()}[kind](path)
    array = make_matrix("copies")
    files = BlockDirectory(tmp_path, {"w": array})
    assert are_leaves_equal(files.read({"w": make_abstract(array, SHARDINGS["copies"])})["w"], array)
    assert elsewhere.read_bytes() == b"untouched"


WRONG_SHARDS = {
    "a piece beyond its file": lambda shard: shard["pieces"][0].__setitem__(2, 10**15),
    "a piece before its file": lambda shard: shard["pieces"][0].__setitem__(1, -1),
    "a piece of an unknown file": lambda shard: shard["pieces"][0].__setitem__(0, "../../secret"),
    "a piece that is no list": lambda shard: shard["pieces"].__setitem__(0, "arrays.1/0.0.bin"),
    "a negative shape": lambda shard: shard["shape"].__setitem__(0, -1),
    "a start that is no number": lambda shard: shard["start"].__setitem__(0, "0"),
    "a huge shape": lambda shard: shard["shape"].__setitem__(0, 10**15),
    "a piece twice": lambda shard: shard["pieces"].append(shard["pieces"][0]),
}


@pytest.mark.parametrize("change", WRONG_SHARDS)
def test_a_wrong_table_of_shards_is_an_error_of_its_values(tmp_path, change):
    """Whatever it says, nothing outside of the files is read, and no memory is allocated for it."""
    array = make_matrix("copies")
    files = BlockDirectory(tmp_path, {"w": array})
    store = LocalStore(tmp_path)
    store.write("index", encode_index(files.table))
    record = parse_manifest(store.read("index"))
    WRONG_SHARDS[change](record["shards"]["w"][0])
    store.write("index", seal(record))

    def read():
        files.table.shards = read_index(store, ".", "index").shards
        files.read({"w": make_abstract(array, SHARDINGS["copies"])})

    with pytest.raises(ValueError, match=r"piece|shard|bytes|elements"):
        read()


def test_an_unreachable_store_is_not_reported_as_damage(tmp_path):
    array = make_matrix("copies")
    files = BlockDirectory(tmp_path, {"w": array})

    def fail(*_):
        raise TimeoutError("not within 120 s")

    files.open = fail
    with pytest.raises(TimeoutError):
        files.read({"w": make_abstract(array, SHARDINGS["copies"])})


@pytest.mark.parametrize("read", ["mesh (2, 2, 2)", "first axis", "copies", "one device"])
def test_shards_that_do_not_cover_a_block_are_rejected(tmp_path, read):
    array = make_matrix("mesh (2, 2, 2)")
    files = BlockDirectory(tmp_path, {"w": array})
    for number in range(len(files.table.shards["w"])):
        shards = copy.deepcopy(files.table.shards)
        del shards["w"][number]
        with pytest.raises(
            blocks.DamagedBlockError, match=r"the manifest's shards hold \d+ of \d+ elements of a block"
        ):
            blocks.read_blocks(files.fetch, shards, {"w": make_abstract(array, SHARDINGS[read])})


def test_a_leaf_without_any_shard_is_rejected(tmp_path):
    files = BlockDirectory(tmp_path, {"w": make_matrix("copies")})
    with pytest.raises(blocks.DamagedBlockError, match="hold 0 of 384 elements"):
        blocks.read_blocks(files.fetch, {"w": []}, {"w": make_abstract(WHOLE, SHARDINGS["copies"])})


# Owners.


class Chip(NamedTuple):
    """Device of a pod, of which this process has only simulated ones."""

    process_index: int
    number: int


class PodSharding:
    """Sharding of `SHARDINGS` as if two of its devices at a time belonged to one process."""

    def __init__(self, place):
        self._sharding = SHARDINGS[place]

    def devices_indices_map(self, shape):
        found = self._sharding.devices_indices_map(shape)
        return {Chip(device.id // 2, device.id): index for device, index in found.items()}


@pytest.mark.parametrize("place", SHARDINGS)
@pytest.mark.parametrize("shape", [(16, 24), (32, 8), (0, 8)])
def test_the_owners_of_a_block_are_the_processes_that_have_written_its_elements(place, shape):
    array = jax.device_put(np.zeros(shape, np.float32), SHARDINGS[place])
    owners = blocks.Owners.from_sharding(PodSharding(place), shape)
    assert owners is not None
    written = np.full(shape, -1)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            written[shard.index] = shard.device.id // 2
    assert (written >= 0).all()
    random = np.random.default_rng(0)
    for _ in range(200):
        start = [int(random.integers(0, size + 1)) for size in shape]
        extent = [int(random.integers(0, size - begin + 1)) for size, begin in zip(shape, start, strict=True)]
        block = written[tuple(slice(begin, begin + size) for begin, size in zip(start, extent, strict=True))]
        assert owners.find(shape, start, extent) == set(block.flat)


BAD_OWNERS = {
    "other axes": blocks.Owners([2], [[2, 0]]),
    "no blocks": blocks.Owners([0, 1], []),
    "unequal blocks": blocks.Owners([3, 1], [[3, 0]]),
    "too few runs": blocks.Owners([4, 1], [[3, 0]]),
    "too many runs": blocks.Owners([4, 1], [[5, 0]]),
    "no runs": blocks.Owners([4, 1], []),
}


@pytest.mark.parametrize("owners", BAD_OWNERS.values(), ids=BAD_OWNERS)
def test_owners_that_do_not_fit_an_array_say_nothing(owners):
    assert owners.find((16, 24), (0, 0), (16, 24)) is None


def test_the_owners_of_very_many_blocks_are_not_looked_for():
    owners = blocks.Owners([1 << 40, 1], [[1 << 40, 7]])
    assert owners.find((1 << 40, 1), (0, 0), (1 << 40, 1)) is None
    assert owners.find((1 << 40, 1), (5, 0), (9, 1)) == {7}
