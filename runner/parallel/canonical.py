"""Canonicalised jaxpr, so that XLA simplifies it identically on one and on many devices.

Before its SPMD partitioner, that is, only for programs of several devices, XLA inlines calls and merges equal
operations. A program for a single device reaches the algebraic simplifier unchanged, and some rules of the simplifier
depend on how many users an operation has. For example, it turns a division by a broadcast sum into a multiplication by
1 / sum if nothing else uses the broadcast. A softmax and its gradient share such a broadcast, so their last bits
differed between one and two devices. A canonicalised jaxpr has every call inlined and contains every operation once, so
it reaches the simplifier in the same form on any number of devices.

The arithmetic does not change: operations and their order are those of the function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, new_jaxpr_eqn

Atom = Var | Literal

# Primitives that only call a jaxpr, with the parameter that holds it.
CALLS = {
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
}
# Primitives whose parameters hold jaxprs, which are canonicalised as well.
_HOLDERS = {*CALLS, "cond", "scan", "shard_map", "while"}
# Primitives that broadcast a smaller operand implicitly, and therefore once per use.
_ARITHMETIC = {"add", "add_any", "atan2", "div", "max", "min", "mul", "nextafter", "pow", "rem", "sub"}
_BITWISE = {"and", "or", "shift_left", "shift_right_arithmetic", "shift_right_logical", "xor"}
_ELEMENTWISE = {*_ARITHMETIC, *_BITWISE, "eq", "ge", "gt", "le", "lt", "ne"}
_IMPURE = {"rng_uniform"}


def canonicalise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same values and traces to a canonicalised jaxpr."""

    @functools.wraps(function)
    def canonicalised(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        # Evaluating the jaxpr under the caller's trace makes that trace consist of the canonical operations.
        jaxpr = _Canonicaliser().convert(closed.jaxpr)
        results = jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return canonicalised


class _Canonicaliser:
    """Cache of canonicalised jaxprs. A jaxpr that occurs in several places is converted once and stays one object."""

    def __init__(self) -> None:
        # The key is the identity of the original, which the value keeps alive so that the identity stays unique.
        self._known: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def convert(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return the canonicalised jaxpr, with the same inputs and outputs."""
        if id(jaxpr) not in self._known:
            inputs: list[Atom] = [*jaxpr.constvars, *jaxpr.invars]
            builder = _JaxprBuilder(self)
            results = builder.inline(jaxpr, inputs, None)
            self._known[id(jaxpr)] = jaxpr, jaxpr.replace(eqns=builder.equations, outvars=results)
        return self._known[id(jaxpr)][1]

    def convert_param(self, value: Any) -> Any:
        """Return a parameter of an operation with every jaxpr in it canonicalised."""
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=self.convert(value.jaxpr))
        if isinstance(value, Jaxpr):
            return self.convert(value)
        if isinstance(value, tuple) and any(isinstance(each, ClosedJaxpr) for each in value):
            return tuple(map(self.convert_param, value))
        return value


class _JaxprBuilder:
    """Equations of one canonicalised jaxpr, added one by one. An operation that was added before is reused."""

    def __init__(self, canonicaliser: _Canonicaliser) -> None:
        self.equations: list[JaxprEqn] = []
        self._canonicaliser = canonicaliser
        self._known: dict[Any, list[Var]] = {}
        # The slices from which an array was stacked, so that slicing it again returns them.
        self._slices: dict[Atom, Sequence[Atom]] = {}

    def inline(self, jaxpr: Jaxpr, inputs: Sequence[Atom], names: Any) -> list[Atom]:
        """Add the equations of `jaxpr`, whose constants and inputs are given, and return the atoms of its results.

        `names`, the name stack of the call, becomes the prefix of each operation's name; it is None at the top.
        """
        environment: dict[Var, Atom] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else environment[atom]

        for equation in jaxpr.eqns:
            if names is not None:
                source = equation.source_info
                equation = equation.replace(source_info=source.replace(name_stack=names + source.name_stack))
            operands = [read(atom) for atom in equation.invars]
            params = equation.params
            results: Sequence[Atom]
            if (call := _find_call(equation, operands)) is not None:
                inner, constants, inputs = call
                inputs = self._separate(equation, inputs)
                results = self.inline(inner, [*constants, *inputs], equation.source_info.name_stack)
            elif (folded := _fold_constant(equation, operands)) is not None:
                results = [folded]
            elif (
                # The lowering of a fully unrolled scan writes out all iterations, so they are written out here already.
                equation.primitive.name == "scan"
                and params["unroll"] >= params["length"] > 1
                and not params["jaxpr"].consts
            ):
                results = self._unroll(equation, operands)
            else:
                results = self._add(equation, operands)
            environment.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _add(self, equation: JaxprEqn, operands: list[Atom]) -> list[Var]:
        """Return the results of an operation, which is added unless an equal one is there."""
        name, params = equation.primitive.name, equation.params
        if name in _ELEMENTWISE:
            operands = [self._broadcast(equation, atom) for atom in operands]
        key = _make_key(equation, operands)
        if key in self._known and not equation.effects and name not in _IMPURE:
            return self._known[key]
        if name in _HOLDERS:
            params = {name: self._canonicaliser.convert_param(value) for name, value in params.items()}
            if name == "scan":
                # Partially unrolled iterations would be written out by the lowering, and not be merged.
                params["unroll"] = 1
        results = [Var(each.aval) for each in equation.outvars]
        self.equations.append(equation.replace(invars=operands, outvars=results, params=params))
        self._known[key] = results
        return results

    def _unroll(self, equation: JaxprEqn, operands: Sequence[Atom]) -> list[Atom]:
        """Return the results of a scan whose iterations are inlined one after the other."""
        params = equation.params
        body, (num_consts, num_carry) = params["jaxpr"], _count_scan_inputs(params)
        consts, carry = operands[:num_consts], operands[num_consts:][:num_carry]
        stacks = operands[num_consts + num_carry :]
        order = range(params["length"])
        outputs = {}
        # A reversed scan visits the slices from the last to the first.
        for number in reversed(order) if params["reverse"] else order:
            slices = [self._slice(equation, stack, number) for stack in stacks]
            found = self.inline(body.jaxpr, [*consts, *carry, *slices], equation.source_info.name_stack)
            carry, outputs[number] = found[:num_carry], found[num_carry:]
        stacked: list[Atom] = []
        for column in zip(*(outputs[number] for number in order), strict=True):
            stack = self._trace(equation, _stack, column)
            self._slices[stack] = column
            stacked.append(stack)
        return [*carry, *stacked]

    def _slice(self, equation: JaxprEqn, stack: Atom, number: int) -> Atom:
        """Return one slice of an array along its first axis; if the array was stacked here, the original slice."""
        if not isinstance(stack, Literal) and stack in self._slices:
            return self._slices[stack][number]
        return self._trace(equation, functools.partial(lax.index_in_dim, index=number, keepdims=False), [stack])

    def _trace(self, equation: JaxprEqn, function: Callable[..., Any], operands: Sequence[Atom]) -> Atom:
        """Add the operations of a function that only moves data, for an unrolled `equation`."""
        shapes = [jax.ShapeDtypeStruct(_get_aval(atom).shape, _get_aval(atom).dtype) for atom in operands]
        with equation.ctx.manager:  # the mesh of the operation, which may be inside of a `shard_map`
            jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
        equations = [each.replace(source_info=equation.source_info, ctx=equation.ctx) for each in jaxpr.eqns]
        return self.inline(jaxpr.replace(eqns=equations), operands, None)[0]

    def _separate(self, equation: JaxprEqn, operands: list[Atom]) -> list[Atom]:
        """Return the operands of a call, behind a barrier where its operations must not merge with earlier ones.

        These are the operands of rematerialisation: what depends on them is computed a second time on purpose.
        """
        params = equation.params
        prevents = params["prevent_cse"] if equation.primitive.name == "remat2" and params["differentiated"] else False
        is_separate = prevents if isinstance(prevents, tuple) else (prevents,) * len(operands)
        # The operands of one barrier must vary along the same axes of a `shard_map`.
        groups: dict[Any, list[int]] = {}
        for position, atom in enumerate(operands):
            if is_separate[position]:
                groups.setdefault(_get_aval(atom).manual_axis_type, []).append(position)
        separated = list(operands)
        for positions in groups.values():
            inputs = [operands[position] for position in positions]
            results = self._bind(equation, lax.optimization_barrier_p, inputs, [atom.aval for atom in inputs], {})
            for position, result in zip(positions, results, strict=True):
                separated[position] = result
        return separated

    def _broadcast(self, equation: JaxprEqn, atom: Atom) -> Atom:
        """Return an operand of an operation, broadcast to the shape of its result."""
        operand, result = _get_aval(atom), _get_aval(equation.outvars[0])
        if operand.shape == result.shape:
            return atom
        dimensions = tuple(range(result.ndim - operand.ndim, result.ndim))
        params = {"shape": result.shape, "broadcast_dimensions": dimensions, "sharding": None}
        wide = result.update(dtype=operand.dtype, weak_type=operand.weak_type)
        return self._bind(equation, lax.broadcast_in_dim_p, [atom], [wide], params)[0]

    def _bind(
        self, equation: JaxprEqn, primitive: Primitive, operands: list[Atom], avals: Sequence[Any], params: Any
    ) -> list[Var]:
        """Add a new operation in front of `equation`, and return its results, which have the given avals."""
        results = [Var(aval) for aval in avals]
        new = new_jaxpr_eqn(operands, results, primitive, params, set(), equation.source_info, equation.ctx)
        return self._add(new, operands)


def _get_aval(atom: Atom) -> Any:
    """Return the shape and type of an atom, untyped: the type of `aval` does not declare its attributes."""
    return atom.aval


def _find_call(equation: JaxprEqn, operands: list[Atom]) -> tuple[Jaxpr, list[Atom], list[Atom]] | None:
    """Return the jaxpr that an operation calls, its constants and its operands; None if it does more than call it."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        branch = _find_branch(params, operands[0])
        return None if branch is None else _open_jaxpr(branch, operands[1:])
    if name not in CALLS:
        return None
    shardings = (*params["in_shardings"], *params["out_shardings"]) if name == "jit" else ()
    if any(isinstance(each, jax.sharding.Sharding) for each in shardings):
        return None  # Inlining would lose the shardings.
    called = params[CALLS[name]]
    # The class cannot be used to decide: newer versions of JAX have one class of jaxprs, with or without constant
    # values.
    return _open_jaxpr(called, operands) if hasattr(called, "consts") else (called, [], operands)


def _count_scan_inputs(params: Any) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a scan."""
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    # Newer versions of JAX have a tree of constants, carried values and slices instead.
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _open_jaxpr(closed: ClosedJaxpr, operands: list[Atom]) -> tuple[Jaxpr, list[Atom], list[Atom]] | None:
    """Return a closed jaxpr with its constants as literals; None for constants of extended types, such as keys."""
    pairs = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    if any(jax.dtypes.issubdtype(variable.aval.dtype, jax.dtypes.extended) for variable, _ in pairs):
        return None
    return closed.jaxpr, [Literal(np.asarray(value), variable.aval) for variable, value in pairs], operands


def _find_branch(params: Any, index: Atom) -> ClosedJaxpr | None:
    """Return the branch of a `cond` that is taken, if a constant or the platform decides it."""
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is not None:
        device = jax.sharding.get_abstract_mesh().abstract_device
        here = jax.default_backend() if device is None else device.platform
        # A branch may be named after the vendor of the GPU (`cuda`, `rocm`) instead of `gpu`.
        names = {here, "cuda", "rocm"} if here == "gpu" else {here}
        fitting = (branch for branch, each in zip(branches, platforms, strict=True) if each is None or names & {*each})
        return next(fitting, None)
    if not isinstance(index, Literal):
        return None
    return branches[min(max(int(index.val), 0), len(branches) - 1)]


def _fold_constant(equation: JaxprEqn, operands: Sequence[Atom]) -> Literal | None:
    """Return the result of an operation on constants that selects a branch, as `lax.switch` has them."""
    name, values = equation.primitive.name, [atom.val for atom in operands if isinstance(atom, Literal)]
    if len(values) < len(operands) or name not in ("clamp", "convert_element_type"):
        return None
    value = np.clip(values[1], values[0], values[2]) if name == "clamp" else values[0]
    aval = _get_aval(equation.outvars[0])
    return Literal(np.asarray(value, aval.dtype), aval) if aval.shape == () else None


def _stack(*slices: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(each, (0,)) for each in slices], 0)


def _make_key(equation: JaxprEqn, operands: Sequence[Atom]) -> Any:
    """Return a key that is equal for operations with equal results."""

    def make_param_key(value: Any) -> Any:
        try:
            hash(value)
        except TypeError:
            return id(value)
        return value

    def make_atom_key(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return str(atom.aval), value.dtype.name, value.tobytes()
        return atom

    params = tuple((name, make_param_key(value)) for name, value in sorted(equation.params.items()))
    results = tuple(str(each.aval) for each in equation.outvars)
    return equation.primitive, equation.ctx, params, results, tuple(map(make_atom_key, operands))
