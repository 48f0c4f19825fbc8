"""A traced program with each of its operations once, and nothing in it that a compiler must unfold first. Pure.

XLA unfolds calls and merges equal operations before its partitioner, so where a program is of several devices. That of
a single device goes to the algebraic simplifier as it is, and some of its rules ask how many users an operation has: it
makes a division by a sum that is broadcast a multiplication by 1 / sum, if nobody else uses the broadcast. A softmax
and its gradient share one, and so their last bits differed between one device and two. What comes in this form meets
the simplifier in the same one on any number of devices.

It is no other arithmetic: the operations and their order are those of the program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, new_jaxpr_eqn

Atom = Var | Literal

# Calls, by what holds the program that they call.
_CALLS = {
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
}
# Operations that hold programs, which are brought to this form too.
_HOLDERS = {*_CALLS, "cond", "scan", "shard_map", "while"}
# What broadcasts a smaller operand by itself, each time anew.
_OF_NUMBERS = {"add", "add_any", "atan2", "div", "max", "min", "mul", "nextafter", "pow", "rem", "sub"}
_OF_BITS = {"and", "or", "shift_left", "shift_right_arithmetic", "shift_right_logical", "xor"}
_ELEMENTWISE = {*_OF_NUMBERS, *_OF_BITS, "eq", "ge", "gt", "le", "lt", "ne"}
_IMPURE = {"rng_uniform"}


def canonicalise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same; what is traced of it has each operation once."""

    @functools.wraps(function)
    def once(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        program = _Forms().of(closed.jaxpr)
        found = jax.core.eval_jaxpr(program, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return once


class _Forms:
    """Programs in this form; of one that stands in several places there is one."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of(self, program: Jaxpr) -> Jaxpr:
        """A program with the same inputs and results."""
        if id(program) not in self._known:
            inputs: list[Atom] = [*program.constvars, *program.invars]
            taken = _Taken(self)
            results = taken.over(program, inputs, None)
            self._known[id(program)] = program, program.replace(eqns=taken.equations, outvars=results)
        return self._known[id(program)][1]

    def within(self, value: Any) -> Any:
        """A parameter of an operation, with the programs that it holds in this form."""
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=self.of(value.jaxpr))
        if isinstance(value, Jaxpr):
            return self.of(value)
        if isinstance(value, tuple) and any(isinstance(each, ClosedJaxpr) for each in value):
            return tuple(map(self.within, value))
        return value


class _Taken:
    """Operations taken over from a program, and from those that it calls, each once."""

    def __init__(self, forms: _Forms) -> None:
        self.equations: list[JaxprEqn] = []
        self._forms = forms
        self._known: dict[Any, list[Var]] = {}
        self._rows: dict[Atom, Sequence[Atom]] = {}  # of arrays that were stacked of them

    def over(self, program: Jaxpr, inputs: Sequence[Atom], names: Any) -> list[Atom]:
        """Take over what `program` computes of its constants and `inputs`; returns where its results are.

        `names` are those under which it was called, for what is told of each operation.
        """
        here: dict[Var, Atom] = dict(zip([*program.constvars, *program.invars], inputs, strict=True))

        def found(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else here[atom]

        for equation in program.eqns:
            if names is not None:
                source = equation.source_info
                equation = equation.replace(source_info=source.replace(name_stack=names + source.name_stack))
            given = [found(atom) for atom in equation.invars]
            results: Sequence[Atom]
            if (called := _called(equation, given)) is not None:
                inner, constants, inputs = called
                results = self.over(
                    inner, [*constants, *self._apart(equation, inputs)], equation.source_info.name_stack
                )
            elif (known := _known(equation, given)) is not None:
                results = [known]
            elif _is_written_out(equation):
                results = self._unrolled(equation, given)
            else:
                results = self._once(equation, given)
            here.update(zip(equation.outvars, results, strict=True))
        return [found(atom) for atom in program.outvars]

    def _once(self, equation: JaxprEqn, given: list[Atom]) -> list[Var]:
        """The results of an operation, which may have been taken over before."""
        name, params = equation.primitive.name, equation.params
        if name in _ELEMENTWISE:
            given = [self._broadcast(equation, atom) for atom in given]
        key = _key(equation, given)
        if key in self._known and not equation.effects and name not in _IMPURE:
            return self._known[key]
        if name in _HOLDERS:
            params = {name: self._forms.within(value) for name, value in params.items()}
            params |= {"unroll": 1} if name == "scan" else {}  # of several rounds the second would not be merged
        results = [Var(each.aval) for each in equation.outvars]
        self.equations.append(equation.replace(invars=given, outvars=results, params=params))
        self._known[key] = results
        return results

    def _unrolled(self, equation: JaxprEqn, given: Sequence[Atom]) -> list[Atom]:
        """The results of a loop whose rounds a compiler would write out one behind the other."""
        params = equation.params
        body, num_consts, num_carry = params["jaxpr"], params["num_consts"], params["num_carry"]
        consts, carry, stacks = given[:num_consts], given[num_consts:][:num_carry], given[num_consts + num_carry :]
        order = range(params["length"])
        made = {}
        for number in reversed(order) if params["reverse"] else order:
            here = [self._row(equation, stack, number) for stack in stacks]
            found = self.over(body.jaxpr, [*consts, *carry, *here], equation.source_info.name_stack)
            carry, made[number] = found[:num_carry], found[num_carry:]
        columns = zip(*(made[number] for number in order), strict=True)
        return [*carry, *(self._stack(equation, rows) for rows in columns)]

    def _row(self, equation: JaxprEqn, stack: Atom, number: int) -> Atom:
        """One row of an array: if it was stacked, the one that was."""
        if not isinstance(stack, Literal) and stack in self._rows:
            return self._rows[stack][number]
        return self._moved(equation, functools.partial(lax.index_in_dim, index=number, keepdims=False), [stack])

    def _stack(self, equation: JaxprEqn, rows: Sequence[Atom]) -> Atom:
        stack = self._moved(equation, _stacked, rows)
        self._rows[stack] = rows
        return stack

    def _moved(self, equation: JaxprEqn, function: Callable[..., Any], given: Sequence[Atom]) -> Atom:
        """What a function that moves data makes, for an operation that is written out."""
        shapes = [jax.ShapeDtypeStruct(_aval(atom).shape, _aval(atom).dtype) for atom in given]
        with equation.ctx.manager:  # under the mesh of the operation, which may stand in a `shard_map`
            program = jax.make_jaxpr(function)(*shapes).jaxpr
        equations = [each.replace(source_info=equation.source_info, ctx=equation.ctx) for each in program.eqns]
        return self.over(program.replace(eqns=equations), given, None)[0]

    def _apart(self, equation: JaxprEqn, given: list[Atom]) -> list[Atom]:
        """What is given to a call, behind a barrier where its operations must not become one with those before it."""
        is_apart = _is_apart(equation, len(given))
        groups: dict[Any, list[int]] = {}  # a barrier takes what varies along the same axes of a `shard_map`
        for place, atom in enumerate(given):
            if is_apart[place]:
                groups.setdefault(_aval(atom).manual_axis_type, []).append(place)
        found = list(given)
        for places in groups.values():
            held = [given[place] for place in places]
            results = self._made(equation, lax.optimization_barrier_p, held, [atom.aval for atom in held], {})
            for place, result in zip(places, results, strict=True):
                found[place] = result
        return found

    def _broadcast(self, equation: JaxprEqn, atom: Atom) -> Atom:
        """An operand of an operation, as large as its result."""
        given, result = _aval(atom), _aval(equation.outvars[0])
        if given.shape == result.shape:
            return atom
        dimensions = tuple(range(result.ndim - given.ndim, result.ndim))
        params = {"shape": result.shape, "broadcast_dimensions": dimensions, "sharding": None}
        wide = result.update(dtype=given.dtype, weak_type=given.weak_type)
        return self._made(equation, lax.broadcast_in_dim_p, [atom], [wide], params)[0]

    def _made(
        self, equation: JaxprEqn, primitive: Primitive, given: list[Atom], avals: Sequence[Any], params: Any
    ) -> list[Var]:
        """The results of an operation that stands before another one, with these shapes and types."""
        results = [Var(aval) for aval in avals]
        made = new_jaxpr_eqn(given, results, primitive, params, set(), equation.source_info, equation.ctx)
        return self._once(made, given)


def _aval(atom: Atom) -> Any:
    """Shape and type."""
    return atom.aval


def _called(equation: JaxprEqn, given: list[Atom]) -> tuple[Jaxpr, list[Atom], list[Atom]] | None:
    """The program that an operation calls, if that is all it does, its constants, and what it is given."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        branch = _branch(params, given[0])
        return None if branch is None else _with_constants(branch, given[1:])
    if name not in _CALLS:
        return None
    shardings = (*params["in_shardings"], *params["out_shardings"]) if name == "jit" else ()
    if any(isinstance(each, jax.sharding.Sharding) for each in shardings):
        return None
    held = params[_CALLS[name]]
    return (held, [], given) if isinstance(held, Jaxpr) else _with_constants(held, given)


def _with_constants(closed: ClosedJaxpr, given: list[Atom]) -> tuple[Jaxpr, list[Atom], list[Atom]] | None:
    """A program, its constants as they stand in another one, and what it is given; None if one cannot stand there."""
    pairs = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    if any(jax.dtypes.issubdtype(variable.aval.dtype, jax.dtypes.extended) for variable, _ in pairs):
        return None
    return closed.jaxpr, [Literal(np.asarray(value), variable.aval) for variable, value in pairs], given


def _branch(params: Any, index: Atom) -> ClosedJaxpr | None:
    """The branch that is taken, if that is known: one that is chosen by a number, or by the platform."""
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is not None:
        device = jax.sharding.get_abstract_mesh().abstract_device
        here = jax.default_backend() if device is None else device.platform
        names = {here, "cuda", "rocm"} if here == "gpu" else {here}
        fitting = (branch for branch, each in zip(branches, platforms, strict=True) if each is None or names & {*each})
        return next(fitting, None)
    if not isinstance(index, Literal):
        return None
    return branches[min(max(int(index.val), 0), len(branches) - 1)]


def _known(equation: JaxprEqn, given: Sequence[Atom]) -> Literal | None:
    """The result of an operation of numbers on which the choice of a branch hangs, as in `lax.switch`."""
    name, values = equation.primitive.name, [atom.val for atom in given if isinstance(atom, Literal)]
    if len(values) < len(given) or name not in ("clamp", "convert_element_type"):
        return None
    value = np.clip(values[1], values[0], values[2]) if name == "clamp" else values[0]
    aval = _aval(equation.outvars[0])
    return Literal(np.asarray(value, aval.dtype), aval) if aval.shape == () else None


def _is_apart(equation: JaxprEqn, number: int) -> Sequence[bool]:
    """For each operand of a call whether what is made of it is computed a second time, on purpose."""
    params = equation.params
    prevents = params["prevent_cse"] if equation.primitive.name == "remat2" and params["differentiated"] else False
    return prevents if isinstance(prevents, tuple) else (prevents,) * number


def _is_written_out(equation: JaxprEqn) -> bool:
    """Whether it is a loop whose rounds are all written out by its lowering."""
    name, params = equation.primitive.name, equation.params
    return name == "scan" and params["unroll"] >= params["length"] > 1 and not params["jaxpr"].consts


def _stacked(*rows: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(row, (0,)) for row in rows], 0)


def _key(equation: JaxprEqn, given: Sequence[Atom]) -> Any:
    """What two operations have in common that have the same results."""
    params = tuple((name, _of_param(value)) for name, value in sorted(equation.params.items()))
    results = tuple(str(each.aval) for each in equation.outvars)
    return equation.primitive, equation.ctx, params, results, tuple(map(_of_atom, given))


def _of_param(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _of_atom(atom: Atom) -> Any:
    if isinstance(atom, Literal):
        value = np.asarray(atom.val)
        return str(atom.aval), value.dtype.name, value.tobytes()
    return atom
