"""Tables of tensors: each leaf is covered once and each tensor completely, or an error names the place."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from experiments.gpt import GPT, GPT2Files, GPTConfig
from runner.checkpoint.leaves import flatten_with_names
from runner.huggingface.mapping import Shape, TensorPiece, compute_tensor_shapes, find_table_problems
from tests.huggingface.small import SHAPES, D, L, M, SmallFamily, V, convert_to_tensors, make_leaves


def gpt_shapes() -> dict[str, Shape]:
    model = GPT(GPTConfig(layers=3, heads=2, width=16), 40, 8)
    boxed = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 8), int), deterministic=True), jax.random.key(0))
    return {name: leaf.shape for name, leaf in flatten_with_names({"params": nn.unbox(boxed)["params"]}).items()}


def test_the_tables_match_their_models():
    assert find_table_problems(SmallFamily().pieces(), SHAPES) == []
    assert find_table_problems(GPT2Files(3, 2, 16, 40, 8, 0.0).pieces(), gpt_shapes()) == []


def test_tensor_shapes_match_the_files():
    files = convert_to_tensors(make_leaves())
    assert compute_tensor_shapes(SmallFamily().pieces(), SHAPES) == {name: value.shape for name, value in files.items()}


Change = Callable[[list[TensorPiece]], list[TensorPiece]]


def without_leaf(leaf: str) -> Change:
    return lambda pieces: [piece for piece in pieces if piece.leaf != leaf]


def replace_piece(of: str, /, **changes: object) -> Change:
    return lambda pieces: [
        dataclasses.replace(piece, **changes) if (piece.leaf, piece.index[:1]) in ((of, ()), (of, (0,))) else piece
        for piece in pieces
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without_leaf("embedding"), "params.embedding: no piece has this leaf"),
        (replace_piece("embedding", leaf="embeding"), "params.embeding: the weights have no such leaf"),
        (lambda pieces: pieces[:-1], "params.blocks.expert: no piece has its index [1, 2]"),
        (replace_piece("blocks.bias", index=(5,)), "params.blocks.bias: it has no index [5]"),
        (replace_piece("blocks.bias", index=(1,)), "params.blocks.bias: 2 pieces have its index [1]"),
        (replace_piece("blocks.bias", index=()), "params.blocks.bias: its pieces have indexes of [0, 1] axes"),
        (
            replace_piece("blocks.bias", transpose=True),
            "params.blocks.bias: it cannot be transposed",
        ),
        (replace_piece("blocks.query", part=(0, 0, D - 1)), "model.layers.0.qk.weight: its part 0..15 of axis 0"),
        (replace_piece("blocks.key", part=(0, D + 1, D + 9)), "model.layers.0.qk.weight: its part 17..25 of axis 0"),
        (replace_piece("blocks.key", part=(1, 0, D)), "model.layers.0.qk.weight: its parts are of several axes"),
        (replace_piece("blocks.key", part=(0, 1, 2 * D), step=2), "model.layers.0.qk.weight: its part 1..32 of axis 0"),
        (
            replace_piece("blocks.key", part=(0, D, 2 * D), step=2),
            "model.layers.0.qk.weight: no part has the element 17",
        ),
        (replace_piece("blocks.key", part=None), "model.layers.0.qk.weight: several pieces are the whole tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_problems_of_a_table_name_the_leaf_or_tensor(change: Change, problem: str):
    found = find_table_problems(change(SmallFamily().pieces()), SHAPES)
    assert any(line.startswith(problem) for line in found), found


def test_the_sizes_of_the_example_are_distinct():
    assert len({L, D, M, V}) == 4
