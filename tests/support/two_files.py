"""A user's repository of two files, a model and a spec, as most repositories are that are not the runner's own."""

import subprocess
from pathlib import Path

RNN = '''\
"""A recurrent network on tokens."""

import flax.linen as nn
from pydantic import Field, PositiveInt

from runner import BaseTrainer
from runner.config import ModelConfig, TrainerConfig


class RnnConfig(ModelConfig):
    width: PositiveInt = Field(description="Width of the state.")


class Rnn(nn.Module):
    width: int
    vocabulary_size: int

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        x_BxTxD = nn.Embed(self.vocabulary_size, self.width)(x_BxT)
        return nn.Dense(self.vocabulary_size)(nn.RNN(nn.GRUCell(self.width))(x_BxTxD))


class PretrainRnn(BaseTrainer):
    Config = TrainerConfig[RnnConfig]

    def model(self):
        return Rnn(self.config.model.width, self.vocabulary_size)
'''
SPEC = """\
name: rnn
job: rnn:PretrainRnn
directory: {directory}
topology: {{accelerator: {accelerator}, mesh: {{data: auto}}}}
checkpoint: {{every_steps: {every_steps}}}
config:
  model: {{width: 8}}
  data: {{source: python-stdlib, tokenizer: bytes, sequence_length: 16}}
  optimizer: {{name: adamw, learning_rate: 1.0e-3}}
  train: {{total_steps: {total_steps}, global_batch_examples: 8}}
"""
PROJECT = '[project]\nname = "runner"\n'  # of a checkout of the runner


def git(repository: Path, *arguments: str) -> None:
    """Run a git command as a made-up author."""
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(repository), *identity, *arguments], check=True, capture_output=True)


def write_two_files(
    directory: Path, run: str, *, accelerator: str = "any", total_steps: int = 4, every_steps: int = 2
) -> Path:
    """Write the model and its spec into a directory; return the path of the spec."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rnn.py").write_text(RNN)
    spec = directory / "rnn.yaml"
    spec.write_text(
        SPEC.format(directory=run, accelerator=accelerator, total_steps=total_steps, every_steps=every_steps)
    )
    return spec


def make_repository(directory: Path, run: str) -> Path:
    """Return a git repository with the two files of a run, committed."""
    write_two_files(directory, run)
    commit_all(directory)
    return directory


def commit_all(directory: Path) -> None:
    """Make a directory a git repository, unless it is one, and commit all of its files."""
    git(directory, "init", "-q")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "All of it")
