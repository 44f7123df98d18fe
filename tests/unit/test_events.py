"""Events are one line of key=value pairs each, whatever the values hold."""

from __future__ import annotations

import json
import logging
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.events import line, record


def test_plain_words_are_bare_and_absent_fields_left_out():
    assert line("lane_died", lane="target", epoch="0af3", pid=17, reason=None) == (
        "event=lane_died lane=target epoch=0af3 pid=17"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("killed by SIGKILL", '"killed by SIGKILL"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "x"', '"say \\"x\\""'),
        ("two\nlines", '"two\\nlines"'),
        (0.5, "0.5"),
        ("/models/draft", "/models/draft"),
    ],
)
def test_other_values_are_json_strings(value, text):
    assert line("e", value=value) == f"event=e value={text}"


@given(st.text())
def test_a_value_comes_back_and_never_makes_a_second_line(value):
    written = line("e", value=value).removeprefix("event=e value=")
    assert len(written.split("\n")) == 1
    assert (json.loads(written) if written.startswith('"') else written) == value
    if written.isprintable() and "\\" not in written:
        assert shlex.split(written) == [value]


def test_a_record_is_one_line_of_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="speclane"):
        record(logging.WARNING, "lane_died", reason="100 % gone")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", 'event=lane_died reason="100 % gone"')
    ]
