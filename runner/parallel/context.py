"""Which of two ways attention takes where the positions of a row lie on several devices: by the time that each needs.

- `gather`: every device collects the keys and values of the whole row, and has its own queries attend to them.
- `ring`: every device has its queries attend to the keys and values at hand, which then move on to the next one.

Pure: numbers in, seconds out. Knows no mesh and no model; imports no jax.
"""

from dataclasses import dataclass, replace
from typing import Literal

from runner.accelerator import PeakRates, find_chip

ContextMethod = Literal["gather", "ring"]

# Of a chip that the catalogue does not know, or whose speeds depend on the machine: some cores of a server.
UNKNOWN_CHIP_RATES = PeakRates(500e9, 16 * 2**30, 50e9, 10e9, 1e9)
_MOST_GATHERED_SHARE = 1 / 4  # of a device's memory that a gathered row and its gradient may fill
_TILE_BYTES = 8  # of one score in a float32 tile that one operation writes to memory and another reads


@dataclass(frozen=True)
class AttentionShape:
    """Attention as one device sees it: its own examples and heads, of rows cut over `shards` devices.

    Attributes:
        length: positions of a whole row.
        itemsize: bytes of an element of keys and values.
        window: how many positions a query sees; None is all of its past.
        has_kernel: whether `gather` runs a fused kernel, which keeps tiles of scores on the chip.
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
    """How many devices before its own hold keys that a query may see, if every device holds neighbouring positions.

    Where these are most, or the window more than half of a row, it is all others: then the halves of a device's queries
    come from both ends of the row (`is_redistributed`), so that all devices have as many keys to attend to.
    """
    share = length // shards
    before = -(-((window or length) - 1) // share)
    return shards - 1 if is_redistributed(length, shards, window) else before


def is_redistributed(length: int, shards: int, window: int | None) -> bool:
    """Whether queries move for the sake of balance: a narrow window is balanced, and has its keys near."""
    return window is None or 2 * window > length or -(-(window - 1) // (length // shards)) >= shards - 1


def predict_attention_seconds(
    shape: AttentionShape, speeds: PeakRates, bytes_per_second: float
) -> dict[ContextMethod, float]:
    """Seconds that attention of one layer takes forward and backward, by way.

    With p = batch heads length attended / shards the scores of a device, where `attended` is length / 2 (of a window w
    it is w - w^2 / 2 length), H and W the widths, C bytes of keys and values that one device holds, d the devices whose
    keys another needs, r = d + 1 rounds, and f = 4 / itemsize, as gradients go round in float32:

        forward  = 2 p (H + W) / FLOP/s      + tiles: 2 p float32 written to memory and read again
        backward = 2 p (3 H + 2 W) / FLOP/s  + tiles: 4 p
        gather   = forward + backward + 3 d C / bytes/s
        ring     = r max(forward / r, C / bytes/s) + r max(backward / r, (1 + f) C / bytes/s) + (2 + f) C / bytes/s

    What is gathered has to be there before work begins: keys and values in both passes, and their gradients are
    scattered. A ring moves while it works, and its last term is what brings keys to where they are balanced, twice, and
    gradients home. A fused kernel leaves out the tiles of `gather`. That is infinite where the gathered row and its
    gradient would fill more than a quarter of a device's memory.
    """
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
    is_too_large = gathered_bytes > _MOST_GATHERED_SHARE * speeds.hbm_bytes
    return {"gather": float("inf") if is_too_large else gather, "ring": ring + (2 + wide) * move}


def choose_context_method(shape: AttentionShape, speeds: PeakRates, bytes_per_second: float) -> ContextMethod:
    """The way that needs less time by `predict_attention_seconds`; of equals `gather`."""
    seconds = predict_attention_seconds(shape, speeds, bytes_per_second)
    return "ring" if seconds["ring"] < seconds["gather"] else "gather"


def find_peak_rates(device_kind: str, neighbours: int) -> tuple[PeakRates, float]:
    """Speeds of a device of this kind, and bytes/s out of it to so many that lie next to each other in the mesh.

    GPUs of several nodes meet over the network; the chips of a slice are taken to share their interconnect.
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
