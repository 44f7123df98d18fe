"""The API over HTTP, with real lanes: what is answered is what the executor says, and errors name a field."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import DRAFT, SLOW, Served, ask, asked, events, served, wait_for

from executor import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOOL = {"type": "function", "function": {"name": "now"}}
HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def toys(runtime_directory: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", str(runtime_directory))
        with served() as toys:
            yield toys


def said(toys: Served, prompt: str = "hello", **params: Any) -> Any:
    """What the executor itself says."""
    return toys.llm.generate(prompt, SamplingParams(**({"seed": 7, "max_tokens": 40} | params)))[0]


# ------------------------------------------------------------ answers


def test_a_chat_is_what_the_executor_says(toys):
    answer = ask(toys.url, CHAT, {"messages": HELLO, "seed": 7, "max_tokens": 40})
    expected = said(toys)
    assert answer.status == 200
    body = answer.body
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "vocabulary=256"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": expected.text, "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 40, "total_tokens": 45}
    told = body["metrics"]["speculative_decoding"]
    assert told["num_draft_tokens"] == sum(expected.acceptance.drafted)
    assert told["num_accepted_tokens"] == sum(told["num_accepted_tokens_per_pos"])


def test_a_stream_has_openais_frames(toys):
    body = {"messages": HELLO, "seed": 7, "max_tokens": 40, "stream": True}
    answer = ask(toys.url, CHAT, body | {"stream_options": {"include_usage": True}})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    opening, *deltas, closing, usage = events(answer.body)
    one_answer = {chunk["id"] for chunk in (opening, *deltas, closing, usage)}
    assert len(one_answer) == 1
    assert {chunk["object"] for chunk in (opening, *deltas, closing, usage)} == {"chat.completion.chunk"}
    assert opening["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert all(chunk["usage"] is None for chunk in (opening, *deltas, closing))
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in deltas)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in deltas) == said(toys).text
    assert closing["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 5, "completion_tokens": 40, "total_tokens": 45}


def test_a_stream_without_stream_options_says_no_usage(toys):
    answer = ask(toys.url, COMPLETE, {"prompt": "x", "max_tokens": 3, "stream": True})
    assert all("usage" not in chunk for chunk in events(answer.body))


def test_a_stream_can_say_what_was_drafted(toys):
    options = {"include_acceptance": True}
    answer = ask(
        *(toys.url, COMPLETE),
        {"prompt": "hello", "seed": 7, "max_tokens": 40, "stream": True, "stream_options": options},
    )
    deltas = [chunk for chunk in events(answer.body) if "acceptance" in chunk]
    expected = said(toys)
    accepted = sum(chunk["acceptance"]["tokens"] for chunk in deltas)
    # The last draft may be longer than what there was room for.
    assert 0 < accepted <= sum(expected.acceptance.accepted)
    assert all(
        chunk["acceptance"]["characters"] == chunk["acceptance"]["tokens"]  # a toy's token is a character
        and len(chunk["choices"][0]["text"]) - chunk["acceptance"]["tokens"] in (0, 1)
        for chunk in deltas
    )


def test_stop_strings_end_text_ids_and_logprobs_together(toys):
    whole = said(toys, temperature=0.5).text
    cut = whole[17:20]
    body = {"prompt": "hello", "seed": 7, "max_tokens": 40, "temperature": 0.5, "stop": cut, "logprobs": 2}
    (choice,) = ask(toys.url, COMPLETE, body).body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(cut)], "stop")
    spelled = "".join(choice["logprobs"]["tokens"])
    assert spelled == choice["text"] + cut
    assert len(choice["logprobs"]["token_logprobs"]) == len(spelled)
    streamed = events(ask(toys.url, COMPLETE, body | {"stream": True}).body)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]
    lists = [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]]
    assert [token for each in lists for token in each["tokens"]] == choice["logprobs"]["tokens"]
    assert [at for each in lists for at in each["text_offset"]] == choice["logprobs"]["text_offset"]


def test_logprobs_of_a_chat(toys):
    body = {"messages": HELLO, "seed": 7, "max_tokens": 9, "logprobs": True, "top_logprobs": 3}
    answer = ask(toys.url, CHAT, body).body["choices"][0]
    content = answer["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    streamed = events(ask(toys.url, CHAT, body | {"stream": True}).body)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == content


def test_several_choices_of_several_prompts(toys):
    body = {"prompt": ["hello", [1, 2, 3]], "seed": 7, "max_tokens": 12, "n": 3}
    with pytest.raises(AssertionError):  # a list is of texts or of tokens
        assert ask(toys.url, COMPLETE, body).status == 200
    body["prompt"] = ["hello", "bye"]
    answer = ask(toys.url, COMPLETE, body).body
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert texts[0] == said(toys, max_tokens=12).text
    assert texts[3] == said(toys, "bye", max_tokens=12).text
    assert len(set(texts)) == 6
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 72, "total_tokens": 80}
    streamed: dict[int, str] = {}
    for chunk in events(ask(toys.url, COMPLETE, body | {"stream": True}).body):
        choice = chunk["choices"][0]
        streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert [streamed[i] for i in range(6)] == texts


def test_prompts_of_token_ids_and_echo(toys):
    expected = toys.llm.generate([[1, 2, 3]], SamplingParams(seed=7, max_tokens=5))[0]
    body = {"prompt": [1, 2, 3], "seed": 7, "max_tokens": 5, "echo": True}
    assert ask(toys.url, COMPLETE, body).body["choices"][0]["text"] == '"#$' + expected.text
    streamed = events(ask(toys.url, COMPLETE, body | {"stream": True}).body)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == '"#$' + expected.text


def test_an_echo_has_the_logprobs_of_the_prompt(toys):
    tokens = [1, 2, 3, 200]
    params = SamplingParams(seed=7, max_tokens=5, logprobs=2, prompt_logprobs=2)
    expected = toys.llm.generate([tokens], params)[0]
    body = {"prompt": tokens, "seed": 7, "max_tokens": 5, "echo": True, "logprobs": 2}
    (choice,) = ask(toys.url, COMPLETE, body).body["choices"]
    lists = choice["logprobs"]
    assert "prompt_logprobs" not in choice
    assert "".join(lists["tokens"]) == choice["text"]
    entries = [*expected.prompt_logprobs, *expected.logprobs]
    assert lists["token_logprobs"] == [None, *(entry.logprob for entry in entries)]
    assert lists["top_logprobs"][0] is None
    assert all(2 <= len(top) <= 3 for top in lists["top_logprobs"][1:])
    assert lists["text_offset"] == list(range(9))
    streamed: dict[str, list[Any]] = {name: [] for name in lists}
    for chunk in events(ask(toys.url, COMPLETE, body | {"stream": True}).body):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == lists


def test_the_logprobs_of_prompts_are_spelled_as_vllm_does(toys):
    params = SamplingParams(seed=7, max_tokens=5, prompt_logprobs=20)
    expected = toys.llm.generate([[1, 2, 3]], params)[0]
    body = {"prompt": [1, 2, 3], "seed": 7, "max_tokens": 5, "n": 2, "logprobs": 1, "echo": True}
    choices = ask(toys.url, COMPLETE, body | {"prompt_logprobs": 20}).body["choices"]
    first, second, third = choices[0]["prompt_logprobs"]
    assert first is None
    for told, token, entry in zip((second, third), (2, 3), expected.prompt_logprobs, strict=True):
        assert next(iter(told)) == str(token)
        spelled = {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": chr(33 + token)}
        assert told[str(token)] == spelled
        best = sorted((other["rank"], int(name)) for name, other in told.items() if other["rank"] <= 20)
        assert [token for _, token in best] == [token for token, _ in entry.top]
    assert choices[1]["prompt_logprobs"] == choices[0]["prompt_logprobs"]
    assert all(len(top) <= 2 for top in choices[0]["logprobs"]["top_logprobs"][1:])
    chat = ask(toys.url, CHAT, {"messages": HELLO, "max_tokens": 2, "prompt_logprobs": 0}).body
    assert [told and len(told) for told in chat["prompt_logprobs"]] == [None, 1, 1, 1, 1]


def test_a_chat_without_a_limit_fills_the_context():
    with served(target="vocabulary=256,context=30") as toys:
        answer = ask(toys.url, CHAT, {"messages": HELLO}).body
        assert answer["usage"]["total_tokens"] == 30
        assert answer["choices"][0]["finish_reason"] == "length"


# ------------------------------------------------------------ models, tokens, probes


def test_models(toys):
    listed = ask(toys.url, "/v1/models").body
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("vocabulary=256", "model", 4096)
    assert ask(toys.url, "/v1/models/vocabulary%3D256").body == card
    missing = ask(toys.url, "/v1/models/gpt-5")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_tokens_and_back(toys):
    tokenized = ask(toys.url, "/tokenize", {"prompt": "abc", "return_token_strs": True}).body
    assert tokenized == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [97, 98, 99],
        "token_strs": ["$", "%", "&"],
    }
    assert ask(toys.url, "/tokenize", {"messages": HELLO}).body["count"] == 5
    assert ask(toys.url, "/detokenize", {"tokens": [1, 2, 3]}).body == {"prompt": '"#$'}
    assert ask(toys.url, "/detokenize", {"tokens": [1, 256]}).error["param"] == "tokens[1]"


def test_probes(toys):
    assert ask(toys.url, "/health").body == {"status": "healthy"}
    assert ask(toys.url, "/ready").body == {"status": "healthy", "ready": True, "reason": ""}
    assert ask(toys.url, "/version").body["version"]


def test_metrics_are_what_prometheus_reads(toys):
    ask(toys.url, COMPLETE, {"prompt": "x", "max_tokens": 20})
    answer = ask(toys.url, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(answer.body)}
    values = {
        (sample.name, sample.labels.get("position") or sample.labels.get("lane")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    prefix = "vllm:spec_decode_num"
    by_position = [values[f"{prefix}_accepted_tokens_per_pos_total", str(i)] for i in range(5)]
    assert sum(by_position) == values[f"{prefix}_accepted_tokens_total", None] > 0
    assert by_position == sorted(by_position, reverse=True)
    assert values[f"{prefix}_draft_tokens_total", None] >= values[f"{prefix}_accepted_tokens_total", None]
    assert values[f"{prefix}_drafts_total", None] > 0
    assert values["vllm:num_requests_running", None] == values["vllm:num_requests_waiting", None] == 0
    (transport,) = families["speclane_transport_info"].samples
    assert (transport.name, transport.labels) == ("speclane_transport_info", {"name": "none", "reason": ""})
    assert {sample.labels["state"]: sample.value for sample in families["speclane_slots"].samples} == {
        "kept": 0,
        "lent": 0,
        "quarantined": 0,
    }
    for lane in ("target", "speculator"):
        assert values["speclane_lane_up", lane] == 1
        assert values["speclane_lane_progress_age_seconds", lane] >= 0
        assert values["speclane_lane_restarts_total", lane] == 0
        assert values["speclane_lane_busy_seconds_total", lane] > 0
        assert values["speclane_lane_bubble_seconds_total", lane] > 0
        orders = values["speclane_lane_orders_total", lane]
        assert 0 < values["speclane_wire_latency_seconds_count", lane] <= orders
        assert values["speclane_wire_latency_seconds_sum", lane] > 0
    for name in (
        *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
        *("vllm:e2e_request_latency_seconds", "vllm:request_generation_tokens"),
    ):
        assert families[name].type == "histogram"
        assert values[f"{name}_count", None] > 0
    success = families["vllm:request_success"].samples
    ended = {sample.labels["finished_reason"]: sample.value for sample in success}
    assert set(ended) == {"stop", "length", "cancelled", "error"}
    assert ended["length"] > 0
    assert all(family.documentation for family in families.values())
    assert not [name for name in values if name[0].endswith("_created")]  # a load tool would count them


# ------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0]",
        ),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools[0]"),
        (CHAT, {"messages": HELLO, "tools": [TOOL]}, 400, "tools"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3}, 400, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages"),
        (CHAT, {}, 400, "messages"),
        (COMPLETE, {}, 400, "prompt"),
        (COMPLETE, {"prompt": ["a", 1]}, 400, "prompt"),
        (COMPLETE, {"prompt": [[1], [True]]}, 400, "prompt"),
        (COMPLETE, {"prompt": []}, 400, "prompt"),
        (COMPLETE, {"prompt": [256]}, 400, "prompt"),
        (COMPLETE, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        (COMPLETE, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
        (COMPLETE, {"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs"),
        (COMPLETE, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        (COMPLETE, {"prompt": "x", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
        (COMPLETE, {"prompt": "x", "stop_token_ids": [256]}, 400, "stop_token_ids"),
        (COMPLETE, {"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
        (COMPLETE, {"prompt": "x", "model": "gpt-5"}, 404, "model"),
        (COMPLETE, b"{", 400, None),
        (COMPLETE, b"[]", 400, None),
        (COMPLETE, b'{"prompt": "\xff"}', 400, None),
        (COMPLETE, b'{"prompt": "\\ud800"}', 400, None),
        (COMPLETE, b"[" * 100_000, 400, None),
        ("/tokenize", {}, 400, "prompt"),
        ("/v1/speculator", {}, 400, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(toys, path, body, status, param):
    answer = ask(toys.url, path, body)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert answer.error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_no_path_no_method_no_json(toys):
    assert ask(toys.url, "/v1/embeddings", {}).error["type"] == "not_found_error"
    assert ask(toys.url, COMPLETE).status == 405
    assert ask(toys.url, COMPLETE, {"prompt": "x"}, {"Content-Type": "text/plain"}).status == 415


def test_bodies_have_a_size():
    with served({"max_body": 1024}) as toys:
        assert ask(toys.url, COMPLETE, {"prompt": "x" * 900, "max_tokens": 1}).status == 200
        assert ask(toys.url, COMPLETE, {"prompt": "x" * 1024}).error["code"] == "body_too_large"
        chunked = {"Transfer-Encoding": "chunked", "Content-Length": "", "Content-Type": "application/json"}
        del chunked["Content-Length"]
        body = b"800\r\n" + b"x" * 2048 + b"\r\n0\r\n\r\n"
        assert ask(toys.url, COMPLETE, body, chunked).status == 413


def test_without_the_key_nobody_gets_in():
    with served({"api_key": "sesame"}) as toys:
        for headers in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "sesame"}):
            for path, body in (
                (CHAT, {"messages": HELLO}),
                ("/v1/models", None),
                ("/tokenize", {"prompt": "x"}),
                ("/v1/speculator", {"enabled": False}),
            ):
                answer = ask(toys.url, path, body, headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        key = {"Authorization": "Bearer sesame"}
        assert ask(toys.url, COMPLETE, {"prompt": "x", "max_tokens": 1}, key).status == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert ask(toys.url, path).status == 200


def test_pages_of_other_origins_get_no_leave_unless_they_are_named():
    origin = {"Origin": "http://there"}
    with served() as toys:
        assert "access-control-allow-origin" not in ask(toys.url, "/v1/models", headers=origin).headers
    with served({"cors_origins": ("http://there",)}) as toys:
        answer = ask(toys.url, "/v1/models", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "http://there"


def test_each_request_is_one_line_of_the_log(toys, caplog):
    caplog.set_level("INFO", "speclane")
    body = {"prompt": "x", "n": 2, "max_tokens": 3, "user": "someone else"}
    answer = ask(toys.url, COMPLETE, body).body
    (told,) = [record.message for record in caplog.records if "request_ended" in record.message]
    assert told.startswith(f'event=request_ended id={answer["id"]} user="someone else" choices=2 ')
    assert "prompt_tokens=1 tokens=6 seconds=" in told
    assert told.endswith("reason=length")


# ------------------------------------------------------------ limits


def test_a_full_queue_says_when_to_come_back():
    with served({"max_queue": 1}, target=SLOW, max_sequences=1) as toys:
        long = {"prompt": "x", "max_tokens": 4000, "stream": True}
        with closing(asked(toys.url, COMPLETE, long)) as first:
            first.getresponse().readline()  # it runs
            refused = ask(toys.url, COMPLETE, {"prompt": "x", "n": 2})
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert refused.error["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
        wait_for(lambda: toys.llm.coordinator.load == (0, 0, 0))
        assert ask(toys.url, COMPLETE, {"prompt": "x", "max_tokens": 1, "n": 2}).status == 200
        assert ask(toys.url, COMPLETE, {"prompt": "x", "n": 3}).error["param"] == "n"


def test_an_answer_that_takes_too_long_is_ended():
    with served({"request_timeout": 0.2}, target=SLOW) as toys:
        body = {"prompt": "x", "max_tokens": 4000}
        answer = ask(toys.url, COMPLETE, body)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        streamed = ask(toys.url, COMPLETE, body | {"stream": True})
        assert streamed.status == 200
        assert '"code":"deadline_exceeded"' in streamed.body.split("\n\n")[-2]
        assert "[DONE]" not in streamed.body
        wait_for(lambda: toys.llm.coordinator.load == (0, 0, 0))


def test_who_hangs_up_frees_both_lanes():
    with served(target=SLOW) as toys:
        for body in ({"stream": True}, {"stream": False}):
            with closing(asked(toys.url, COMPLETE, {"prompt": "x", "max_tokens": 4000} | body)):
                wait_for(lambda: toys.llm.coordinator.load.running == 1)
            wait_for(lambda: toys.llm.coordinator.load == (0, 0, 0))
            assert all(lane.told == {} for lane in toys.llm.coordinator.lanes)


# ------------------------------------------------------------ lanes


def test_a_dead_speculator_is_degraded_but_ready():
    with served() as toys:
        whole = {"prompt": "x", "seed": 3, "max_tokens": 30}
        before = ask(toys.url, COMPLETE, whole).body["choices"]
        speculator = next(lane for lane in toys.llm.coordinator.lanes if lane.name == "speculator")
        os.kill(speculator.process.pid, signal.SIGKILL)
        wait_for(lambda: toys.llm.coordinator.deaths["speculator"] == 1)
        assert ask(toys.url, "/ready").status == 200
        assert ask(toys.url, COMPLETE, whole).body["choices"] == before
        wait_for(lambda: toys.llm.coordinator.health.state == "healthy")
        scraped = ask(toys.url, "/metrics").body
        assert 'speclane_lane_deaths_total{lane="speculator"} 1.0' in scraped


def test_the_speculator_is_exchanged_off_and_on():
    with served() as toys:
        body = {"prompt": "x", "seed": 3, "max_tokens": 30}
        before = ask(toys.url, COMPLETE, body).body["choices"]
        shown = ask(toys.url, "/v1/speculator").body
        assert (shown["model"], shown["enabled"], shown["lane"]["state"]) == (DRAFT, True, "serving")
        off = ask(toys.url, "/v1/speculator", {"enabled": False}).body
        assert (off["model"], off["enabled"], off["lane"]) == ("off", False, None)
        told = ask(toys.url, COMPLETE, body).body
        assert told["metrics"]["speculative_decoding"]["num_drafts"] == 0
        assert ask(toys.url, "/v1/speculator", {"enabled": True}).body["model"] == DRAFT
        assert ask(toys.url, "/v1/speculator", {"model": "ngram"}).body["model"] == "ngram"
        assert told["choices"] == ask(toys.url, COMPLETE, body).body["choices"] == before
        refused = ask(toys.url, "/v1/speculator", {"model": "vocabulary=3"})
        assert (refused.status, refused.error["param"]) == (400, "model")
        assert toys.llm.speculation == "ngram"


@pytest.mark.parametrize(
    "headers", [{"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=::1"}, {"Host": "evil.example"}]
)
def test_only_this_machine_may_exchange_it_without_a_key(toys, headers):
    answer = ask(toys.url, "/v1/speculator", {"enabled": False}, headers)
    assert (answer.status, answer.error["code"]) == (403, "loopback_only")
    assert toys.llm.speculation == DRAFT


def test_answers_under_way_end_before_the_server_does():
    with served(target=SLOW) as toys:
        body = {"prompt": "x", "seed": 3, "max_tokens": 30, "stream": True}
        with closing(asked(toys.url, COMPLETE, body)) as connection:
            reply = connection.getresponse()
            first = reply.readline()
            toys.server.stop()
            answer = events((first + reply.read()).decode())
    with served(speculator="off") as toys:
        expected = said(toys, "x", seed=3, max_tokens=30).text
    assert "".join(chunk["choices"][0]["text"] for chunk in answer) == expected


def test_answers_that_do_not_end_in_time_are_told_so():
    with served({"shutdown_timeout": 0.1}, target=SLOW) as toys:
        body = {"prompt": "x", "max_tokens": 4000, "stream": True}
        with closing(asked(toys.url, COMPLETE, body)) as connection:
            reply = connection.getresponse()
            reply.readline()
            toys.server.stop()
            rest = reply.read().decode()
    assert '"code":"cancelled"' in rest.split("\n\n")[-2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),  # a toy's tokens are no text
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format.json_schema",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_forms_that_cannot_be_followed_are_refused_by_name(fields, param):
    with served(speculator="off") as toys:
        answer = ask(toys.url, COMPLETE, {"prompt": "x"} | fields)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert answer.error["message"].startswith(param)
        plain = {"prompt": "x", "max_tokens": 1, "response_format": {"type": "text"}}
        assert ask(toys.url, COMPLETE, plain).status == 200
