"""The keys of a tokenise job. Knows no files and no tokenizers."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from runner.spec import FrozenModel, JobConfig


class BytesConfig(FrozenModel):
    """A token is a byte of the text."""

    kind: Literal["bytes"] = Field(description="A token is a byte of the text.")


class HuggingFaceConfig(FrozenModel):
    """A file of the library `tokenizers`."""

    kind: Literal["hf"] = Field(description="A file of the library tokenizers.")
    file: str = Field(min_length=1, description="Path or URL of the tokenizer.json.")


class SentencePieceConfig(FrozenModel):
    """A file of the library `sentencepiece`."""

    kind: Literal["sentencepiece"] = Field(description="A file of the library sentencepiece.")
    file: str = Field(min_length=1, description="Path or URL of the .model.")


class TiktokenConfig(FrozenModel):
    """A file of the library `tiktoken`."""

    kind: Literal["tiktoken"] = Field(description="A file of the library tiktoken.")
    file: str = Field(min_length=1, description="Path or URL of the .tiktoken, which holds the ranks.")
    pattern: str = Field(min_length=1, description="The regular expression that cuts text before it is merged.")
    special_tokens: dict[str, NonNegativeInt] = Field(default={}, description="Ids of special tokens by their text.")


class BpeConfig(FrozenModel):
    """A byte-level BPE that the job trains first."""

    kind: Literal["bpe"] = Field(description="A byte-level BPE, trained first on a sample of the source.")
    vocabulary_size: int = Field(ge=257, le=1 << 24, description="Tokens that it has at most, the separator included.")
    sample_bytes: PositiveInt = Field(
        default=256 << 20, description="Text that it is trained on, taken evenly from the whole source."
    )


TokenizerConfig = Annotated[
    BytesConfig | HuggingFaceConfig | SentencePieceConfig | TiktokenConfig | BpeConfig, Field(discriminator="kind")
]


class ChatConfig(FrozenModel):
    """Each line or row is a dialogue: prompts, and answers that are to be learned."""

    template: str | None = Field(
        default=None,
        min_length=1,
        description="Path or URL of the tokenizer_config.json that has the chat template, or has it beside it as "
        "chat_template.jinja; null: a prompt and its completion, one after the other.",
    )
    max_tokens: int | None = Field(
        default=None, ge=2, description="Tokens that a dialogue may have, its separator included; null: any number."
    )
    longer: Literal["drop", "cut"] = Field(
        default="drop", description="A dialogue of more than max_tokens is left out, or loses its end."
    )

    @model_validator(mode="after")
    def _longer_than_what(self) -> "ChatConfig":
        if self.max_tokens is None and self.longer != "drop":
            raise ValueError(f"longer={self.longer}: nothing reads it without max_tokens; name that, or leave it out")
        return self


class TokeniseConfig(JobConfig):
    """What is read, what makes tokens of it, and where they go."""

    source: str = Field(
        min_length=1,
        description="python-stdlib, or a path, glob, gs://, s3:// or az:// prefix or glob of text files, .jsonl "
        "(.gz, .zst), .parquet or .arrow files.",
    )
    field: str = Field(default="text", min_length=1, description="Of a .jsonl line or a table: which one is the text.")
    skip_bad: NonNegativeInt = Field(
        default=0, description="Lines without a text that may be left out, in the whole source; one more is refused."
    )
    tokenizer: TokenizerConfig = Field(description="What makes ids of text.")
    separator: NonNegativeInt | str | None = Field(
        default=None, description="Id, or text, of the token that ends every document; null: none does."
    )
    chat: ChatConfig | None = Field(
        default=None,
        description="Lines, or rows of a table, are dialogues; the corpus says which tokens are of answers.",
    )
    output: str | None = Field(
        default=None, min_length=1, description="Directory or URL of the corpus; null: `corpus` in the run's directory."
    )
    shard_bytes: PositiveInt = Field(
        default=64 << 20, description="Text of one shard, which is also the work that one host takes at a time."
    )

    @property
    def free_keys(self) -> frozenset[str]:
        """How many bad lines are too many moves no token."""
        return frozenset({"skip_bad"})

    @property
    def output_keys(self) -> frozenset[str]:
        """The corpus."""
        return frozenset({"output"})
