from __future__ import annotations

import hashlib
import json

import pytest

from ipc.errors import WireError
from ipc.vocabulary import VocabularyMismatch, check_same, read

VOCAB = {"a": 0, "é": 2, "b": 1}
ADDED = [{"id": 3, "content": "<end>"}]


@pytest.fixture
def make(tmp_path):
    def make(name, size, vocab=VOCAB, added=ADDED):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"vocab_size": size}))
        if vocab is not None:
            content = {"model": {"vocab": vocab}, "added_tokens": added}
            (directory / "tokenizer.json").write_text(json.dumps(content))
        return directory

    return make


def test_the_fingerprint_is_of_the_sorted_pairs(make):
    found = read(make("model", 8))
    pairs = b'[[0,"a"],[1,"b"],[2,"\\u00e9"],[3,"<end>"]]'
    assert (found.size, found.fingerprint) == (8, hashlib.sha256(pairs).hexdigest())


def test_it_does_not_depend_on_how_the_pairs_are_stored(make):
    listed = [["a", 0.0], ["b", -1.5], ["é", -2.0], ["<end>", 0.0]]
    assert read(make("map", 4)) == read(make("list", 4, listed, [])) == read(make("both", 4, listed))


def test_without_a_tokenizer_it_is_empty(make):
    assert read(make("model", 8, None)).fingerprint == ""


@pytest.mark.parametrize("size", [None, 0, -1, "8", True])
def test_a_bad_size_is_named(make, size):
    with pytest.raises(ValueError, match="vocab_size"):
        read(make("model", size))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": null}}}']
)
def test_a_broken_tokenizer_is_named(make, text):
    directory = make("model", 8)
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        read(directory)


def test_the_same_tokens_are_accepted_whatever_the_padding(make):
    check_same(make("target", 8), make("speculator", 4))


def test_without_a_tokenizer_equal_sizes_are_accepted(make):
    check_same(make("target", 8, None), make("speculator", 8))
    check_same(make("other-target", 8), make("other-speculator", 8, None))


def _mismatch(target, speculator):
    with pytest.raises(VocabularyMismatch) as raised:
        check_same(target, speculator)
    assert isinstance(raised.value, WireError)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_without_a_tokenizer_different_sizes_are_refused(make):
    message = _mismatch(make("big", 8), make("small", 4, None))
    assert "big has 8 tokens" in message
    assert "small has 4" in message
    assert "small has no tokenizer.json" in message


def test_the_first_difference_is_shown(make):
    message = _mismatch(make("big", 8), make("small", 8, {"a": 0, "é": 1, "b": 2}))
    assert message.startswith("target big has 8 tokens and speculator small has 8; ")
    assert "first at id 1: 'b' in big, 'é' in small" in message


def test_a_token_of_one_side_only_is_a_difference(make):
    message = _mismatch(make("big", 8), make("small", 8, added=[]))
    assert "first at id 3: '<end>' in big, no token in small" in message
