"""`python -m runner plan`: what the job would do on hardware that is not here. See `runner.plan`."""

from collections.abc import Sequence
from pathlib import Path

from runner.cli.arguments import Parser
from runner.errors import InvalidError
from runner.plan.preflight import PlanRequest, plan


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit code is 2 if the job would not run."""
    parser = Parser("runner plan")
    parser.add_argument("spec", metavar="SPEC")
    parser.add_argument("--topology", metavar="ACCELERATOR", help="instead of the spec's topology.accelerator")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_set()
    parser.add_argument("--search", action="store_true", help="rank meshes, micro-batches and what the job declares")
    parser.add_argument("--chips", choices=["auto"], help="the smallest slice that ends the run in time")
    parser.add_argument("--hours", type=float, metavar="H", help="for --chips auto")
    parser.add_argument("--profile", action="store_true", help="the step op by op: time, memory, where it goes")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="with --profile: the schedule, for Perfetto")
    parser.add_argument("--against", metavar="RUN", help="with --profile: beside the step times of a run's directory")
    parsed = parser.parse_args(arguments)
    if (parsed.chips is None) != (parsed.hours is None) or (parsed.hours is not None and not parsed.hours > 0):
        raise InvalidError("--chips auto needs --hours H, a positive number, and --hours needs --chips auto")
    if (parsed.trace is not None or parsed.against is not None) and not parsed.profile:
        raise InvalidError("--trace FILE and --against RUN need --profile")
    if parsed.profile and (parsed.search or parsed.hours is not None):
        raise InvalidError("--profile is of one plan: leave out --search and --chips")
    overrides = [*parsed.set, *([f"topology.accelerator={parsed.topology}"] if parsed.topology else [])]
    asked = (parsed.json, parsed.search, parsed.hours, parsed.profile, parsed.trace, parsed.against)
    return plan(PlanRequest(parsed.spec, tuple(overrides), *asked))
