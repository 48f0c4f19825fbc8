"""Config of a tokenise job."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from runner.spec import FrozenModel, JobConfig, Trajectory


class BytesConfig(FrozenModel):
    """Byte tokenizer: one token per byte of UTF-8."""

    kind: Literal["bytes"] = Field(description="One token per byte of UTF-8.")


class HuggingFaceConfig(FrozenModel):
    """Tokenizer file of the `tokenizers` library."""

    kind: Literal["hf"] = Field(description="A tokenizer file of the tokenizers library.")
    file: str = Field(min_length=1, description="Path or URL of the tokenizer.json.")


class SentencePieceConfig(FrozenModel):
    """Model file of the `sentencepiece` library."""

    kind: Literal["sentencepiece"] = Field(description="A model file of the sentencepiece library.")
    file: str = Field(min_length=1, description="Path or URL of the .model file.")


class TiktokenConfig(FrozenModel):
    """Rank file of the `tiktoken` library."""

    kind: Literal["tiktoken"] = Field(description="A rank file of the tiktoken library.")
    file: str = Field(min_length=1, description="Path or URL of the .tiktoken file with the ranks.")
    pattern: str = Field(min_length=1, description="Regular expression that splits text before merges are applied.")
    special_tokens: dict[str, NonNegativeInt] = Field(default={}, description="Ids of special tokens by their text.")


class SampleSource(FrozenModel):
    """Files to train a vocabulary on."""

    source: str = Field(min_length=1, description="As config.source.")
    field: str = Field(
        default="text", min_length=1, description="Key of a line, or column of a table, that holds the text."
    )


class BpeConfig(FrozenModel):
    """Byte-level BPE vocabulary that the job trains before it tokenises."""

    kind: Literal["bpe"] = Field(description="A byte-level BPE vocabulary, trained on a sample of the source.")
    vocabulary_size: int = Field(ge=257, le=1 << 24, description="Maximum number of tokens, including the separator.")
    sample_bytes: PositiveInt = Field(
        default=256 << 20, description="Bytes of text to train on, sampled evenly over the source."
    )
    sources: tuple[SampleSource, ...] = Field(
        default=(),
        description="Sources to train on instead of config.source, each for an equal share of sample_bytes, so that "
        "the corpora of a mixture get one vocabulary.",
    )


TokenizerConfig = Annotated[
    BytesConfig | HuggingFaceConfig | SentencePieceConfig | TiktokenConfig | BpeConfig, Field(discriminator="kind")
]


class ChatConfig(FrozenModel):
    """Dialogues: each line or row holds messages, or a prompt and its completion."""

    template: str | None = Field(
        default=None,
        min_length=1,
        description="Path or URL of the tokenizer_config.json that holds the chat template, or that has "
        "chat_template.jinja beside it; null concatenates a prompt and its completion.",
    )
    max_tokens: int | None = Field(
        default=None, ge=2, description="Maximum tokens of a dialogue, including its separator; null is unlimited."
    )
    longer: Literal["drop", "cut"] = Field(
        default="drop", description="Drop dialogues of more than max_tokens, or cut off their end."
    )

    @model_validator(mode="after")
    def _longer_needs_max_tokens(self) -> "ChatConfig":
        if self.max_tokens is None and self.longer != "drop":
            raise ValueError(f"longer={self.longer} has no effect without max_tokens; set max_tokens or remove longer")
        return self


class TokeniseConfig(JobConfig):
    """Input, tokenizer and output of a tokenise job."""

    source: str = Field(
        min_length=1,
        description="python-stdlib, or a path, glob, or gs://, s3:// or az:// prefix or glob, of text files, lines of "
        "JSON (.jsonl, .json, .ndjson, also with .gz, .zst, .zstd, .bz2, .xz), .parquet or .arrow files; or such files "
        "of a data set on the Hugging Face Hub, as hf://datasets/OWNER/NAME@REVISION/PATH.",
    )
    field: str = Field(
        default="text", min_length=1, description="Key of a line, or column of a table, that holds the text."
    )
    skip_bad: NonNegativeInt = Field(
        default=0,
        description="Maximum number of lines without text, and of documents that the tokenizer cannot encode, to skip "
        "in the whole source; one more ends the job.",
    )
    deduplicate: bool = Field(
        default=False, description="Keep only the first of documents with exactly the same text, in a pass of its own."
    )
    shuffle: bool = Field(
        default=False,
        description="Mix the documents by the seed: pieces of sixteen random parts of the source, and the documents of "
        "each shard in random order.",
    )
    tokenizer: TokenizerConfig = Field(description="Tokenizer, or how to train one.")
    begin: NonNegativeInt | str | None = Field(
        default=None,
        description="Id or text of the token to put before every document that does not begin with it; null: none.",
    )
    separator: NonNegativeInt | str | None = Field(
        default=None, description="Id or text of the token to append to every document; null appends none."
    )
    chat: ChatConfig | None = Field(
        default=None,
        description="Read lines or rows as dialogues; the corpus then marks completion tokens.",
    )
    output: str | None = Field(
        default=None,
        min_length=1,
        description="Directory or URL of the corpus; null is `corpus` in the directory of the run.",
    )
    shard_bytes: PositiveInt = Field(
        default=64 << 20, description="Bytes of text in a shard, which is also the unit of work of a host."
    )

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys that change no token: the limit on bad lines."""
        return frozenset({"skip_bad"})

    @property
    def content_keys(self) -> frozenset[str]:
        """Paths of the input files, the tokenizer and the template; only their digests are compared."""
        return frozenset({"source", "tokenizer.file", "chat.template"})

    def explain_refusal(self, keys: Sequence[str], saved: Trajectory, step: int) -> str:
        """Return advice on how to make a corpus with other keys (a fork cannot)."""
        return "or remove that one, to tokenise again"

    @property
    def output_keys(self) -> frozenset[str]:
        """Keys that name outputs: the corpus."""
        return frozenset({"output"})
