"""What goes from device to device where the positions of a row are cut: inside of a program of one device.

Shape legend: B batch, on one device t positions, 2 halves of c, P halves of keys; D any axes behind.
"""

import functools

import jax
import jax.numpy as jnp

from experiments.model.row_layout import Rows


def dealt(rows: Rows, x: jax.Array) -> jax.Array:
    """Two halves of each row (B, 2, c, D), from both ends of it, of (B, t, D); its own where nothing is dealt."""
    halves = x.reshape(x.shape[0], 2, rows.half_tokens, *x.shape[2:])
    if not rows.is_dealt:
        return halves
    even, odd = (_sent(rows, halves[:, parity], _deal(rows, parity)) for parity in (0, 1))
    is_even = jax.lax.axis_index(rows.axes) % 2 == 0
    return jnp.stack([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)


def returned(rows: Rows, halves: jax.Array) -> jax.Array:
    """`x` of `dealt(rows, x)`."""
    if rows.is_dealt:
        is_even = jax.lax.axis_index(rows.axes) % 2 == 0
        first, second = halves[:, 0], halves[:, 1]
        sent = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
        back = (
            _sent(rows, half, [(there, here) for here, there in _deal(rows, parity)])
            for parity, half in enumerate(sent)
        )
        halves = jnp.stack([*back], axis=1)
    return halves.reshape(halves.shape[0], -1, *halves.shape[3:])


def _deal(rows: Rows, parity: int) -> list[tuple[int, int]]:
    """Where the device of each half of this parity sends it. The lower halves of devices come by their own parity."""
    n = rows.num_shards
    halves = [2 * place + parity for place in range(n)]
    return [(place, half if half < n else 2 * n - 1 - half) for place, half in enumerate(halves)]


def _sent(rows: Rows, x: jax.Array, ways: list[tuple[int, int]]) -> jax.Array:
    """What comes if every device sends; nothing moves where all keep their own, as even halves of two devices do."""
    if all(here == there for here, there in ways):
        return x
    return jax.lax.ppermute(x, rows.axes, ways)


def gathered(rows: Rows, x: jax.Array) -> jax.Array:
    """(B, P c, D) of (B, t, D): the whole row, or of a narrow window what it reaches; zeros before a row's begin."""
    if rows.is_dealt:
        return _whole(rows, x)
    n = rows.num_shards
    others = [
        jax.lax.ppermute(x, rows.axes, [(place, place + distance) for place in range(n - distance)])
        for distance in range(rows.before, 0, -1)
    ]
    return jnp.concatenate([*others, x], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(rows: Rows, x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, rows.axes, axis=1, tiled=True)


_whole.defvjp(lambda rows, x: (_whole(rows, x), None), lambda rows, _, g: (scattered(rows, g),))


def scattered(rows: Rows, x: jax.Array) -> jax.Array:
    """The sum of what all devices have of a device's own positions, of what lies as `gathered` has it.

    The whole row is summed as a matrix of positions and all else: of more axes libtpu makes an all-reduce, which sends
    twice as much.
    """
    if rows.is_dealt:
        B, T, *rest = x.shape
        x_TxBD = x.swapaxes(0, 1).reshape(T, -1)
        own_txBD = jax.lax.psum_scatter(x_TxBD, rows.axes, scatter_dimension=0, tiled=True)
        return own_txBD.reshape(-1, B, *rest).swapaxes(0, 1)
    n, parts = rows.num_shards, jnp.split(x, rows.before + 1, axis=1)
    total = parts.pop()
    for distance, part in zip(range(rows.before, 0, -1), parts, strict=True):
        back = [(place + distance, place) for place in range(n - distance)]
        total = total + jax.lax.ppermute(part, rows.axes, back)
    return total


def passed_on(rows: Rows, x: jax.Array, distance: int = 1) -> jax.Array:
    """What the device had that comes so many before this one in the ring."""
    n = rows.num_shards
    return jax.lax.ppermute(x, rows.axes, [(place, (place + distance) % n) for place in range(n)])
