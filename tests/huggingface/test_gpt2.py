"""Logits of GPT-2 weights written by the real transformers."""

import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpt import GPT, GPT2Files, GPTConfig
from runner.checkpoint.leaves import flatten_with_names
from runner.huggingface.load import read_leaf
from runner.huggingface.mapping import match_tensors
from runner.huggingface.safetensors import open_published_weights
from runner.spec import InitFromConfig

WRITTEN = Path(__file__).parent / "gpt2"  # written by write_gpt2.py


def test_logits_match_those_of_transformers():
    model = GPT(GPTConfig(layers=2, heads=2, width=16), 40, 8)
    tokens_BxT, expected_BxTxV = np.load(WRITTEN / "tokens.npy"), np.load(WRITTEN / "logits.npy")
    like = nn.unbox(
        jax.jit(lambda key: model.init(key, jnp.asarray(tokens_BxT), deterministic=True))(jax.random.key(0))
    )
    published = open_published_weights(str(WRITTEN))
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(like).items()}
    found = match_tensors(published, GPT2Files(2, 2, 16, 40, 8, 0.1), shapes, InitFromConfig(path=str(WRITTEN))).pieces
    leaves = [
        read_leaf(published.store, published.versions, found[name], leaf)
        for name, leaf in flatten_with_names(like).items()
    ]
    variables = jax.tree.unflatten(jax.tree.structure(like), leaves)
    logits_BxTxV = np.asarray(jax.jit(functools.partial(model.apply, deterministic=True))(variables, tokens_BxT))
    np.testing.assert_allclose(logits_BxTxV, expected_BxTxV, atol=1e-4)
    assert (logits_BxTxV.argmax(-1) == expected_BxTxV.argmax(-1)).all()
