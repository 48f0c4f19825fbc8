"""Modules made by hand, on a device whose figures make an exact table: a byte, a FLOP and a cycle take a nanosecond."""

from runner.plan.forecast import DeviceRates, Forecast, compute_forecast

MESH = {"data": 2, "fsdp": 2, "tensor": 1}
NANO = 1e9
ADD = "%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %sum = f32[] add(%a, %b)\n}\n"


def rates(*, clock: float | None = NANO, width: int = 1) -> DeviceRates:
    """One of everything in a nanosecond; a collective takes as many as the bytes that a device sends."""
    return DeviceRates(NANO, NANO, lambda one: one.sent_bytes_per_device / NANO, clock, width)


def cycles(number: int) -> str:
    """Return the attributes of an op as libtpu writes them."""
    return f'backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'


def computation(name: str, *lines: str) -> str:
    """One that is called."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (p: f32[250]) -> f32[250] {{\n{body}\n}}\n\n"


def module(*lines: str, before: str = "", head: str = "") -> str:
    """Return a module whose entry holds these instructions; `x` is an argument of 1,000 bytes."""
    body = "\n".join(f"  {line}" for line in ("%x = f32[250]{0} parameter(0)", *lines))
    return (
        f"HloModule jit_step, is_scheduled=true, num_partitions=4{head}\n\n{ADD}\n{before}\n"
        f"ENTRY %main (x: f32[250]) -> f32[250] {{\n{body}\n}}\n"
    )


def nanoseconds(found: Forecast) -> tuple[float, float]:
    """Low and high, as whole numbers."""
    return round(found.low * NANO, 3), round(found.high * NANO, 3)


def seen(*lines: str, before: str = "", clock: float | None = NANO, width: int = 1) -> Forecast:
    """Return the forecast of such a module."""
    return compute_forecast(module(*lines, before=before), MESH, rates(clock=clock, width=width))


def negate(name: str = "y", of: str = "x", estimated: int = 5000) -> str:
    """An op that moves 2,000 bytes and is estimated at more."""
    return f"%{name} = f32[250]{{0}} negate(%{of}), {cycles(estimated)}"
