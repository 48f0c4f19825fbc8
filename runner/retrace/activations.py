"""Activations of a step by module and layer, from one forward pass without dropout.

Flax keeps intermediates of a loop over layers only if the model asks for it. Here the results of modules are named in
the traced `forward` instead, and the program is evaluated with the named values as further results. A module in a loop
(`nn.scan`) so has its values of all layers, whatever the model says. Modules below a `cond`, a `while` or a `shard_map`
have none, and are listed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from runner.parallel.canonical import CALLS
from runner.parallel.mesh import make_batch_sharding
from runner.retrace.scratch import Retracing
from runner.train.observation import use_observer
from runner.train.state import bind_variables, get_variables, make_params_merger

_PREFIX, _INPUT, _OF = "activation:", "input of ", " of "
_CALLERS = {**CALLS, "checkpoint": "jaxpr"}


class Activation(NamedTuple):
    """Result of a module, or its input, for the first examples of a batch.

    Attributes:
        name: dotted path of the module in the parameters, or the class of the model; after "input of " for an input,
            and after the name of the value and " of " for one that the model lets a tool observe.
        loop: number of the loop over layers that computes it, None outside of loops.
        values: the array; (L, ...) of all layers of a loop.
    """

    name: str
    loop: int | None
    values: Any

    @property
    def module(self) -> str:
        """Path of the module."""
        return self.name.rpartition(_OF)[2]

    @property
    def is_observed(self) -> bool:
        """True for a value that a tool observes, and the step itself does not compute."""
        return _OF in self.name and not self.name.startswith(_INPUT)


class Capture(NamedTuple):
    """Activations of a step.

    Attributes:
        activations: results of modules, in traced order.
        left_out: primitive, such as `cond`, below which a module is computed, by the name of the module.
    """

    activations: list[Activation]
    left_out: Mapping[str, str]


def capture_activations(retracing: Retracing, num_examples: int, has_inputs: bool = False) -> Capture:
    """Return the floating-point results of all modules for the first examples of the next step.

    The arrays stay on the devices. If `has_inputs`, the first argument of each module precedes its result, and values
    that are only observed are left out.
    """
    job, step = retracing.job, retracing.job.step
    setup, arrays = job.programs.at(step).train_setup, retracing.load_arrays(step)
    forward = job.at_step(step + 1).forward
    labels: list[tuple[str, int | None]] = []
    left_out: dict[str, str] = {}
    # A batch that is smaller than the number of shards is repeated.
    examples = np.arange(num_examples) % len(next(iter(arrays.values())))
    sharding = make_batch_sharding(setup.mesh, job.programs.at(step).layout.has_sequences)
    batch = {name: jax.device_put(values[None, examples], sharding) for name, values in arrays.items()}

    @jax.jit
    def run(state: Any, batch: Any) -> list[jax.Array]:
        apply_fn = bind_variables(state.apply_fn, get_variables(state))
        inputs = (
            make_params_merger(state)(state.params),
            {name: values[0] for name, values in batch.items()} | {"example": jnp.asarray(examples)},
        )
        namer = _Namer(has_inputs)
        # A comparison needs no values that the step does not compute.
        observing = contextlib.nullcontext() if has_inputs else use_observer(namer.observe)
        with nn.intercept_methods(namer.call), observing:
            closed = jax.make_jaxpr(lambda params, micro: forward(apply_fn, params, micro, None)[0])(*inputs)
        left_out.update(_find_left_out(closed.jaxpr, None))
        found: list[Activation] = []
        _evaluate(closed.jaxpr, [*closed.consts, *jax.tree.leaves(inputs)], found)
        # A module may be called several times.
        names = [each.name for each in found]
        calls = [names[: place + 1].count(name) for place, name in enumerate(names)]
        labels[:] = [
            (each.name if call == 1 else f"{each.name} (call {call})", each.loop)
            for each, call in zip(found, calls, strict=True)
        ]
        return [each.values for each in found]

    with setup.sharding_rules():
        values = run(job.state, batch)
    activations = [Activation(*label, each) for label, each in zip(labels, values, strict=True)]
    names = {each.name for each in activations}
    # Inputs and observed values follow their modules.
    others = {name: primitive for name, primitive in left_out.items() if name not in names and _OF not in name}
    return Capture(activations, others)


class _Namer:
    """Names for the results of modules, or for the first argument of each too, in a program that is being traced."""

    def __init__(self, has_inputs: bool):
        self._has_inputs = has_inputs
        self._modules: list[str] = []  # whose calls are under way

    def call(
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        """Call a method of a module, and name its values if it is `__call__`; for `nn.intercept_methods`."""
        if context.method_name != "__call__":
            return method(*args, **kwargs)
        name = ".".join(context.module.path) or type(context.module).__name__
        if self._has_inputs and args:
            args = (_name_array(f"{_INPUT}{name}", args[0]), *args[1:])
        self._modules.append(name)
        try:
            results = method(*args, **kwargs)
        finally:
            self._modules.pop()
        return jax.tree.map(functools.partial(_name_array, name), results)

    def observe(self, name: str, value: jax.Array) -> None:
        """Name a value that the module under way lets a tool observe; for `use_observer`."""
        _name_array(f"{name}{_OF}{self._modules[-1]}", value)


def _name_array(name: str, value: Any) -> Any:
    is_array = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
    return checkpoint_name(value, f"{_PREFIX}{name}") if is_array else value


def _is_named(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "name" and equation.params["name"].startswith(_PREFIX)


def _find_inner(equation: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the jaxpr with named values that an equation calls or repeats, and its constants; None without one."""
    name = "jaxpr" if equation.primitive.name == "scan" else _CALLERS.get(equation.primitive.name)
    inner = None if name is None else equation.params.get(name)
    if inner is None:
        return None
    jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
    return (jaxpr, consts) if any(_is_named(each) or _find_inner(each) for each in jaxpr.eqns) else None


def _find_left_out(jaxpr: Jaxpr, primitive: str | None) -> Iterator[tuple[str, str]]:
    """Yield (name, primitive) of the named values below a primitive that is not evaluated by its equations."""
    for equation in jaxpr.eqns:
        if _is_named(equation) and primitive is not None:
            yield equation.params["name"].removeprefix(_PREFIX), primitive
        kind = equation.primitive.name
        inner = primitive if kind == "scan" or kind in _CALLERS else primitive or kind
        for values in equation.params.values():
            for value in values if isinstance(values, tuple | list) else [values]:
                if isinstance(value, Jaxpr | ClosedJaxpr):
                    yield from _find_left_out(value.jaxpr if isinstance(value, ClosedJaxpr) else value, inner)


def _evaluate(jaxpr: Jaxpr, args: Sequence[Any], found: list[Activation]) -> list[Any]:
    """Return the results of a jaxpr, whose constants and inputs are given, and add its named values to `found`."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands, inner = [*map(read, equation.invars)], _find_inner(equation)
        if _is_named(equation):
            found.append(Activation(equation.params["name"].removeprefix(_PREFIX), None, operands[0]))
            results = operands
        elif inner is None:
            with equation.ctx.manager:
                made = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
            results = [*made] if equation.primitive.multiple_results else [made]
        elif equation.primitive.name == "scan":
            results = _evaluate_scan(equation.params, *inner, operands, found)
        else:
            results = _evaluate(inner[0], [*inner[1], *operands], found)
        known.update(zip(equation.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def _evaluate_scan(
    params: Mapping[str, Any],
    inner: Jaxpr,
    consts: Sequence[Any],
    operands: Sequence[Any],
    found: list[Activation],
) -> list[Any]:
    """Evaluate a loop as `_evaluate`. Its named values get a leading axis of iterations."""
    num_fixed, num_carried = params["num_consts"], params["num_carry"]
    fixed, carried = [*consts, *operands[:num_fixed]], [*operands[num_fixed : num_fixed + num_carried]]
    names: list[str] = []

    def body(carry: Any, slices: Any) -> tuple[Any, Any]:
        inside: list[Activation] = []
        results = _evaluate(inner, [*fixed, *carry, *slices], inside)
        names[:] = [each.name for each in inside]
        return results[:num_carried], (results[num_carried:], [each.values for each in inside])

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (stacked, values) = lax.scan(body, carried, [*operands[num_fixed + num_carried :]], **options)
    loop = len(found)  # differs from that of every other loop, since each adds values
    found += [Activation(name, loop, each) for name, each in zip(names, values, strict=True)]
    return [*carry, *stacked]


def count_layers(activations: Sequence[Activation]) -> dict[str, int]:
    """Return the number of layers by the path of each module that is computed in a loop."""
    return {each.module: len(each.values) for each in activations if each.loop is not None}


def split_layers(name: str, values: Any, layers: Mapping[str, int]) -> Iterator[tuple[int | None, Any]]:
    """Yield (layer, array) of a leaf that stacks the layers of a loop, and else (None, the leaf itself)."""
    number = find_layers(name, values.shape, layers)
    yield from [(None, values)] if number is None else enumerate(values)


def find_layers(name: str, shape: Sequence[int], layers: Mapping[str, int]) -> int | None:
    """Return how many layers the first axis of a leaf stacks, given `count_layers`; None if it stacks none."""
    parts = name.split(".")
    known = {layers.get(".".join(parts[:end])) for end in range(1, len(parts))} - {None}
    return shape[0] if shape and shape[0] in known else None


def iterate_in_order(activations: Sequence[Activation]) -> Iterator[tuple[str, int | None, Any]]:
    """Yield (name, layer, array) in the order of computation: all modules of a layer before the next layer."""
    start = 0
    while start < len(activations):
        loop = activations[start].loop
        end = start + 1
        while loop is not None and end < len(activations) and activations[end].loop == loop:
            end += 1
        for layer in [None] if loop is None else range(len(activations[start].values)):
            for name, _, values in activations[start:end]:
                yield name, layer, values if layer is None else values[layer]
        start = end
