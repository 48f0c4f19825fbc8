"""Arrays in block files: written by the holders of shards, read on any mesh, and verified byte by byte."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from runner.checkpoint import blocks
from runner.storage import compute_crc32c
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
        self.table = blocks.write_blocks(directory, "arrays.1/0", blocks.copy_to_host(leaves))
        self.fetched = []

    def fetch(self, name):
        self.fetched.append(name)
        return (self.directory / name).read_bytes()

    def read(self, abstract):
        fetch = functools.partial(blocks.fetch_verified, self.fetch, self.table.files)
        return blocks.read_blocks(fetch, self.table.shards, abstract)


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
    sizes = [[files.table.files[piece][0] for piece in record["pieces"]] for record in shards]
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
        assert all(piece.startswith("arrays.1/0/") for piece in files.table.files)
        for other in places:
            read = files.read({name: make_abstract(array, other)})[name]
            assert (read.shape, read.dtype, read.sharding) == (array.shape, array.dtype, other)
            assert are_leaves_equal(read, array)


def test_leaves_with_similar_names_have_separate_files(tmp_path):
    place = SHARDINGS["one device"]
    names = ["a.b", "a/b", "a%2Fb", "a b", "a.0", "a", "a.0.0"]
    leaves = {name: jax.device_put(np.float32([n, -n]), place) for n, name in enumerate(names)}
    files = BlockDirectory(tmp_path, leaves)
    assert len(files.table.files) == len(names)
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
    assert [record["start"] for record in rows] == [[2 * n, 0] for n in range(8)]
    read = files.read({"w": quarter})["w"]
    assert files.fetched == rows[0]["pieces"]
    assert (np.asarray(read) == WHOLE[:2]).all()


def test_tables_of_several_processes_are_merged(tmp_path):
    """Merge the tables of two processes with four devices each, in any order."""
    array = make_matrix("first axis")
    host = blocks.copy_to_host({"w": array})
    parts = [blocks.write_blocks(tmp_path, f"arrays.1/{n}", {"w": host["w"][4 * n : 4 * n + 4]}) for n in range(2)]
    whole = blocks.BlockTable()
    for part in reversed(parts):
        whole.add(part)
    fetch = functools.partial(blocks.fetch_verified, lambda name: (tmp_path / name).read_bytes(), whole.files)
    read = blocks.read_blocks(fetch, whole.shards, {"w": make_abstract(array, SHARDINGS["mesh (2, 2, 2)"])})
    assert are_leaves_equal(read["w"], array)


def test_arrays_can_be_donated_after_the_copy_to_the_host(tmp_path):
    array = make_matrix("mesh (2, 2, 2)")
    host = blocks.copy_to_host({"w": array})
    jax.jit(lambda x: x * 0, donate_argnums=0)(array).block_until_ready()
    table = blocks.write_blocks(tmp_path, "arrays.1/0", host)
    read = blocks.read_blocks(
        lambda name: (tmp_path / name).read_bytes(),
        table.shards,
        {"w": jax.ShapeDtypeStruct(WHOLE.shape, WHOLE.dtype, sharding=SHARDINGS["copies"])},
    )
    assert (np.asarray(read["w"]) == WHOLE).all()


# Damage.


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def remove(path):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_bit, "does not match its CRC-32C"),
        (truncate, "has 98 bytes, the manifest says 99"),
        (lengthen, "has 100 bytes, the manifest says 99"),
        (remove, "is missing"),
    ],
)
def test_a_damaged_block_is_reported_by_name(tmp_path, monkeypatch, damage, reason):
    monkeypatch.setattr(blocks, "PIECE_BYTES", SMALL_PIECE_BYTES)
    array = make_matrix("mesh (2, 2, 2)")
    files = BlockDirectory(tmp_path, {"a": array, "w": array})
    piece = files.table.shards["w"][3]["pieces"][0]
    damage(tmp_path / piece)
    abstract = {name: make_abstract(array, SHARDINGS["first axis"]) for name in ("a", "w")}
    with pytest.raises(blocks.DamagedBlockError, match=reason) as caught:
        files.read(abstract)
    assert str(caught.value).startswith(f"{piece} ")
    del abstract["w"]
    assert are_leaves_equal(files.read(abstract)["a"], array)


def test_an_unreachable_store_is_not_reported_as_damage(tmp_path):
    array = make_matrix("copies")
    files = BlockDirectory(tmp_path, {"w": array})

    def fetch(name):
        raise TimeoutError("not within 120 s")

    files.fetch = fetch
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
