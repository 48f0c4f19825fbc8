"""Loading leaves from tensors: bit-identical on every mesh, with no more bytes than a process needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from runner.errors import InvalidError
from runner.huggingface import load as read
from runner.huggingface.load import list_byte_spans, read_leaf
from runner.huggingface.mapping import Family, TensorPiece, match_tensors
from runner.huggingface.safetensors import open_published_weights
from runner.spec import InitFromConfig
from runner.storage import LocalStore, Store
from tests.huggingface.small import SHAPES, D, SmallFamily, V, convert_to_tensors, make_leaves, write_export
from tests.support.tiny_jobs import make_full_mesh

CUTS = {
    "params.embedding": ("fsdp", "tensor"),
    "params.blocks.query": (None, "fsdp", "tensor"),
    "params.blocks.key": (None, "tensor", "fsdp"),
    "params.blocks.bias": (None, "tensor"),
    "params.blocks.expert": ("data", None, "fsdp", "tensor"),
}


class CountingStore(LocalStore):
    """Local store that records the byte ranges read."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.asked: list[tuple[str, int, int]] = []

    def read_range(self, name: str, start: int, stop: int, version: str) -> bytes:
        self.asked.append((name, start, stop))
        return super().read_range(name, start, stop, version)


def load(
    where: Path | Store, like: dict[str, Any], rule: InitFromConfig | None = None, family: Family | None = None
) -> dict[str, Any]:
    """Load the leaves with the shardings of `like`, and return them by name."""
    published = open_published_weights(str(where) if isinstance(where, Path) else where)
    shapes = {name: leaf.shape for name, leaf in like.items()}
    rule = rule or InitFromConfig(path=published.store.url)
    found = match_tensors(published, family or SmallFamily(), shapes, rule)
    return {
        name: read_leaf(published.store, published.versions, found.pieces[name], leaf) for name, leaf in like.items()
    }


def make_sharded(
    values: dict[str, np.ndarray], sizes: tuple[int, int, int], dtype: Any = jnp.float32
) -> dict[str, Any]:
    """Make sharded arrays on a mesh, as a job's init does."""
    mesh = make_full_mesh(*sizes)
    return {
        name: jax.device_put(jnp.asarray(value, dtype), NamedSharding(mesh, PartitionSpec(*CUTS.get(name, ()))))
        for name, value in values.items()
    }


@pytest.mark.parametrize("sizes", [(2, 4, 1), (1, 1, 8), (2, 2, 2)], ids=str)
def test_every_mesh_reads_the_same_bits(tmp_path: Path, sizes: tuple[int, int, int]):
    expected = make_leaves()
    where = write_export(tmp_path / "hf", convert_to_tensors(expected), num_shards=sizes[0])
    like = make_sharded(make_leaves(1), sizes)
    for name, leaf in load(where, like).items():
        assert np.asarray(leaf).tobytes() == expected[name].tobytes(), name
        assert leaf.sharding == like[name].sharding


def round_to_nearest(value: np.ndarray, dtype: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(value, jnp.float32).astype(dtype))


@pytest.mark.daily(4)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_type_is_rounded_to_nearest(tmp_path: Path, stored: Any, dtype: Any):
    expected = {name: value.astype(stored) for name, value in make_leaves().items()}
    where = write_export(tmp_path / "hf", convert_to_tensors(expected))
    for name, leaf in load(where, make_sharded(make_leaves(1), (2, 2, 2), dtype)).items():
        assert leaf.dtype == dtype
        assert np.asarray(leaf).tobytes() == round_to_nearest(expected[name].astype(np.float32), dtype).tobytes(), name


class StackedExperts(SmallFamily):
    """Family with the matrices of all experts in one tensor, of which two leaves take turns."""

    def pieces(self) -> list[TensorPiece]:
        parts = enumerate(("gate", "up"))
        return [TensorPiece("experts", leaf, (0,), part=(2, start, 8), step=2) for start, leaf in parts]


def write_mxfp4(directory: Path) -> dict[str, np.ndarray]:
    """Write four-bit values of two experts, 64 inputs and 8 outputs, and return the leaves that they are."""
    generator = np.random.default_rng(0)
    codes_ExOxI = generator.integers(0, 16, (2, 8, 64), np.uint8)
    codes_ExOxI[0, 0, :16] = range(16)
    scales_ExOxG = generator.integers(120, 135, (2, 8, 2), np.uint8)
    pairs = codes_ExOxI.reshape(2, 8, 2, 16, 2)
    blocks_ExOxGxB = pairs[..., 0] | pairs[..., 1] << 4  # the first value is the lower half of its byte
    quantised = {"experts_blocks": blocks_ExOxGxB, "experts_scales": scales_ExOxG}
    write_export(directory, quantised, 2, quantization_config={"quant_method": "mxfp4"})

    # A sign, two bits of exponent and one of mantissa.
    sign, exponent, mantissa = (codes_ExOxI >> 3), (codes_ExOxI >> 1 & 3).astype(int), codes_ExOxI & 1
    size = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    assert list(size[0, 0, :8]) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values_ExOxI = (1 - 2.0 * sign) * size * 2.0 ** (np.repeat(scales_ExOxG, 32, axis=2).astype(int) - 127)
    values_1xExIxO = values_ExOxI.swapaxes(1, 2)[None].astype(np.float32)
    return {"params.gate": values_1xExIxO[..., ::2], "params.up": values_1xExIxO[..., 1::2]}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [(), (None, "data", "tensor", "fsdp"), (None, None, ("data", "tensor"))], ids=str)
def test_mxfp4_is_dequantised_on_every_mesh(tmp_path: Path, axes: tuple[Any, ...], dtype: Any, monkeypatch: Any):
    monkeypatch.setattr(read, "SPAN_BYTES", 1000)  # of which one expert needs more
    expected = write_mxfp4(tmp_path / "hf")
    sharding = NamedSharding(make_full_mesh(2, 2, 2), PartitionSpec(*axes))
    like = {name: jax.device_put(jnp.zeros(value.shape, dtype), sharding) for name, value in expected.items()}
    for name, leaf in load(tmp_path / "hf", like, family=StackedExperts()).items():
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), expected[name])


class Linear(SmallFamily):
    """Family with one linear module, and a norm in the type of the parameters."""

    def pieces(self) -> list[TensorPiece]:
        return [TensorPiece("linear.weight", "kernel", transpose=True), TensorPiece("norm.weight", "scale")]


def write_fp8(directory: Path, scale_dtype: Any) -> dict[str, np.ndarray]:
    """Write blocks of eight-bit values, the last ones cut off, and return the leaves that they are."""
    generator = np.random.default_rng(0)
    values_OxI = generator.normal(0, 30, (296, 160)).astype(ml_dtypes.float8_e4m3fn)
    scales_3x2 = generator.uniform(0.001, 2, (3, 2)).astype(scale_dtype)
    norm = generator.normal(0, 1, 8).astype(np.float32)
    files = {"linear.weight": values_OxI, "linear.weight_scale_inv": scales_3x2, "norm.weight": norm}
    write_export(directory, files, 2, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    expected_OxI = np.array(
        [[float(values_OxI[o, i]) * float(scales_3x2[o // 128, i // 128]) for i in range(160)] for o in range(296)]
    )
    return {"params.kernel": expected_OxI.T.astype(np.float32), "params.scale": norm}


@pytest.mark.parametrize(
    "axes", [(), ("data", "tensor"), (None, ("data", "tensor")), (("fsdp", "data"), None)], ids=str
)
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
def test_fp8_is_dequantised_on_every_mesh(tmp_path: Path, axes: tuple[Any, ...], scale_dtype: Any, monkeypatch: Any):
    monkeypatch.setattr(read, "SPAN_BYTES", 1000)
    expected = write_fp8(tmp_path / "hf", scale_dtype)
    mesh = make_full_mesh(2, 2, 2)
    specs = {"params.kernel": PartitionSpec(*axes), "params.scale": PartitionSpec()}
    like = {
        name: jax.device_put(jnp.zeros(value.shape, jnp.float32), NamedSharding(mesh, specs[name]))
        for name, value in expected.items()
    }
    for name, leaf in load(tmp_path / "hf", like, family=Linear()).items():
        np.testing.assert_array_equal(np.asarray(leaf), expected[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear.weight": None}, r"tensor linear.weight_scale_inv has no linear.weight"),
        ({"linear.weight_scale_inv": np.zeros((2, 2), np.float32)}, r"F32\[2, 2\], which is not FP8 in blocks of 128"),
        ({"linear.weight": np.zeros((296, 160), np.float16)}, r"F16\[296, 160\] and F32\[3, 2\], which is not FP8"),
        ({"linear.weight_scale_inv": np.zeros((3, 2), np.float16)}, r"F16\[3, 2\], which is not FP8 in blocks of 128"),
    ],
)
def test_files_of_fp8_that_do_not_fit_are_refused_in_one_line(tmp_path: Path, changes: Any, message: str):
    files = {
        "linear.weight": np.zeros((296, 160), ml_dtypes.float8_e4m3fn),
        "linear.weight_scale_inv": np.zeros((3, 2), np.float32),
    }
    files = {name: value for name, value in (files | changes).items() if value is not None}
    write_export(tmp_path / "hf", files, quantization_config={"quant_method": "fp8"})
    with pytest.raises(InvalidError, match=message) as refused:
        open_published_weights(str(tmp_path / "hf"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("gptq", {}, r"quantization_config.quant_method gptq is not read; needs fp8 or mxfp4, or weights of type F64"),
        (None, {}, r"quant_method None is not read"),
        (["mxfp4"], {}, r"quant_method \['mxfp4'\] is not read"),
        ("mxfp4", {"experts_scales": None}, r"tensor experts_blocks has no experts_scales"),
        ("mxfp4", {"experts_scales": np.zeros((2, 8, 3), np.uint8)}, r"U8\[2, 8, 2, 16\] and U8\[2, 8, 3\], which is"),
        ("mxfp4", {"experts_scales": np.zeros((2, 8, 2), np.float32)}, r"F32\[2, 8, 2\], which is not MXFP4"),
    ],
)
def test_other_quantised_files_are_refused_in_one_line(tmp_path: Path, method: Any, changes: Any, message: str):
    files = {"experts_blocks": np.zeros((2, 8, 2, 16), np.uint8), "experts_scales": np.zeros((2, 8, 2), np.uint8)}
    files = {name: value for name, value in (files | changes).items() if value is not None}
    write_export(tmp_path / "hf", files, quantization_config={"quant_method": method})
    with pytest.raises(InvalidError, match=message) as refused:
        open_published_weights(str(tmp_path / "hf"))
    assert "\n" not in str(refused.value)


def list_bytes(boxes: Sequence[Sequence[tuple[int, int]]], shape: tuple[int, ...], itemsize: int) -> set[int]:
    """Return the offsets of all bytes of a tensor that are in one of the boxes."""
    inside = np.zeros((*shape, itemsize), bool)
    for box in boxes:
        inside[tuple(slice(*bounds) for bounds in box)] = True
    return set(np.flatnonzero(inside).tolist())


def test_boxes_are_read_as_byte_ranges_once(monkeypatch: pytest.MonkeyPatch):
    generator = np.random.default_rng(0)
    monkeypatch.setattr(read, "SPAN_BYTES", 40)
    for _ in range(200):
        shape = tuple(generator.integers(1, 6, generator.integers(0, 4)).tolist())
        edges = [[sorted(generator.choice(size + 1, 2, replace=False).tolist()) for size in shape] for _ in range(2)]
        boxes = [[(start, stop) for start, stop in box] for box in edges]
        for gap in (0, 6):
            monkeypatch.setattr(read, "GAP_BYTES", gap)
            spans = list(list_byte_spans(shape, 2, boxes))
            covered = [place for start, stop in spans for place in range(start, stop)]
            assert len(covered) == len(set(covered))
            assert set(covered) >= list_bytes(boxes, shape, 2)
            if gap == 0:
                assert set(covered) == list_bytes(boxes, shape, 2)


@pytest.mark.parametrize("name", ["params.embedding", "params.blocks.key", "params.blocks.expert"])
def test_a_process_reads_only_its_devices_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(read, "GAP_BYTES", 0)
    expected = make_leaves()
    where = write_export(tmp_path / "hf", convert_to_tensors(expected), 2)
    published = open_published_weights(str(where))
    leaf = make_sharded(make_leaves(1), (1, 2, 4))[name]  # sharded over fsdp, and thereby between the hosts
    sources = match_tensors(published, SmallFamily(), SHAPES, InitFromConfig(path=str(where))).pieces[name]
    for devices in (range(4), range(4, 8)):  # one of two hosts
        store = CountingStore(where)
        blocks: read.Blocks = {}
        for shard in leaf.addressable_shards:
            if shard.device.id in devices:
                blocks[read.compute_bounds(shard.index, leaf.shape)] = np.empty(shard.data.shape, np.float32)
        read.fill_blocks(store, published.versions, sources, blocks)
        for bounds, block in blocks.items():
            assert (block == expected[name][tuple(slice(*part) for part in bounds)]).all()
        asked = sum(stop - start for _, start, stop in store.asked)
        assert asked == leaf.nbytes // 2


def test_a_file_replaced_while_it_is_read_is_refused(tmp_path: Path):
    where = write_export(tmp_path / "hf", convert_to_tensors(make_leaves()))
    published = open_published_weights(str(where))
    sources = match_tensors(published, SmallFamily(), SHAPES, InitFromConfig(path=str(where))).pieces[
        "params.embedding"
    ]
    (where / "model.safetensors").write_bytes((where / "model.safetensors").read_bytes())
    with pytest.raises(InvalidError, match="no longer the file that it was"):
        read_leaf(
            published.store, published.versions, sources, make_sharded(make_leaves(1), (2, 2, 2))["params.embedding"]
        )


# Missing, unused and mismatched tensors.


def list_problems(where: Path, rule: InitFromConfig | None = None) -> list[str]:
    """Return the problem lines without the leading directory."""
    with pytest.raises(InvalidError) as found:
        load(where, make_sharded(make_leaves(1), (2, 2, 2)), rule)
    lines = str(found.value).splitlines()
    assert all(line.startswith(f"{where}: ") for line in lines)
    return [line.removeprefix(f"{where}: ") for line in lines]


def test_all_problems_are_listed_in_order(tmp_path: Path):
    files = convert_to_tensors(make_leaves())
    del files["model.layers.1.bias"]
    files["model.embedding.weight"] = files["model.embedding.weight"][: V - 3]
    files["model.head.weight"] = files["model.scale"]
    files["model.layers.0.bias"] = files["model.layers.0.bias"].astype(np.int16)
    assert list_problems(write_export(tmp_path / "hf", files, theta=2.0)) == [
        "config.json: theta: got 2.0, the model needs 1.0",
        f"model.embedding.weight: has the shape [{V - 3}, {D}], the model needs [{V}, {D}]",
        "model.head.weight: is left over, the model has no such tensor",
        "model.layers.0.bias: is of type I16, needs one of F64, F32, F16, BF16",
        f"model.layers.1.bias: is missing, the model needs [{D}]",
    ]


def test_another_family_is_the_only_problem_reported(tmp_path: Path):
    lines = list_problems(write_export(tmp_path / "hf", {"x": np.zeros(1, np.float32)}, model_type="large"))
    assert lines == ["config.json: model_type: got 'large', the model needs 'small'"]


def test_allowed_deviations_keep_initial_values(tmp_path: Path):
    expected, fresh = make_leaves(), make_leaves(1)
    files = convert_to_tensors(expected)
    del files["model.layers.1.bias"]
    files["model.embedding.weight"] = files["model.embedding.weight"][: V - 3]  # the model has a larger vocabulary
    files["model.layers.0.experts.1.weight"] = np.zeros((3, 3), np.float32)
    files["old.scale"] = files.pop("model.scale")
    files["old.head.weight"] = np.zeros(4, np.float32)
    where = write_export(tmp_path / "hf", files, theta=2.0)
    allowed = ["model.embedding.weight", "*.1.bias", "model.layers.?.experts.1.weight", "config.theta"]
    rule = InitFromConfig(path=str(where), allow_missing=allowed, rename={"old": "model", "old.head": None})
    found = load(where, make_sharded(fresh, (2, 2, 2)), rule)
    expected["params.embedding"][V - 3 :] = fresh["params.embedding"][V - 3 :]
    expected["params.blocks.bias"][1] = fresh["params.blocks.bias"][1]
    expected["params.blocks.expert"][0, 1] = fresh["params.blocks.expert"][0, 1]
    for name, leaf in found.items():
        assert np.asarray(leaf).tobytes() == expected[name].tobytes(), name
    shapes = {name: leaf.shape for name, leaf in found.items()}
    notes = match_tensors(open_published_weights(str(where)), SmallFamily(), shapes, rule).notes
    assert notes == (
        "config.json: theta: got 2.0, the model needs 1.0",
        f"model.embedding.weight: has the shape [{V - 3}, {D}], the model needs [{V}, {D}]; all but its first {V - 3} "
        "keep their initial values",
        "model.layers.0.experts.1.weight: has the shape [3, 3], the model needs [24, 16]; it keeps its initial values",
        f"model.layers.1.bias: is missing, the model needs [{D}]; it keeps its initial values",
    )


def test_shared_tensors_that_are_shorter_are_not_read(tmp_path: Path):
    files, fresh = convert_to_tensors(make_leaves()), make_leaves(1)
    files["model.layers.0.qk.weight"] = files["model.layers.0.qk.weight"][:4]
    where = write_export(tmp_path / "hf", files)
    rule = InitFromConfig(path=str(where), allow_missing=["*.qk.weight"])
    found = load(where, make_sharded(fresh, (2, 2, 2)), rule)
    assert (np.asarray(found["params.blocks.query"])[0] == fresh["params.blocks.query"][0]).all()
    assert (np.asarray(found["params.blocks.query"])[1] == make_leaves()["params.blocks.query"][1]).all()


def test_invalid_renames_are_refused(tmp_path: Path):
    where = write_export(tmp_path / "hf", convert_to_tensors(make_leaves()))
    rename = {"modle": "model", "model.layers.0.bias": "model.layers.1.bias"}
    assert list_problems(where, InitFromConfig(path=str(where), rename=rename)) == [
        f"model.layers.0.bias: is missing, the model needs [{D}]",
        "model.layers.1.bias: both model.layers.0.bias and model.layers.1.bias have this name after renaming",
        "rename: no tensor begins with modle",
    ]
