"""The text of a request as its tokens come: what is given out, held back and cut."""

from __future__ import annotations

from executor import toy_text
from executor.text import TextStream


class Halves:
    """A detokenizer that gives out a character at every second token, and a mark for half a one."""

    def __init__(self) -> None:
        self._half = False

    def push(self, token: int) -> str:
        self._half = not self._half
        return "" if self._half else chr(token)

    def flush(self) -> str:
        return "?" if self._half else ""


def feed(stream: TextStream, text: str) -> str:
    return "".join(push(stream, character)[0] for character in text for _ in range(2))


def push(stream: TextStream, character: str, *, armed: bool = True) -> tuple[str, int | None]:
    (piece,), stop = stream.push([ord(character)], armed_from=0 if armed else 1)
    return piece, stop


def test_pieces_add_up_to_the_text():
    stream = TextStream(Halves(), [])
    assert feed(stream, "abc") == "abc"
    assert stream.finish() == ""
    assert stream.text == "abc"


def test_what_is_held_back_comes_at_the_end_in_order():
    stream = TextStream(Halves(), ["cde"])
    assert feed(stream, "abcd") == "ab"
    assert push(stream, "x") == ("", None)
    assert stream.finish() == "cd?"
    assert stream.text == "abcd?"


def test_nothing_follows_a_stop_string():
    stream = TextStream(Halves(), ["cd"])
    assert feed(stream, "abc") == "ab"
    assert push(stream, "d") == ("", None)
    assert push(stream, "d") == ("", 0)
    assert stream.finish() == ""
    assert stream.text == "ab"


def test_a_run_is_cut_at_the_token_that_completes_a_stop_string():
    stream = TextStream(Halves(), ["bc"])
    run = [ord(character) for character in "abcd" for _ in range(2)]
    assert stream.push(run, armed_from=0) == (["", "a", "", "", "", ""], 5)
    assert (stream.finish(), stream.text) == ("", "a")


def test_a_stop_string_counts_only_from_the_armed_token_on():
    stream = TextStream(Halves(), ["b"])
    run = [ord(character) for character in "abab" for _ in range(2)]
    assert stream.push(run, armed_from=4) == (["", "a", "", "b", "", "a", "", ""], 7)


def test_an_unarmed_stop_string_is_text():
    stream = TextStream(Halves(), ["b"])
    pieces = [push(stream, character, armed=False) for character in "abba"]
    assert pieces == [("", None), ("b", None), ("", None), ("a", None)]


def test_toy_text_folds_bytes_into_the_vocabulary():
    assert toy_text.encode("Aé", 100) == [65, 0xC3 % 100, 0xA9 % 100]
    detokenizer = toy_text.ToyDetokenizer()
    assert [detokenizer.push(token) for token in (0, 93, 94)] == ["!", "~", "!"]
    assert detokenizer.flush() == ""
