"""Dialogues from input lines to the corpus and the loss: masks, chat templates, and invalid input."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from pyarrow import parquet

from experiments.gpt import PretrainGPT
from experiments.tokenise.documents import InputPart, read_documents
from experiments.tokenise.inputs import find_files, read_file
from runner import BaseTrainer
from runner.config import DataConfig
from runner.data import chat
from runner.data.chat import (
    ChatRecord,
    ChatTemplate,
    Dialogue,
    Renderer,
    compute_marks,
    find_end_of_turn,
    mark_tokens,
    read_template,
)
from runner.data.tokenizers import HuggingFaceTokenizer
from runner.errors import DataError, InvalidError
from runner.huggingface.assets import find_assets
from tests.support.tiny_jobs import are_leaves_equal, make_gpt, stop_after
from tests.support.tokenise_inputs import (
    SEPARATOR,
    FakeBucket,
    make_hf_tokenizer,
    make_tokenise_job,
    read_corpus,
    read_corpus_files,
    read_index,
)

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "naïve 🙂?"},
    {"role": "assistant", "content": "yes 数"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "no"},
]
TEXT = "^<system>be kind;<user>naïve 🙂?;<assistant>yes 数;<user>and?;<assistant>no;"
ANSWERS = ["yes 数;", "no;"]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
KEYS = ("messages", "prompt", "completion", "tools")
PAIRS = [{"prompt": f"{i} plus {i}? ", "completion": f"it is {2 * i}"} for i in range(60)]


def write_template(directory: Path, source: Any = PLAIN, **more: Any) -> str:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": source, "bos_token": "^", **more}))
    return str(path)


def write_table(path: Path, records: list[Any]) -> str:
    """Write records as a table, in several row groups if Parquet; missing keys are null."""
    table = pa.Table.from_pylist(records, schema=pa.table({key: [r.get(key) for r in records] for key in KEYS}).schema)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=7)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return str(path)


def write_lines(path: Path, records: list[Any]) -> str:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return str(path)


def decode_marked(corpus: Path) -> list[tuple[bytes, bytes]]:
    """Return the text of each dialogue of a byte corpus, and the part that is marked as completion tokens."""
    index = read_index(corpus)
    marks = np.concatenate([np.fromfile(corpus / f"{shard.name}.answers", "u1") for shard in index.shards])
    documents = read_corpus(corpus)
    edges = np.cumsum([len(ids) for ids in documents])[:-1]
    return [
        (bytes(ids.tolist()), bytes(ids[part == 1].tolist()))
        for ids, part in zip(documents, np.split(marks, edges), strict=True)
    ]


def read(path: Path, records: list[Any], renderer: Renderer) -> list[Any]:
    """Read lines, and return the dialogues, with the messages of bad lines in their places."""
    write_lines(path, records)
    (file,) = find_files(str(path))
    found = read_documents(InputPart(file, file.size_bytes), None, "text", renderer)
    return [document if isinstance(document, Dialogue) else str(document) for document in found]


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    with Renderer(ChatTemplate(PLAIN, {"bos_token": "^"})) as renderer:
        yield renderer


def tokenise_dialogues(tmp_path: Path, records: list[Any], **changes: Any) -> list[tuple[bytes, bytes]]:
    """Tokenise lines by bytes and return the marked dialogues; `changes` are keys of `chat` or dotted keys."""
    chat = {key: value for key, value in changes.items() if "." not in key}
    others = {key: value for key, value in changes.items() if "." in key}
    source = write_lines(tmp_path / "lines.jsonl", records)
    make_tokenise_job(tmp_path / "run", **{"config.source": source, "config.chat": chat}, **others)()
    return decode_marked(tmp_path / "run/corpus")


# Masks.


@pytest.mark.parametrize("source", [PLAIN, MARKED])
def test_answers_of_several_turns_are_marked(source):
    with Renderer(ChatTemplate(source, {"bos_token": "^"})) as renderer:
        found = renderer.render(ChatRecord(TURNS))
    assert isinstance(found, Dialogue)
    assert found.text == TEXT
    assert [found.text[begin:end] for begin, end in found.completions] == ANSWERS
    assert found.ends_with_completion


def test_a_token_that_shares_a_character_with_an_answer_is_marked():
    spans = np.array([[0, 2], [2, 4], [3, 4], [4, 4], [4, 7], [7, 8]])
    assert compute_marks(spans, [(3, 5)]).tolist() == [0, 1, 1, 1, 1, 0]
    assert compute_marks(spans, []).tolist() == [0] * 6
    assert compute_marks(spans[:0].reshape(-1, 2), [(0, 1)]).tolist() == []


@pytest.mark.parametrize(
    ("begin", "most", "marks"),
    [
        (None, None, [0, 0, 1, 1]),
        (None, 4, [0, 0, 1, 1]),
        (None, 3, [0, 0, 0]),
        (None, 2, [0, 0]),
        (8, None, [0, 0, 0, 1, 1]),
        (8, 4, [0, 0, 0, 0]),
        (5, None, [0, 0, 1, 1]),  # the separator exists already
    ],
)
def test_truncated_dialogues_end_with_an_unmarked_separator(begin, most, marks):
    spans = np.array([[0, 1], [1, 2], [2, 3]])
    found = mark_tokens(Dialogue("abc", ((2, 3),)), np.array([5, 6, 7], "<u2"), spans, begin, 9, most)
    assert found.marks.tolist() == marks
    assert found.ids.tolist()[-1] == 9
    assert found.is_cut == (not marks[-1])


def test_ids_and_character_spans_equal_those_of_the_library():
    content = make_hf_tokenizer()
    ids, spans = HuggingFaceTokenizer(content).encode_spans([TEXT])[0]
    library = tokenizers.Tokenizer.from_str(content.decode())
    library.no_truncation()
    library.no_padding()
    assert ids.tolist() == library.encode(TEXT, add_special_tokens=False).ids
    marks = compute_marks(spans, [(TEXT.index("yes"), TEXT.index("<user>and"))])
    assert library.decode(ids[marks == 1].tolist()) == "yes 数;"


def test_a_corpus_stores_the_marks_of_dialogues_and_pairs(tmp_path):
    records = [{"messages": TURNS}, PAIRS[3], {"messages": TURNS[3:]}]
    found = tokenise_dialogues(tmp_path, records, template=write_template(tmp_path), **{"config.separator": 0})
    assert found == [
        (TEXT.encode() + b"\0", b"yes \xe6\x95\xb0;no;\0"),
        (b"^<user>3 plus 3? ;<assistant>it is 6;\0", b"it is 6;\0"),
        (b"^<user>and?;<assistant>no;\0", b"no;\0"),
    ]


def test_without_a_template_a_completion_follows_its_prompt(tmp_path):
    assert tokenise_dialogues(tmp_path, PAIRS[:2]) == [
        (b"0 plus 0? it is 0", b"it is 0"),
        (b"1 plus 1? it is 2", b"it is 2"),
    ]


@pytest.mark.parametrize(
    ("longer", "kept", "said"),
    [
        ("cut", [(b"ab\0", b"b\0"), (b"abcd\0", b"bcd")], "1 cut, 1 dropped"),
        ("drop", [(b"ab\0", b"b\0")], "0 cut, 2 dropped"),
    ],
)
def test_long_dialogues_are_truncated_or_dropped_and_counted(tmp_path, capsys, longer, kept, said):
    long = [("a", "b"), ("a", "bcdef"), ("abcdef", "g")]
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in long]
    assert tokenise_dialogues(tmp_path, records, max_tokens=5, longer=longer, **{"config.separator": 0}) == kept
    assert f"dialogues of more than 5 tokens: {said}" in capsys.readouterr().out


def test_special_tokens_of_the_template_are_encoded_as_such(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(make_hf_tokenizer())
    source = write_lines(tmp_path / "lines.jsonl", [{"messages": TURNS}])
    template_file = write_template(tmp_path, bos_token={"content": SEPARATOR})
    chat = {
        "config.chat.template": template_file,
        "config.tokenizer": {"kind": "hf", "file": f"{tmp_path}/tokenizer.json"},
    }
    make_tokenise_job(tmp_path / "run", **{"config.source": source}, **chat)()
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert read_corpus(tmp_path / "run/corpus")[0][0] == library.token_to_id(SEPARATOR)


# Template -> end-of-turn token of assistant messages; `SEPARATOR` and `<|pad|>` are special tokens.
TURN_ENDS = {
    "{% for m in messages %}{{ m.content }}<|pad|>\n{% endfor %}": "<|pad|>",
    "{% for m in messages %}{{ m.content }}{{ bos_token }}{% endfor %}": SEPARATOR,
    "{% for m in messages %}<|pad|>{{ m.content }}\n {{ bos_token }}{% endfor %}": SEPARATOR,
    "{% for m in messages %}<|pad|>{{ m.content }}.{% endfor %}": None,
    "{{ raise_exception('no system message') }}": None,
    "{% for m in messages %}{{ m.content[::-1] }}<|pad|>{% endfor %}": None,
}


@pytest.mark.parametrize("source", TURN_ENDS)
def test_the_end_of_turn_token_follows_an_assistant_message(source):
    assert find_end_of_turn(ChatTemplate(source, {"bos_token": SEPARATOR}), [SEPARATOR, "<|pad|>"]) == TURN_ENDS[source]


def test_a_corpus_keeps_its_template_for_exports(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(make_hf_tokenizer())
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|pad|>{% endfor %}"
    changes = {
        "config.source": write_lines(tmp_path / "lines.jsonl", [{"messages": TURNS}]),
        "config.chat.template": write_template(tmp_path, template),
        "config.tokenizer": {"kind": "hf", "file": f"{tmp_path}/tokenizer.json"},
        "config.separator": SEPARATOR,
    }
    make_tokenise_job(tmp_path / "run", **changes)()
    data = DataConfig(source=f"{tmp_path}/run/corpus", sequence_length=16)
    assets = find_assets(data, None)
    settings = json.loads(assets.tokenizer.files["tokenizer_config.json"])
    assert (settings["chat_template"], settings["eos_token"]) == (template, "<|pad|>")
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab()
    assert assets.list_ids()["eos_token_id"] == [ids["<|pad|>"], ids[SEPARATOR]]


# Location of templates and lines, and resumes.


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        ({"chat_template": PLAIN}, None),
        ({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": PLAIN}]}, None),
        ({}, PLAIN),
        # As `transformers` does: the file replaces what the config has.
        ({"chat_template": "{{ 'another' }}"}, PLAIN),
        ({"chat_template": [{"name": "tool_use", "template": "x"}]}, PLAIN),
    ],
)
def test_a_template_is_read_from_tokenizer_files(tmp_path, config, beside):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "$", "unk_token": None}))
    if beside:
        (tmp_path / "chat_template.jinja").write_text(beside)
    assert read_template(f"{tmp_path}/tokenizer_config.json", read_file) == ChatTemplate(PLAIN, {"eos_token": "$"})


def test_a_bucket_and_a_disk_give_the_same_corpus(tmp_path, monkeypatch):
    records = [{"messages": TURNS}, *PAIRS]
    tokenise_dialogues(tmp_path, records, template=write_template(tmp_path), **{"config.shard_bytes": 1000})
    bucket = FakeBucket(monkeypatch)
    bucket.write("in/lines.jsonl", (tmp_path / "lines.jsonl").read_bytes())
    bucket.write("in/tokenizer_config.json", (tmp_path / "tokenizer_config.json").read_bytes())
    changes = {"config.source": "gs://b/in/*.jsonl", "config.output": "gs://b/out"}
    changes |= {"config.chat.template": "gs://b/in/tokenizer_config.json", "config.shard_bytes": 1000}
    make_tokenise_job(tmp_path / "other", **changes)()
    found = bucket.copy_to("out", tmp_path / "copy")
    assert decode_marked(found) == decode_marked(tmp_path / "run/corpus")


def test_a_resumed_job_writes_the_same_bytes_and_rejects_another_template(tmp_path):
    changes: dict[str, Any] = {"config.source": write_lines(tmp_path / "lines.jsonl", PAIRS)}
    changes |= {"config.shard_bytes": 300, "config.chat.template": write_template(tmp_path)}
    make_tokenise_job(tmp_path / "whole", **changes)()
    stopped = make_tokenise_job(tmp_path / "run", **changes)
    stop_after(stopped, 500)
    write_template(tmp_path, MARKED)
    with pytest.raises(InvalidError, match=r"config\.chat\.template\.sha256"):
        make_tokenise_job(tmp_path / "run", **changes)()
    write_template(tmp_path)
    (tmp_path / "run/corpus/00001-000.answers").unlink()
    with pytest.raises(InvalidError, match=r"00001-000\.answers is missing or truncated; remove .*00001\.json"):
        make_tokenise_job(tmp_path / "run", **changes)()
    (tmp_path / "run/corpus/00001.json").unlink()
    make_tokenise_job(tmp_path / "run", **changes)()
    assert read_corpus_files(tmp_path / "run/corpus") == read_corpus_files(tmp_path / "whole/corpus")


# Invalid input.


INVALID_TEMPLATES = {
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "takes more than 0.2 s for one",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "'__class__' of a str is out of bounds",
    "{{ ''.__class__ }}": "'__class__' of a str is out of bounds",
    "{{ '{0.__class__}'.format(messages) }}": "'__class__' of a list is out of bounds",
    "{{ cycler.__init__.__globals__ }}": "'__init__' of a type is out of bounds",
    "{{ messages.clear() }}": "'clear' of a list is out of bounds",
    "{{ 'a' * 10**12 }}": "more memory than allowed",
    "{% include '/etc/passwd' %}": "no loader",
    "{% import 'os' as os %}": "no loader",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ lipsum() }}": "'lipsum' is undefined",
    "{{ raise_exception('roles must\n alternate') }}": "refuses it: roles must alternate",
    "no answer": "shows none of the completions|renders message 3",
    "{{ messages | tojson }}": "renders message 3, a completion, differently .* mark completions",
}


@pytest.mark.daily(6)
@pytest.mark.parametrize("source", INVALID_TEMPLATES)
def test_an_invalid_template_is_rejected_in_one_line(tmp_path, monkeypatch, source):
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2)
    try:
        with Renderer(ChatTemplate(source, {})) as renderer:
            _, said = read(tmp_path / "lines.jsonl", [PAIRS[0], {"messages": TURNS}], renderer)
        assert "lines.jsonl:2: the chat template refuses it: " in said
    except DataError as error:
        said = str(error)
        assert "lines.jsonl:1: the chat template " in said
    assert re.search(INVALID_TEMPLATES[source], said)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "is not JSON"),
        ([1], "is not a JSON object with messages"),
        ({"message": TURNS}, "has no 'messages', .*; did you mean messages, where it has 'message'?"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": ["hi"]}, "message 1 is not an object with a role: hi"),
        ({"messages": [*TURNS, {"content": "x"}]}, "message 6 is not an object with a role"),
        ({"messages": [*TURNS, {"role": "user", "content": 3}]}, "the content of message 6 is not a string: 3"),
        ({"messages": TURNS, "tools": 1}, "'tools' is not a list: 1"),
        ({"messages": TURNS[:2]}, "no message has the role assistant"),
        ({"messages": TURNS, "prompt": "x"}, "has 'messages' and 'prompt'; needs messages alone"),
        ({"prompt": "x"}, "has 'prompt'; needs"),
        ({"prompt": 1, "completion": "x"}, "'prompt' is not a string: 1"),
        ({"prompt": "x", "completion": ""}, "'completion' is empty"),
    ],
)
def test_a_damaged_line_is_reported_with_its_number(tmp_path, renderer, record, message):
    first, said, last = read(tmp_path / "lines.jsonl", [PAIRS[0], record, PAIRS[1]], renderer)
    assert isinstance(first, Dialogue)
    assert isinstance(last, Dialogue)
    assert re.search(rf"lines\.jsonl:2: {message}", said)
    assert "\n" not in said


def test_damaged_lines_are_skipped_up_to_the_limit(tmp_path, capsys):
    assert len(tokenise_dialogues(tmp_path, [PAIRS[0], {"prompt": 1}, PAIRS[1]], **{"config.skip_bad": 1})) == 2
    assert re.search(r"skipped 1 lines .*lines\.jsonl:2: has 'prompt'; needs", capsys.readouterr().out)


def test_messages_need_a_template(tmp_path):
    (said,) = read(tmp_path / "lines.jsonl", [{"messages": TURNS}], Renderer(None))
    assert said.endswith("lines.jsonl:1: has messages, which need chat.template")


def test_the_marker_character_is_rejected_in_a_dialogue(tmp_path):
    records = [{"messages": [*TURNS, {"role": "assistant", "content": "\ue000>"}]}]
    with Renderer(ChatTemplate(MARKED, {})) as renderer:
        (said,) = read(tmp_path / "lines.jsonl", records, renderer)
    assert re.search(r"lines\.jsonl:1: .*U\+E000", said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config.chat.template": "no/such.json"}, r"config\.chat\.template: no/such\.json: does not exist"),
        ({"config.chat.template": "LINES"}, r"config\.chat\.template: .* is not a tokenizer_config\.json"),
        ({"config.chat.template": "EMPTY"}, "has no chat_template, and there is no chat_template.jinja beside it"),
        ({"config.chat.template": "BROKEN"}, r"config\.chat\.template: is not a chat template: .*unknown tag 'bad'"),
        (
            {"config.chat": {}, "config.field": "x"},
            r"config\.field: is x, but nothing reads it: chat reads whole records",
        ),
        (
            {"config.chat": {}, "config.tokenizer": {"kind": "bpe", "vocabulary_size": 300}},
            r"config\.tokenizer\.kind: is bpe; dialogues need one of bytes, hf",
        ),
        (
            {"config.chat": {}, "config.source": "TEXT"},
            r"config\.chat: needs lines of JSON or rows .*, .* names text files",
        ),
        ({"config.chat": {"longer": "cut"}}, "longer=cut has no effect without max_tokens"),
    ],
)
def test_an_invalid_key_is_rejected_in_one_line(tmp_path, changes, message):
    places = {"LINES": write_lines(tmp_path / "lines.jsonl", PAIRS), "TEXT": write_lines(tmp_path / "a.txt", ["x"])}
    for name, content in (("EMPTY", {}), ("BROKEN", {"chat_template": "{% bad"})):
        (tmp_path / name).mkdir()
        places[name] = f"{tmp_path}/{name}/tokenizer_config.json"
        Path(places[name]).write_text(json.dumps(content))
    placed = {key: places.get(value, value) if isinstance(value, str) else value for key, value in changes.items()}
    with pytest.raises(InvalidError, match=message) as caught:
        make_tokenise_job(tmp_path / "run", **{"config.source": places["LINES"]} | placed)()
    assert "\n" not in re.sub(r"\n?validate.*", "", str(caught.value))


# Training.


class BigramModel(nn.Module):
    """Bigram model: one matrix of logits by token."""

    vocabulary_size: int

    @nn.compact
    def __call__(self, x_BxT, *, segments=None, positions=None, deterministic):
        logits_BxTxV = nn.Embed(self.vocabulary_size, self.vocabulary_size)(x_BxT)
        return logits_BxTxV if segments is None else logits_BxTxV + 0 * segments[..., None]


class BigramGPT(PretrainGPT):
    """Trainer with the config of a GPT and the bigram model, which compiles quickly."""

    forward = BaseTrainer.forward

    def model(self):
        return BigramModel(self.vocabulary_size)


def find_answers(rows: dict[str, np.ndarray]) -> np.ndarray:
    """Return the mask of completion targets in sequences of complete pairs, computed from the text alone."""
    found = np.zeros(rows["y"].shape, bool)
    for row in range(len(found)):
        for segment in range(1, rows["segment"][row].max() + 1):
            (where,) = np.nonzero(rows["segment"][row] == segment)
            text = bytes([rows["x"][row, where[0]], *rows["y"][row, where]])
            assert text.endswith(b"\0"), "every pair must be complete"
            found[row, where[text.index(b"it is") - 1 :]] = True
    return found


@pytest.mark.parametrize("packing", ["documents", pytest.param("pad", marks=pytest.mark.soak)])
def test_the_loss_covers_only_answers_and_resumes_bit_identically(tmp_path, packing):
    tokenise_dialogues(tmp_path, PAIRS, **{"config.separator": 0})
    data = {"source": str(tmp_path / "run/corpus"), "packing": packing, "train_on": "answers", "sequence_length": 100}
    changes = {
        "config.data": data | {"validation_fraction": 0.0},
        "config.train": {"total_steps": 3, "global_batch_examples": 8},
        "config.schedule": {"name": "constant"},
    }
    whole = make_gpt(tmp_path / "whole", BigramGPT, **changes)
    params_VxV = np.asarray(
        whole.setup_builder.build(jax.devices()).init_state().params["Embed_0"]["embedding"], np.float64
    )
    whole()
    rows = whole.dataset.read("train", 0, 8)
    is_answer = find_answers(rows)
    assert 0 < is_answer.sum() < rows["padding_mask"].sum()
    logits = params_VxV[rows["x"]]
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, rows["y"][..., None], -1)[..., 0]
    first = json.loads((tmp_path / "whole/metrics.jsonl").read_text().splitlines()[0])
    np.testing.assert_allclose(first["train/loss"], losses[is_answer].mean(), rtol=1e-6)
    assert abs(losses[rows["padding_mask"]].mean() - losses[is_answer].mean()) > 1e-3
    parts = make_gpt(tmp_path / "parts", BigramGPT, **changes)
    stop_after(parts, 1)
    parts = make_gpt(tmp_path / "parts", BigramGPT, **changes)
    parts()
    assert are_leaves_equal(parts.state, whole.state)


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_tables_and_lines_give_the_same_dialogues(tmp_path, name):
    calls = [TURNS[1], {"role": "assistant", "tool_calls": [CALL]}, *TURNS[3:]]
    records = [*PAIRS[:20], {"messages": TURNS}, {"messages": calls, "tools": [CALL]}, {"messages": TURNS[1:3]}]
    whole = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ tools | tojson }}"
    template = write_template(tmp_path, whole)
    chat = {"template": template}
    lines = tokenise_dialogues(tmp_path, records, template=template)
    changes = {"config.source": write_table(tmp_path / name, records), "config.chat": chat, "config.shard_bytes": 600}
    make_tokenise_job(tmp_path / "table", **changes)()
    assert decode_marked(tmp_path / "table/corpus") == lines
    assert len(read_index(tmp_path / "table/corpus").shards) > 1 or name == "rows.arrow"


TABLES: dict[str, tuple[Any, str]] = {
    "no such column": ({"text": ["a"]}, r"t.parquet has no column 'messages', and none 'prompt' and .*; it has 'text'"),
    "half a pair": ({"prompt": ["a"]}, r"t.parquet, row 1: has 'prompt'; needs messages alone, or a prompt"),
    "null": ({"messages": [None]}, r"row 1.*: has no 'messages', and no 'prompt' and 'completion'"),
    "text": ({"messages": ["a"]}, r"row 1.*: 'messages' is not a list of messages: a"),
    "bytes": (
        {"prompt": [b"a"], "completion": ["b"]},
        r"row 1.*: holds a value that JSON does not have \(.* bytes is not JSON",
    ),
}


@pytest.mark.parametrize(("columns", "message"), TABLES.values(), ids=TABLES)
def test_a_table_without_dialogues_is_rejected_in_one_line(tmp_path, columns, message):
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(InvalidError, match=message) as caught:
        make_tokenise_job(tmp_path / "run", **{"config.source": str(tmp_path / "t.parquet"), "config.chat": {}})()
    assert "\n" not in str(caught.value)
