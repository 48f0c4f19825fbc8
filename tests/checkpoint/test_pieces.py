"""Arrays as pieces: written by whoever holds a shard, read on any mesh, and never with a wrong byte."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from runner.checkpoint import blocks as pieces
from runner.storage import compute_crc32c
from tests.support.tiny_jobs import FACTORISATIONS, are_leaves_equal, make_full_mesh

SHARDED = PartitionSpec("fsdp", ("data", "tensor"))
PLACES = {
    **{f"mesh {sizes}": NamedSharding(make_full_mesh(*sizes), SHARDED) for sizes in FACTORISATIONS},
    "first axis": NamedSharding(make_full_mesh(2, 2, 2), PartitionSpec(("data", "fsdp", "tensor"))),
    "second axis": NamedSharding(make_full_mesh(2, 2, 2), PartitionSpec(None, "tensor")),
    "copies": NamedSharding(make_full_mesh(2, 2, 2), PartitionSpec()),
    "one device": SingleDeviceSharding(jax.devices()[3]),
}
WHOLE = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
NARROW_PIECES = 99  # bytes: cuts through elements


class Written:
    """What one process has written into a directory."""

    def __init__(self, directory, leaves):
        self.directory = directory
        self.table = pieces.write_blocks(directory, "arrays.1/0", pieces.copy_to_host(leaves))
        self.fetched = []

    def fetch(self, name):
        self.fetched.append(name)
        return (self.directory / name).read_bytes()

    def read(self, abstract):
        return pieces.read_blocks(self.fetch, self.table.files, self.table.shards, abstract)


def describe(array, sharding):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def matrix(place):
    return jax.device_put(WHOLE, PLACES[place])


@pytest.mark.parametrize("written", PLACES)
def test_what_was_written_in_one_sharding_is_read_in_every_other(tmp_path, written):
    array = matrix(written)
    files = Written(tmp_path, {"w": array})
    for sharding in PLACES.values():
        read = files.read({"w": describe(array, sharding)})["w"]
        assert read.sharding == sharding
        assert are_leaves_equal(read, array)


@pytest.mark.parametrize("written", ["mesh (2, 2, 2)", "second axis", "copies"])
@pytest.mark.parametrize("read", ["mesh (1, 8, 1)", "first axis", "one device"])
def test_a_shard_may_be_cut_into_pieces_anywhere(tmp_path, monkeypatch, written, read):
    monkeypatch.setattr(pieces, "PIECE_BYTES", NARROW_PIECES)
    array = matrix(written)
    files = Written(tmp_path, {"w": array})
    shards = files.table.shards["w"]
    sizes = [[files.table.files[piece][0] for piece in record["pieces"]] for record in shards]
    assert all(len(pieces) > 1 for pieces in sizes)
    assert all(set(pieces[:-1]) == {NARROW_PIECES} and 0 < pieces[-1] <= NARROW_PIECES for pieces in sizes)
    assert sum(map(sum, sizes)) == WHOLE.nbytes, "each element stands once, whatever copies there are"
    assert are_leaves_equal(files.read({"w": describe(array, PLACES[read])})["w"], array)


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
def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path, monkeypatch, name, piece_bytes):
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece_bytes)
    value = LEAVES[name]
    axis = PartitionSpec() if value.ndim == 0 else PartitionSpec("fsdp")
    places = [NamedSharding(make_full_mesh(2, 4, 1), axis), NamedSharding(make_full_mesh(2, 2, 2), PartitionSpec())]
    for number, place in enumerate(places):
        array = jax.device_put(value, place)
        files = Written(tmp_path / str(number), {name: array})
        assert all((tmp_path / str(number) / piece).is_file() for piece in files.table.files)
        assert all(piece.startswith("arrays.1/0/") for piece in files.table.files)
        for other in places:
            read = files.read({name: describe(array, other)})[name]
            assert (read.shape, read.dtype, read.sharding) == (array.shape, array.dtype, other)
            assert are_leaves_equal(read, array)


def test_leaves_whose_names_are_alike_have_files_of_their_own(tmp_path):
    place = PLACES["one device"]
    names = ["a.b", "a/b", "a%2Fb", "a b", "a.0", "a", "a.0.0"]
    leaves = {name: jax.device_put(np.float32([n, -n]), place) for n, name in enumerate(names)}
    files = Written(tmp_path, leaves)
    assert len(files.table.files) == len(names)
    read = files.read({name: describe(leaf, place) for name, leaf in leaves.items()})
    assert list(read) == names
    assert all(are_leaves_equal(read[name], leaves[name]) for name in names)


def test_the_table_says_size_and_crc_of_every_file(tmp_path):
    files = Written(tmp_path, {"w": matrix("mesh (2, 2, 2)"), "empty": jnp.zeros((0, 2))})
    on_disk = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files.table.files.keys() == on_disk
    for name, (size, digest) in files.table.files.items():
        content = (tmp_path / name).read_bytes()
        assert [len(content), compute_crc32c(content)] == [size, digest]


def test_a_process_fetches_only_the_pieces_that_it_needs(tmp_path):
    files = Written(tmp_path, {"w": matrix("first axis"), "other": matrix("first axis")})
    quarter = jax.ShapeDtypeStruct((2, 24), np.float32, sharding=PLACES["one device"])
    rows = files.table.shards["w"]
    assert [record["start"] for record in rows] == [[2 * n, 0] for n in range(8)]
    read = files.read({"w": quarter})["w"]
    assert files.fetched == rows[0]["pieces"]
    assert (np.asarray(read) == WHOLE[:2]).all()


def test_tables_of_several_processes_make_one(tmp_path):
    """Two processes of four devices each: their parts are added up, in any order."""
    array = matrix("first axis")
    host = pieces.copy_to_host({"w": array})
    parts = [pieces.write_blocks(tmp_path, f"arrays.1/{n}", {"w": host["w"][4 * n : 4 * n + 4]}) for n in range(2)]
    whole = pieces.BlockTable()
    for part in reversed(parts):
        whole.add(part)
    read = pieces.read_blocks(
        lambda name: (tmp_path / name).read_bytes(),
        whole.files,
        whole.shards,
        {"w": describe(array, PLACES["mesh (2, 2, 2)"])},
    )
    assert are_leaves_equal(read["w"], array)


def test_the_copy_is_of_the_moment_and_the_arrays_may_be_donated(tmp_path):
    array = matrix("mesh (2, 2, 2)")
    host = pieces.copy_to_host({"w": array})
    jax.jit(lambda x: x * 0, donate_argnums=0)(array).block_until_ready()
    table = pieces.write_blocks(tmp_path, "arrays.1/0", host)
    read = pieces.read_blocks(
        lambda name: (tmp_path / name).read_bytes(),
        table.files,
        table.shards,
        {"w": jax.ShapeDtypeStruct(WHOLE.shape, WHOLE.dtype, sharding=PLACES["copies"])},
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
def test_a_piece_that_is_damaged_is_named(tmp_path, monkeypatch, damage, reason):
    monkeypatch.setattr(pieces, "PIECE_BYTES", NARROW_PIECES)
    array = matrix("mesh (2, 2, 2)")
    files = Written(tmp_path, {"a": array, "w": array})
    piece = files.table.shards["w"][3]["pieces"][0]
    damage(tmp_path / piece)
    abstract = {name: describe(array, PLACES["first axis"]) for name in ("a", "w")}
    with pytest.raises(pieces.DamagedBlockError, match=reason) as caught:
        files.read(abstract)
    assert str(caught.value).startswith(f"{piece} ")
    del abstract["w"]
    assert are_leaves_equal(files.read(abstract)["a"], array)


def test_that_the_store_is_down_is_no_damage(tmp_path):
    array = matrix("copies")
    files = Written(tmp_path, {"w": array})

    def fetch(name):
        raise TimeoutError("not within 120 s")

    with pytest.raises(TimeoutError):
        pieces.read_blocks(fetch, files.table.files, files.table.shards, {"w": describe(array, PLACES["copies"])})


@pytest.mark.parametrize("read", ["mesh (2, 2, 2)", "first axis", "copies", "one device"])
def test_shards_that_do_not_cover_a_block_are_refused(tmp_path, read):
    array = matrix("mesh (2, 2, 2)")
    files = Written(tmp_path, {"w": array})
    for number in range(len(files.table.shards["w"])):
        shards = copy.deepcopy(files.table.shards)
        del shards["w"][number]
        with pytest.raises(
            pieces.DamagedBlockError, match=r"the manifest's shards hold \d+ of \d+ elements of a block"
        ):
            pieces.read_blocks(files.fetch, files.table.files, shards, {"w": describe(array, PLACES[read])})


def test_a_leaf_without_any_shard_is_refused(tmp_path):
    files = Written(tmp_path, {"w": matrix("copies")})
    with pytest.raises(pieces.DamagedBlockError, match="hold 0 of 384 elements"):
        pieces.read_blocks(files.fetch, files.table.files, {"w": []}, {"w": describe(WHOLE, PLACES["copies"])})
