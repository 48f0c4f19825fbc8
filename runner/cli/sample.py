"""`python -m runner sample`: text from a run's model. Claims nothing; works beside the run."""

from collections.abc import Sequence

from runner.cli.arguments import Parser, directory_of, looking
from runner.console import write_text
from runner.errors import EXIT_DONE
from runner.evaluation.generation import Sampler
from runner.inference.open_run import open_run
from runner.inference.sample import SampleRequest, sample


def main(arguments: Sequence[str]) -> int:
    """Run the command; the text is on standard output, all else on standard error."""
    defaults = SampleRequest()
    parser = Parser("runner sample")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text goes on from")
    parser.add_argument("--step", default=defaults.step, metavar="N", help="newest, best, or a step's number")
    parser.add_weights()
    parser.add_argument("--tokens", type=int, default=defaults.num_tokens, metavar="N", help="default 200")
    parser.add_argument("--temperature", type=float, default=defaults.sampling.temperature, metavar="T")
    parser.add_argument("--top-p", type=float, default=defaults.sampling.top_p, metavar="P")
    parser.add_argument("--seed", type=int, default=defaults.sampling.seed, metavar="S")
    parsed = parser.parse_args(arguments)
    sampling = Sampler(parsed.temperature, parsed.top_p, parsed.seed)
    request = SampleRequest(parsed.prompt, parsed.step, parsed.tokens, sampling, parsed.weights)
    with looking(BrokenPipeError):
        run = open_run(directory_of(parsed.where))
        run.prepare_process()
        for piece in sample(run, request):
            write_text(piece)
    return EXIT_DONE
