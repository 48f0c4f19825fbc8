import numpy as np
import pytest

from runner.data.tokenizers import ByteTokenizer, CharacterTokenizer, collect_characters
from runner.errors import DataError


def test_bytes_represent_every_file_exactly() -> None:
    raw = bytes(range(256))
    tokenizer = ByteTokenizer()
    assert tokenizer.vocabulary_size == 256
    assert tokenizer.encode_file(raw).tobytes() == raw
    assert tokenizer.decode(tokenizer.encode("naïve ✓")) == "naïve ✓"


def test_a_cut_utf8_sequence_decodes_to_a_replacement_character() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("a✓")[:-1]) == "a\ufffd"


def test_characters_are_numbered_in_sorted_order() -> None:
    characters, num_characters = collect_characters([b"hello", "wörld".encode()])
    assert characters == "dehlorwö"
    assert num_characters == 10
    tokenizer = CharacterTokenizer(characters)
    assert tokenizer.vocabulary_size == 8
    assert tokenizer.encode("dehö").tolist() == [0, 1, 2, 7]
    assert tokenizer.decode(tokenizer.encode("wörld")) == "wörld"


def test_undecodable_bytes_become_replacement_characters() -> None:
    characters, _ = collect_characters([b"a\xffb"])
    assert characters == "ab\ufffd"
    assert CharacterTokenizer(characters).encode_file(b"a\xffb").tolist() == [0, 2, 1]


@pytest.mark.parametrize(("size", "dtype"), [(256, "u1"), (257, "<u2"), (65536, "<u2"), (65537, "<i4")])
def test_ids_take_the_smallest_type_that_fits(size: int, dtype: str) -> None:
    tokenizer = CharacterTokenizer("".join(map(chr, range(0x10000, 0x10000 + size))))
    last = tokenizer.encode(chr(0x10000 + size - 1))
    assert last.dtype == np.dtype(dtype)
    assert last.tolist() == [size - 1]


def test_a_character_outside_the_vocabulary_is_rejected() -> None:
    with pytest.raises(DataError, match=r"character '✓' \(U\+2713\) is not among the 3 characters of data\.source"):
        CharacterTokenizer("abc").encode("ab✓")
