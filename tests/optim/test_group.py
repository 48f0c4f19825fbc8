"""Parameter groups: a group uses its own settings, and the other parameters train as without groups."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import ValidationError

from runner.errors import InvalidError, SpecError
from runner.optim.config import OPTIMIZERS, ParameterGroup
from runner.optim.groups import FrozenParametersState, Parameter, describe_parameters
from runner.optim.library import make_optimizer, update_in_float32
from runner.train import step as pure
from runner.train.state import make_state_from_variables
from tests.optim.test_formula import MATRICES, PARAMETERS, PARAMS, compute_rate, make_config, run_training
from tests.support.tiny_jobs import are_leaves_equal, make_gpt

STEPS = 4
SMALL_PARAMETERS = {name: parameter for name, parameter in PARAMETERS.items() if name != "large"}

DAILY = ("adafactor", "galore", "schedule_free_adamw")  # optimizers that are more than a chain of common parts
NAMES = [pytest.param(name, marks=() if name in DAILY else pytest.mark.soak) for name in OPTIMIZERS]


def run(name, groups=(), parameters=SMALL_PARAMETERS, schedule=None, **keys):
    return run_training(make_config(name, groups=list(groups), **keys), parameters, STEPS, schedule)


def assert_close(found, expected, keys):
    for key in keys:
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-6, atol=1e-7, err_msg=key)


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_group_has_its_own_rate_and_weight_decay(name):
    """Without clipping parameters are independent, so each equals that of a run with its settings for all."""
    rates = jnp.asarray([compute_rate(step) for step in range(STEPS)])
    decay = {} if name == "muonh" else {"weight_decay": 0.7}  # its matrices do not decay
    found, _ = run(name, [{"pattern": "w*", "rate": 0.25, **decay}])
    like_group, _ = run_training(
        make_config(name).model_copy(update={"weight_decay": 0.7}),
        SMALL_PARAMETERS,
        STEPS,
        lambda step: 0.25 * rates[step],
    )
    like_rest, _ = run(name)
    assert_close(found, like_group, ["wide"])
    assert_close(found, like_rest, ["bias", "embedding", "tall"])
    assert np.abs(like_rest["wide"] - like_group["wide"]).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_frozen_parameters_are_unchanged_and_have_no_moments(name):
    keys = {"matrices": ["wide"]} if "matrices" in OPTIMIZERS[name].defaults else {}
    frozen = [{"pattern": "tall", "frozen": True}, {"pattern": "emb*", "frozen": True}]
    found, state = run(name, frozen, clip_norm=0.1, **keys)
    rest = {key: SMALL_PARAMETERS[key] for key in ("bias", "wide")}
    expected, expected_state = run(name, parameters=rest, clip_norm=0.1, **keys)
    assert isinstance(state, FrozenParametersState)
    assert state.names == {"embedding", "tall"}
    assert are_leaves_equal(state.inner, expected_state)
    assert are_leaves_equal({key: found[key] for key in rest}, expected)
    for key in ("embedding", "tall"):
        assert are_leaves_equal(found[key], jnp.asarray(PARAMS[key], jnp.float32))


def test_a_frozen_negative_zero_keeps_its_sign():
    config = make_config("adamw", groups=[{"pattern": "tall", "frozen": True}])
    tx = make_optimizer("adamw", config, optax.constant_schedule(0.1), SMALL_PARAMETERS)
    params = {key: jnp.full(parameter.shape, -0.0) for key, parameter in SMALL_PARAMETERS.items()}
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert are_leaves_equal(optax.apply_updates(params, updates)["tall"], params["tall"])


def test_a_group_with_its_own_norm_is_clipped_separately():
    groups = [{"pattern": "tall", "clip_norm": 0.5}]
    config = make_config("sgd", groups=groups, clip_norm=2.0, momentum=0.0).model_copy(update={"weight_decay": 0.0})
    tx = make_optimizer("sgd", config, optax.constant_schedule(1.0), SMALL_PARAMETERS)
    grads = {key: jnp.full(parameter.shape, 3.0) for key, parameter in SMALL_PARAMETERS.items()}
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert float(jnp.linalg.norm(updates.pop("tall"))) == pytest.approx(0.5)
    assert float(optax.tree.norm(updates)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"pattern": "embeding"}],
            r"'embeding' matches no parameter; the parameters are embedding, bias, wide",
        ),
        ([{"pattern": "*"}, {"pattern": "tall"}], r"tall matches both '\*' and 'tall'"),
        ([{"pattern": "bias", "weight_decay": 0.1}], "'bias' matches no matrix"),
        ([{"pattern": "*", "frozen": True}], "groups freeze every parameter; leave one to train"),
    ],
)
def test_groups_that_do_not_match_the_parameters_are_rejected(groups, message):
    with pytest.raises(InvalidError, match=message):
        make_optimizer("adamw", make_config("adamw", groups=groups), optax.constant_schedule(0.1), SMALL_PARAMETERS)


def test_decay_of_matrices_on_a_sphere_is_rejected():
    for pattern in ("*", "embedding"):
        groups = [{"pattern": pattern, "weight_decay": 0.1}]
        make_optimizer("muonh", make_config("muonh", groups=groups), optax.constant_schedule(0.1), SMALL_PARAMETERS)
    groups = [{"pattern": "tall", "weight_decay": 0.1}]
    with pytest.raises(InvalidError, match="weight_decay of 'tall' has no effect"):
        make_optimizer("muonh", make_config("muonh", groups=groups), optax.constant_schedule(0.1), SMALL_PARAMETERS)


@pytest.mark.parametrize("name", ["muon", "galore"])
@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (["tall", "heads.*"], r"matrices: 'heads.\*' matches no trained parameter"),
        (["cube"], r"matrices: cube of shape \(2, 3, 4\) is no stack"),
        (None, "finds no matrix among the parameters except embeddings"),
    ],
)
def test_patterns_that_match_no_matrix_are_rejected(name, matrices, message):
    parameters = {"tall": SMALL_PARAMETERS["tall"], "cube": Parameter("cube", (2, 3, 4), ("heads", None, None))}
    if matrices is None:
        parameters = {"bias": SMALL_PARAMETERS["bias"], "embedding": SMALL_PARAMETERS["embedding"]}
    with pytest.raises(InvalidError, match=message):
        make_optimizer(name, make_config(name, matrices=matrices), optax.constant_schedule(0.1), parameters)


def test_the_layers_of_a_model_are_one_pattern_in_errors():
    names = [f"layer_{n}.{part}.kernel" for n in range(40) for part in ("attention.query", "attention.key", "mlp.up")]
    parameters = {name: Parameter(name, (4, 4), (None, None)) for name in [*names, "Embed_0.embedding"]}
    groups = [{"pattern": "*atention.query"}]
    with pytest.raises(InvalidError, match="matches no parameter") as found:
        make_optimizer("adamw", make_config("adamw", groups=groups), optax.constant_schedule(0.1), parameters)
    patterns = str(found.value).rpartition("the parameters are ")[2].split(", ")
    assert patterns[0] == "layer_*.attention.query.kernel"
    assert sorted(patterns) == sorted(
        ["Embed_0.embedding", *(f"layer_*.{part}.kernel" for part in ("attention.query", "attention.key", "mlp.up"))]
    )


def test_keys_without_effect_in_a_frozen_group_are_rejected():
    with pytest.raises(ValidationError, match="rate of a group that is frozen is not read"):
        ParameterGroup(pattern="*", frozen=True, rate=0.5)


def test_a_pattern_that_matches_nothing_is_rejected_by_key(tmp_path):
    job = make_gpt(tmp_path / "run", **{"config.optimizer.groups": [{"pattern": "no.such"}]})
    with pytest.raises(SpecError, match=r"^[^\n]*config.optimizer: groups: 'no.such' matches no parameter[^\n]*$"):
        job.setup_builder.build(jax.devices())


class TwoMatrixModel(nn.Module):
    """Token model of a lookup table and a frozen matrix."""

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        return nn.Dense(7, use_bias=False)(nn.Embed(7, 4)(x_BxT))


@pytest.mark.daily(1)
@pytest.mark.parametrize("num_micro", [1, 2])
def test_frozen_parameters_get_no_gradient(num_micro):
    model, x_SxBxT = TwoMatrixModel(), jnp.arange(24).reshape(num_micro, -1, 4) % 7
    batch = {"x": x_SxBxT, "y": (x_SxBxT + 1) % 7, "padding_mask": jnp.ones_like(x_SxBxT, bool)}
    variables = model.init(jax.random.key(0), x_SxBxT[0], deterministic=True)
    norms = []
    for groups in ([], [{"pattern": "Dense*", "frozen": True}]):
        config = make_config("adamw", groups=groups)
        abstract = jax.eval_shape(lambda: variables["params"])
        tx = make_optimizer("adamw", config, optax.constant_schedule(0.1), describe_parameters(abstract))
        state = make_state_from_variables(model, variables, update_in_float32(tx))

        def forward(apply_fn, params, micro, key):
            logits = apply_fn({"params": params}, micro["x"], deterministic=True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, micro["y"])
            return jnp.sum(losses * micro["padding_mask"]), {}

        def step(state, forward=forward):
            return pure.train_step(forward, state, batch, jax.random.key(1), num_micro)

        found, _, meta = jax.jit(step)(state)
        norms.append((float(meta["grad_norm"]), str(jax.make_jaxpr(step)(state)).count("dot_general")))
        moved = found.params
        assert are_leaves_equal(moved["Dense_0"], variables["params"]["Dense_0"]) == bool(groups)
        assert not are_leaves_equal(moved["Embed_0"], variables["params"]["Embed_0"])
    (whole_norm, whole_products), (norm, products) = norms
    assert norm < whole_norm
    assert products == whole_products - 1


def test_default_matrices_match_the_formulas():
    found = {key for key, p in SMALL_PARAMETERS.items() if p.holds_matrices and p.is_matrix and not p.is_table}
    assert found == set(MATRICES)
