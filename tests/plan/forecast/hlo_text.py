"""Handwritten HLO modules, on a device for which a byte, a FLOP and a cycle take one nanosecond each."""

from runner.plan.forecast import DeviceRates, Forecast, compute_forecast

MESH = {"data": 2, "fsdp": 2, "tensor": 1}
NANO = 1e9
ADD = "%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %sum = f32[] add(%a, %b)\n}\n"


def make_rates(*, clock: float | None = NANO, width: int = 1) -> DeviceRates:
    """Return the rates of a device with one of everything per nanosecond, also for the bytes that collectives send."""
    return DeviceRates(NANO, NANO, lambda one: one.sent_bytes_per_device / NANO, clock, width)


def format_cycles(number: int) -> str:
    """Return the attributes of an op with an estimate, in the form of libtpu."""
    return f'backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'


def make_computation(name: str, *lines: str) -> str:
    """Make a called computation."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (p: f32[250]) -> f32[250] {{\n{body}\n}}\n\n"


def make_module(*lines: str, before: str = "", head: str = "") -> str:
    """Make a module whose entry has the given instructions; `x` is an argument of 1,000 bytes."""
    body = "\n".join(f"  {line}" for line in ("%x = f32[250]{0} parameter(0)", *lines))
    return (
        f"HloModule jit_step, is_scheduled=true, num_partitions=4{head}\n\n{ADD}\n{before}\n"
        f"ENTRY %main (x: f32[250]) -> f32[250] {{\n{body}\n}}\n"
    )


def round_nanoseconds(found: Forecast) -> tuple[float, float]:
    """Return the low and high bounds in whole nanoseconds."""
    return round(found.low * NANO, 3), round(found.high * NANO, 3)


def compute_text_forecast(*lines: str, before: str = "", clock: float | None = NANO, width: int = 1) -> Forecast:
    """Return the forecast of a module with the given instructions."""
    return compute_forecast(make_module(*lines, before=before), MESH, make_rates(clock=clock, width=width))


def make_negate(name: str = "y", of: str = "x", estimated: int = 5000) -> str:
    """Make an op that moves 2,000 bytes and has a higher estimate."""
    return f"%{name} = f32[250]{{0}} negate(%{of}), {format_cycles(estimated)}"
