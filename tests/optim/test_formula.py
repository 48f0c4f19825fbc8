"""Every optimizer against the formula of its paper, in NumPy with float64: 20 steps, to 1e-5.

The gradient is a linear function of the parameters plus noise; one parameter stacks two matrices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from runner.optim.config import OPTIMIZERS, OptimizerConfig
from runner.optim.groups import Parameter
from runner.optim.library import make_optimizer
from runner.optim.transforms import compute_gradient_point

STEPS, DECAY = 20, 0.3
PARAMETERS = {
    "bias": Parameter("bias", (2, 5), ("layers", "embed")),
    "embedding": Parameter("embedding", (7, 5), ("vocab", "embed")),
    "large": Parameter("large", (129, 130), (None, None)),
    "tall": Parameter("tall", (6, 4), ("mlp", "embed")),
    "wide": Parameter("wide", (2, 4, 6), ("layers", "embed", "mlp")),
}
# For muon, its variants and galore; singular values of noise are too close in the large one.
MATRICES = ("tall", "wide")
KEYS = {name: {"matrices": [*MATRICES]} for name in ("muon", "normuon", "muonh", "galore")}
KEYS["galore"] |= {"rank": 3, "projection_every_steps": 6}
RANDOM = np.random.default_rng(0)
PARAMS = {name: RANDOM.normal(size=p.shape) for name, p in PARAMETERS.items()}
NOISE = {name: RANDOM.normal(size=(STEPS, *p.shape)) for name, p in PARAMETERS.items()}


def compute_rate(step):
    return 0.02 * min(step + 1, 5) / 5


def compute_gradient(name, param, step):
    return 0.5 * param + NOISE[name][step]


class Adam:
    def __init__(self, config, param):
        self.m, self.v, self.b1, self.b2, self.eps = np.zeros(1), np.zeros(1), config.b1, config.b2, config.eps

    def __call__(self, g, step):
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        m, v = self.m / (1 - self.b1 ** (step + 1)), self.v / (1 - self.b2 ** (step + 1))
        return m / (np.sqrt(v) + self.eps)


class AdamW:
    """theta -= rate * (m / (sqrt(v) + eps) + decay * theta)"""

    def __init__(self, name, config, param):
        self.name, self.p, self.adam = name, param, Adam(config, param)
        self.decay = config.weight_decay if PARAMETERS[name].is_matrix else 0.0
        self.config = config

    def step(self, step):
        direction = self.direction(compute_gradient(self.name, self.p, step), step)
        self.p = self.p - compute_rate(step) * (direction + self.decay * self.p)

    def direction(self, g, step):
        return self.adam(g, step)


class CoupledAdam(AdamW):
    def step(self, step):
        g = compute_gradient(self.name, self.p, step) + self.decay * self.p
        self.p = self.p - compute_rate(step) * self.adam(g, step)


class Lion(AdamW):
    m = 0.0

    def direction(self, g, step):
        b1, b2 = self.config.b1, self.config.b2
        found = np.sign(b1 * self.m + (1 - b1) * g)
        self.m = b2 * self.m + (1 - b2) * g
        return found


class Momentum(AdamW):
    buffer = 0.0

    def step(self, step):
        self.buffer = (
            self.config.momentum * self.buffer + compute_gradient(self.name, self.p, step) + self.decay * self.p
        )
        self.p = self.p - compute_rate(step) * self.buffer


class Muon(AdamW):
    buffer = 0.0

    def direction(self, g, step):
        if self.name not in MATRICES:
            return self.adam(g, step)
        self.buffer = self.config.momentum * self.buffer + g
        nesterov = (g + self.config.momentum * self.buffer).reshape(-1, *g.shape[-2:])
        return np.stack([self.scale(number, newton_schulz(x)) for number, x in enumerate(nesterov)]).reshape(g.shape)

    def scale(self, number, x):
        return 0.2 * np.sqrt(max(x.shape)) * x


class NorMuon(Muon):
    """Algorithm 1 of arXiv:2510.05491 for the transpose, since a neuron is a row there and a column here."""

    def __init__(self, name, config, param):
        super().__init__(name, config, param)
        self.moments = {}

    def scale(self, number, x):
        rows, b2 = x.T, self.config.b2
        self.moments[number] = b2 * self.moments.get(number, 0.0) + (1 - b2) * (rows**2).mean(1)
        rows = rows / (np.sqrt(self.moments[number]) + self.config.eps)[:, None]
        return (0.2 * np.sqrt(x.size) * rows / np.linalg.norm(rows)).T


class MuonH(Muon):
    """W' = R normalize(W - rate R normalize(O)), with R the norm of the initial W: equation 2 of arXiv:2606.16899."""

    def __init__(self, name, config, param):
        super().__init__(name, config, param)
        if name in MATRICES:
            self.radii, self.decay = np.linalg.norm(param, axis=(-2, -1), keepdims=True), 0.0

    def scale(self, number, x):
        return x / np.linalg.norm(x)

    def step(self, step):
        before = self.p
        super().step(step)
        if self.name in MATRICES:
            moved = before + self.radii * (self.p - before)
            self.p = self.radii * moved / np.linalg.norm(moved, axis=(-2, -1), keepdims=True)


def newton_schulz(matrix):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        A = x @ x.T
        x = a * x + b * A @ x + c * A @ A @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class GaLore(AdamW):
    def direction(self, g, step):
        if self.name not in MATRICES:
            return self.adam(g, step)
        grads = g.reshape(-1, *g.shape[-2:])
        if step == 0:
            self.adams = [Adam(self.config, matrix) for matrix in grads]
        if step % self.config.projection_every_steps == 0:
            self.projectors = [self.projector(matrix) for matrix in grads]
        found = []
        for matrix, P, adam in zip(grads, self.projectors, self.adams, strict=True):
            is_left = matrix.shape[0] <= matrix.shape[1]
            low = P.T @ matrix if is_left else matrix @ P
            found.append(P @ adam(low, step) if is_left else adam(low, step) @ P.T)
        return self.config.projection_scale * np.stack(found).reshape(g.shape)

    def projector(self, matrix):
        left, _, right = np.linalg.svd(matrix)
        vectors = (left if matrix.shape[0] <= matrix.shape[1] else right.T)[:, : self.config.rank]
        return vectors * np.sign([column[np.abs(column).argmax()] for column in vectors.T])


class ScheduleFree(AdamW):
    """The parameter `p` is x, the point of evaluation."""

    def __init__(self, name, config, param):
        super().__init__(name, config, param)
        self.z, self.v, self.weights, self.max_rate = param, 0.0, 0.0, 0.0

    def step(self, step):
        config, rate = self.config, compute_rate(step)
        y = (1 - config.b1) * self.z + config.b1 * self.p
        g = compute_gradient(self.name, y, step)
        self.v = config.b2 * self.v + (1 - config.b2) * g**2
        root = np.sqrt(self.v / (1 - config.b2 ** (step + 1))) + config.eps
        self.z = self.z - rate * (g / root + self.decay * y)
        self.max_rate = max(self.max_rate, rate)
        self.weights += self.max_rate**2
        share = self.max_rate**2 / self.weights
        self.p = (1 - share) * self.p + share * self.z


class Adafactor(AdamW):
    rows = columns = v = 0.0

    def step(self, step):
        g, beta = compute_gradient(self.name, self.p, step), 1 - (step + 1) ** -0.8
        square = g**2 + 1e-30
        if self.name == "large":  # smaller parameters are not factored
            self.rows = beta * self.rows + (1 - beta) * square.mean(1, keepdims=True)
            self.columns = beta * self.columns + (1 - beta) * square.mean(0, keepdims=True)
            v = self.rows * self.columns / self.rows.mean()
        else:
            v = self.v = beta * self.v + (1 - beta) * square
        u = g / np.sqrt(v)
        u = u / max(1.0, compute_rms(u))
        self.p = self.p - compute_rate(step) * (max(1e-3, compute_rms(self.p)) * u + self.decay * self.p)


def compute_rms(x):
    return np.sqrt(np.mean(x**2))


FORMULAS = {
    "adamw": AdamW,
    "adam": CoupledAdam,
    "lion": Lion,
    "sgd": Momentum,
    "muon": Muon,
    "normuon": NorMuon,
    "muonh": MuonH,
    "galore": GaLore,
    "schedule_free_adamw": ScheduleFree,
    "adafactor": Adafactor,
}


def run_training(config, parameters=PARAMETERS, steps=STEPS, schedule=None, run_by=jax.jit):
    """Return parameters and optimizer state after some steps."""
    rates = jnp.asarray([compute_rate(step) for step in range(STEPS)])
    tx = make_optimizer(config.name, config, schedule or (lambda step: rates[step]), parameters)
    noise = {name: jnp.asarray(each, jnp.float32) for name, each in NOISE.items()}

    def run(params):
        def step(number, carried):
            params, state = carried
            point = compute_gradient_point(params, state)
            grads = {name: 0.5 * point[name] + noise[name][number] for name in params}
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, steps, step, (params, tx.init(params)))

    return run_by(run)({name: jnp.asarray(PARAMS[name], jnp.float32) for name in parameters})


def make_config(name, **keys):
    return OptimizerConfig(name=name, weight_decay=DECAY, **{"clip_norm": None} | KEYS.get(name, {}) | keys)


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_match_the_formula(name):
    config = make_config(name)
    with jax.default_matmul_precision("highest"):
        params, _ = run_training(config)
    for key in PARAMETERS:
        formula = FORMULAS[name](key, config, PARAMS[key])
        for step in range(STEPS):
            formula.step(step)
        error = np.linalg.norm(params[key] - formula.p) / np.linalg.norm(formula.p)
        moved = np.linalg.norm(formula.p - PARAMS[key]) / np.linalg.norm(formula.p)
        assert error < 1e-5 < 1e-2 < moved, key


def list_shapes(function):
    return functools.partial(jax.eval_shape, function)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "moments" in OPTIMIZERS[name].defaults])
def test_bfloat16_moments_halve_only_the_memory_of_first_moments(name):
    _, narrow = run_training(make_config(name, moments="bfloat16"), run_by=list_shapes)
    _, wide = run_training(make_config(name), run_by=list_shapes)
    leaves = zip(jax.tree_util.tree_leaves_with_path(narrow), jax.tree.leaves(wide), strict=True)
    kinds = {(jax.tree_util.keystr(path).partition("['")[0], leaf.dtype, other.dtype) for (path, leaf), other in leaves}
    halved = {path for path, dtype, _ in kinds if dtype == jnp.bfloat16}
    assert {path.rpartition(".")[2] for path in halved} <= {"mu", "trace"}
    assert halved
    assert all(dtype == other for path, dtype, other in kinds if path not in halved)
    for path in halved:
        assert {str(other) for found, _, other in kinds if found == path} == {"float32"}
