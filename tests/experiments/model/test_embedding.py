"""The gradient of the token lookup on GPUs: summed in float32 over sorted tokens, without a scatter, on every mesh.

These run on a CPU with the form that GPUs have.

Shape legend: B batch, T sequence, V vocabulary, D width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.model import platform
from experiments.model.embedding import embed, lookup_columns, take_rows_sorted
from runner.parallel.mesh import make_mesh, use_sharding_rules
from tests.support.tiny_jobs import format_mesh

V, D = 24, 8
MESHES = [
    {"data": 1},
    {"data": 4},
    {"fsdp": 2},
    {"data": 2, "fsdp": 2},
    {"data": 2, "sequence": 2},
    {"tensor": 2},
    {"data": 2, "tensor": 2},
]
# The second is for tables that are too wide to be gathered.
LOOKUPS = {"rows": embed, "columns": lookup_columns}
DAILY_MESHES_OF_COLUMNS = ({"data": 1}, {"data": 2, "fsdp": 2}, {"data": 2, "tensor": 2})
SHAPE = (4, 512)
TOKENS = {
    "one token": np.full(SHAPE, 7),
    "few tokens": np.random.default_rng(0).choice([0, 1, 5, V - 1], SHAPE, p=[0.9, 0.05, 0.04, 0.01]),
    "all tokens": np.random.default_rng(1).integers(0, V, SHAPE),
    "first and last": np.tile([0, V - 1], (4, 256)),
}


@pytest.fixture
def gpu_form(monkeypatch):
    """The form of models that GPUs have."""
    monkeypatch.setattr(platform, "platform", lambda: "gpu")


def trace_gradient(sizes, shape, dtype, form="rows"):
    """Trace the function from a table, tokens and a gradient of embeddings to the gradient of the table."""

    def pull_back(table_VxD, tokens_BxT, gradient_BxTxD):
        return jax.vjp(lambda table: LOOKUPS[form](table, tokens_BxT), table_VxD)[1](gradient_BxTxD)[0]

    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    shapes = [((V, D), dtype), (shape, jnp.int32), ((*shape, D), dtype)]
    with use_sharding_rules(mesh):
        return jax.jit(pull_back).trace(*(jax.ShapeDtypeStruct(*each) for each in shapes))


def compile_gradient(*args, **kwargs):
    """Compile the function of `trace_gradient`; the result places its arguments."""
    compiled = trace_gradient(*args, **kwargs).lower().compile()
    return lambda *arrays: compiled(*jax.device_put(arrays, compiled.input_shardings[0]))


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        *(pytest.param("rows", sizes, id=f"rows-{format_mesh(sizes)}") for sizes in MESHES),
        *(
            pytest.param(
                "columns",
                sizes,
                id=f"columns-{format_mesh(sizes)}",
                marks=() if sizes in DAILY_MESHES_OF_COLUMNS else pytest.mark.soak,
            )
            for sizes in MESHES
        ),
    ],
)
def test_the_gradient_of_a_lookup_is_the_sum_over_equal_tokens(form, sizes, gpu_form):
    pull_back = compile_gradient(sizes, SHAPE, jnp.float32, form)
    for name, tokens_BxT in TOKENS.items():
        gradient_BxTxD = np.random.default_rng(2).normal(size=(*SHAPE, D)).astype(np.float32)
        expected_VxD = np.zeros((V, D))
        np.add.at(expected_VxD, tokens_BxT, gradient_BxTxD)
        got_VxD = pull_back(np.zeros((V, D), np.float32), tokens_BxT.astype(np.int32), gradient_BxTxD)
        np.testing.assert_allclose(got_VxD, expected_VxD, rtol=1e-5, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("sizes", [sizes for sizes in MESHES if "tensor" not in sizes], ids=format_mesh)
def test_no_gradient_is_scattered(sizes, gpu_form):
    assert "scatter-add" not in str(trace_gradient(sizes, SHAPE, jnp.bfloat16).jaxpr)


def test_a_frequent_token_loses_no_precision_in_bfloat16(gpu_form):
    tokens_BxT = TOKENS["one token"]
    gradient_BxTxD = jnp.asarray(np.random.default_rng(3).uniform(0.5, 1, (*tokens_BxT.shape, D)), jnp.bfloat16)
    expected_D = np.sum(np.asarray(gradient_BxTxD, np.float64), (0, 1))
    pull_back = compile_gradient({"data": 1}, SHAPE, jnp.bfloat16)
    got_VxD = pull_back(jnp.zeros((V, D), jnp.bfloat16), tokens_BxT.astype(np.int32), gradient_BxTxD)
    np.testing.assert_allclose(np.asarray(got_VxD[7], np.float64), expected_D, rtol=2**-8)


@pytest.mark.soak
def test_tokens_of_a_narrow_type_have_the_same_gradient(gpu_form):
    tokens_BxT, table_VxD = np.arange(250).reshape(2, 125), jnp.zeros((300, 2))
    differentiate = jax.jit(jax.grad(lambda table, tokens: jnp.sum(take_rows_sorted(table, tokens))))
    gradients = [differentiate(table_VxD, jnp.asarray(tokens_BxT, dtype)) for dtype in (jnp.uint8, jnp.int32)]
    np.testing.assert_array_equal(*gradients)
