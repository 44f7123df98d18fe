from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from executor.detokenizer import Detokenizer, Released, StopStrings
from executor.tokenizer import Tokenizer

checked = settings(derandomize=True, max_examples=150, deadline=None)


def _saved(directory, backend, added):
    for text, special in added:
        backend.add_tokens([AddedToken(text, special=special, normalized=False)])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": backend.get_vocab_size() + 5}))
    return Tokenizer(directory)


def _byte_level(directory):
    tokens = [*sorted(ByteLevel.alphabet()), "Ġthe", "æĹ¥", "ðŁ", "ĺĢ"]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _saved(directory, backend, [("<|end|>", True), ("<think>", False), ("日 <x>", False)])


def _byte_fallback(directory):
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "é", "日", "▁▁", "."]
    backend = Backend(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _saved(directory, backend, [("</s>", True), ("<think>", False)])


def _metaspace(directory):
    tokens = ["<unk>", "▁", "▁the", "a", "é", "日", "."]
    backend = Backend(models.WordLevel(vocab={token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return _saved(directory, backend, [("</s>", True)])


@pytest.fixture(scope="module", params=[_byte_level, _byte_fallback, _metaspace])
def tokenizer(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return _byte_level(tmp_path_factory.mktemp("tokenizer"))


def _pieces(tokenizer, ids, skip_special=True):
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@checked
@given(ids=st.lists(st.integers(0, 270)), skip_special=st.booleans())
def test_pieces_are_together_the_text_of_all_ids(tokenizer, ids, skip_special):
    assert "".join(_pieces(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


@checked
@given(text=st.text(), more=st.lists(st.integers(0, 270), max_size=4))
def test_pieces_of_a_text_are_that_text(byte_level, text, more):
    ids = byte_level.encode(text) + more
    assert "".join(_pieces(byte_level, ids)) == byte_level.decode(ids)
    assert "".join(_pieces(byte_level, byte_level.encode(text))) == text


def test_a_character_comes_with_its_last_byte(byte_level):
    ids = [byte_level.backend.token_to_id(token) for token in ("ðŁ", "ĺ", "Ģ", "a")]
    assert _pieces(byte_level, ids) == ["", "", "\N{GRINNING FACE}", "a", ""]


def test_an_incomplete_character_is_replaced_when_it_is_certain(byte_level):
    ids = [byte_level.backend.token_to_id(token) for token in ("ðŁ", "a", "ðŁ")]
    assert _pieces(byte_level, ids) == ["", "\N{REPLACEMENT CHARACTER}a", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_shown_on_demand(byte_level):
    ids = byte_level.encode("a<|end|>b")
    assert _pieces(byte_level, ids) == ["a", "", "b", ""]
    assert _pieces(byte_level, ids, skip_special=False) == ["a", "<|end|>", "b", ""]


def test_bytes_wait_for_the_end_of_their_run(tmp_path):
    tokenizer = _byte_fallback(tmp_path)
    ids = [tokenizer.backend.token_to_id(token) for token in ("▁the", "<0xC3>", "<0xA9>", "a", "<0xC3>")]
    assert _pieces(tokenizer, ids) == ["the", "", "", "éa", "", "\N{REPLACEMENT CHARACTER}"]


def test_each_push_costs_the_same(byte_level):
    """A push may look at its own token only: no call of the tokenizer grows with the text."""
    calls = []

    class Counting:
        special_ids = frozenset()

        class backend:
            decoder = byte_level.backend.decoder

            @staticmethod
            def id_to_token(token):
                calls.append(token)
                return byte_level.backend.id_to_token(token)

    detokenizer = Detokenizer(Counting())
    for token in range(200):
        detokenizer.push(token)
    assert calls == list(range(200))


# ---------------------------------------------------------------- stop strings


def _run(stops, pieces, armed=None):
    """Texts released at each piece, and what ended the text where."""
    stopper, texts = StopStrings(stops), []
    for i, piece in enumerate(pieces):
        text, stop = stopper.push(piece, armed is None or armed[i])
        texts.append(text)
        if stop is not None:
            return texts, i, stop
    return [*texts, stopper.flush()], None, None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["a", "b"], (["a", "b", ""], None, None)),
        (["end"], ["the e", "nd", "."], (["the ", ""], 1, "end")),
        (["end"], ["the e", "n", "ough"], (["the ", "", "enough", ""], None, None)),
        (["end"], ["en"], (["", "en"], None, None)),
        (["\n\n"], ["a\n", "\n", "b"], (["a", ""], 1, "\n\n")),
        (["\n\n"], ["a\n", "b"], (["a", "\nb", ""], None, None)),
        (["b", "abc"], ["a", "b", "c"], (["", "a"], 1, "b")),
        (["bc", "abc"], ["xab", "c"], (["x", ""], 1, "abc")),
        (["aab"], ["a", "a", "a", "b"], (["", "", "a", ""], 3, "aab")),
        (["abab"], ["ab", "ac", "abab"], (["", "abac", ""], 2, "abab")),
        (["stop"], ["a stop and more stop"], (["a "], 0, "stop")),
        (["x"], ["", "x"], (["", ""], 1, "x")),
    ],
)
def test_a_stop_string_cuts_the_text_before_it(stops, pieces, expected):
    assert _run(stops, pieces) == expected


def test_unarmed_stop_strings_are_text():
    assert _run(["ab"], ["ab", "cab", "ab"], [False, False, True]) == (["ab", "cab", ""], 2, "ab")


def test_a_stop_string_counts_if_it_ends_in_an_armed_piece():
    assert _run(["abc"], ["xab", "c"], [False, True]) == (["x", ""], 1, "abc")
    assert _run(["ab", "xabyy"], ["xab", "z"], [False, True]) == (["", "xabz", ""], None, None)


def test_nothing_is_left_after_a_stop_string():
    stopper = StopStrings(["b"])
    assert stopper.push("abc") == Released("a", "b")
    assert stopper.flush() == ""


def _expected(stops, text):
    """The plain way: look at every prefix of the text."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


few = st.text("ab\n", max_size=6)


@checked
@given(stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), pieces=st.lists(few, max_size=8))
@example(stops=["aab", "ab"], pieces=["aa", "aab"])
def test_the_cut_does_not_depend_on_the_pieces(stops, pieces):
    texts, at, stop = _run(stops, pieces)
    assert ("".join(texts), stop) == _expected(stops, "".join(pieces))
    if stop is not None:
        assert _expected(stops, "".join(pieces[:at]))[1] is None
        assert _expected(stops, "".join(pieces[: at + 1]))[1] == stop


@checked
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(few, max_size=8),
)
def test_only_what_may_become_a_stop_string_is_held_back(stops, pieces):
    stopper, given_out, seen = StopStrings(stops), "", ""
    for piece in pieces:
        seen += piece
        given_out += stopper.push(piece, armed=False).text
        prefixes = [stop[:n] for stop in stops for n in range(len(stop))]
        assert len(seen) - len(given_out) == max(len(p) for p in prefixes if seen.endswith(p))
    assert given_out + stopper.flush() == seen
