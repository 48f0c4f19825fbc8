"""Choice of ring attention or all-gather context parallelism by predicted time.

Attention over sequences that are sharded over several devices can exchange keys and values in two ways:

- `gather`: all-gather. Every device collects the keys and values of the whole sequence for its own queries.
- `ring`: ring attention. Every device lets its queries attend to the keys and values at hand, which then move on to the
  next device.

The functions are pure: numbers in, seconds out. They know no mesh and no model, and import no jax.
"""

from dataclasses import dataclass, replace
from typing import Literal

from runner.accelerator import PeakRates, find_chip

ContextMethod = Literal["gather", "ring"]

# For chips that the catalogue does not know, or whose rates depend on the machine: a few cores of a server.
UNKNOWN_CHIP_RATES = PeakRates(500e9, 16 * 2**30, 50e9, 10e9, 1e9)
_GATHERED_SHARE_MAX = 1 / 4  # share of a device's memory for gathered keys and values with their gradients
_TILE_BYTES = 8  # a float32 score of a tile that one operation writes to memory and another one reads


@dataclass(frozen=True)
class AttentionShape:
    """Shape of attention on one device: its own examples and heads of sequences that are sharded over `shards` devices.

    Attributes:
        shards: Number of devices over which a sequence is sharded.
        batch: Examples of the device.
        length: Positions of a whole sequence.
        heads: Heads of queries on the device.
        key_heads: Heads of keys and values on the device.
        key_width: Width of a head of queries and keys.
        value_width: Width of a head of values.
        itemsize: Bytes of an element of keys and values.
        window: Number of positions that a query attends to; None for its whole past.
        has_kernel: True if `gather` runs a fused kernel, which keeps tiles of scores on the chip.
    """

    shards: int
    batch: int
    length: int
    heads: int
    key_heads: int
    key_width: int
    value_width: int
    itemsize: int = 2
    window: int | None = None
    has_kernel: bool = False


def count_key_shards(length: int, shards: int, window: int | None) -> int:
    """Return the number of devices before its own from which a device needs keys.

    This is all other devices if queries are redistributed, since then the two halves of a device's queries come from
    opposite ends of the sequence.
    """
    share = length // shards
    before = -(-((window or length) - 1) // share)
    return shards - 1 if is_redistributed(length, shards, window) else before


def is_redistributed(length: int, shards: int, window: int | None) -> bool:
    """Return True if queries are redistributed, so that all devices have as many keys to attend to.

    A narrow window needs no redistribution: its work is balanced, and its keys are on neighbouring devices.
    """
    return window is None or 2 * window > length or -(-(window - 1) // (length // shards)) >= shards - 1


def predict_attention_seconds(
    shape: AttentionShape, speeds: PeakRates, bytes_per_second: float
) -> dict[ContextMethod, float]:
    """Predict the seconds that attention of one layer takes forward and backward, by method.

    Let p = batch heads length attended / shards be the scores of a device, where `attended` is length / 2 (for a window
    w it is w - w^2 / 2 length), H and W the widths of keys and values, C the bytes of keys and values on one device, d
    the devices whose keys another one needs, r = d + 1 the rounds, and f = 4 / itemsize, since gradients are exchanged
    in float32:

        forward  = 2 p (H + W) / FLOP/s      + tiles: 2 p float32 written to memory and read again
        backward = 2 p (3 H + 2 W) / FLOP/s  + tiles: 4 p
        gather   = forward + backward + 3 d C / bytes/s
        ring     = r max(forward / r, C / bytes/s) + r max(backward / r, (1 + f) C / bytes/s) + (2 + f) C / bytes/s

    An all-gather has to end before attention begins: in both passes for keys and values, whose gradients are then
    reduce-scattered. A ring overlaps communication with computation. Its last term redistributes keys and values,
    twice, and returns their gradients. A fused kernel avoids the tiles of `gather`.

    Args:
        shape: Shape of the attention of one device.
        speeds: Peak rates of one device.
        bytes_per_second: Bandwidth out of one device to the others that share a sequence.

    Returns:
        Seconds by method. `gather` is infinite if the gathered keys and values and their gradients would take more than
        a quarter of a device's memory.
    """
    # Queries near the beginning of a sequence have fewer positions before them than the window.
    window = min(shape.window or shape.length, shape.length)
    attended = window - window**2 / (2 * shape.length)
    scores = shape.batch * shape.heads * shape.length * attended / shape.shards
    H, W = shape.key_width, shape.value_width
    forward = 2 * scores * (H + W) / speeds.flops_per_second
    backward = 2 * scores * (3 * H + 2 * W) / speeds.flops_per_second
    tile = scores * _TILE_BYTES / speeds.hbm_bytes_per_second
    chunk_bytes = shape.batch * shape.length / shape.shards * shape.key_heads * (H + W) * shape.itemsize
    before = count_key_shards(shape.length, shape.shards, shape.window)
    rounds, wide, move = before + 1, 4 / shape.itemsize, chunk_bytes / bytes_per_second
    tiles = 0.0 if shape.has_kernel else 6 * tile
    gather = forward + backward + tiles + 3 * before * move
    ring = max(forward + 2 * tile, rounds * move) + max(backward + 4 * tile, rounds * (1 + wide) * move)
    gathered_bytes = rounds * chunk_bytes * (1 + (1 if shape.has_kernel else wide))
    is_too_large = gathered_bytes > _GATHERED_SHARE_MAX * speeds.hbm_bytes
    return {"gather": float("inf") if is_too_large else gather, "ring": ring + (2 + wide) * move}


def choose_context_method(shape: AttentionShape, speeds: PeakRates, bytes_per_second: float) -> ContextMethod:
    """Return the method with the smaller predicted time, `gather` if both are equal."""
    seconds = predict_attention_seconds(shape, speeds, bytes_per_second)
    return "ring" if seconds["ring"] < seconds["gather"] else "gather"


def find_peak_rates(device_kind: str, neighbours: int) -> tuple[PeakRates, float]:
    """Return the peak rates of a device, and its bandwidth in bytes/s to the devices next to it in the mesh.

    GPUs of several nodes communicate over the network. Chips of one slice are assumed to use their interconnect.

    Args:
        device_kind: `device_kind` of the jax device.
        neighbours: Number of adjacent devices that communicate.
    """
    chip = find_chip(device_kind)
    if chip is None or chip.speeds is None:
        return UNKNOWN_CHIP_RATES, UNKNOWN_CHIP_RATES.interconnect_bytes_per_second
    speeds, share = chip.speeds, chip.devices_per_chip
    is_one_domain = chip.is_tpu or neighbours <= (chip.chips_per_host or neighbours)
    between = speeds.interconnect_bytes_per_second if is_one_domain else speeds.network_bytes_per_second
    own = replace(
        speeds,
        flops_per_second=speeds.flops_per_second / share,
        hbm_bytes=speeds.hbm_bytes // share,
        hbm_bytes_per_second=speeds.hbm_bytes_per_second / share,
    )
    return own, between / share
