from __future__ import annotations

import json

import pytest
import tiny_gguf

from executor.errors import InvalidConfig, InvalidRequest
from executor.gguf_checkpoint import convert
from executor.tokenizer import Tokenizer
from ipc import vocabulary


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    convert(tiny_gguf.write(directory / "tiny.gguf"), directory)
    return directory


@pytest.fixture
def make(converted, tmp_path):
    """A copy of the tiny tokenizer with changes to its settings."""

    def make(generation=None, model=None, **config):
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
            (tmp_path / name).write_bytes((converted / name).read_bytes())
        for name, change in (
            ("generation_config", generation),
            ("config", model),
            ("tokenizer_config", config),
        ):
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | (change or {})))
        return tmp_path

    return make


CHAT = [{"role": "user", "content": "the é"}]
IM_START, IM_END = 1, 2


def test_special_tokens_in_the_text_are_parsed(make):
    tokenizer = Tokenizer(make())
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (IM_START, IM_END, 3)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>a<|im_end|>"
    assert tokenizer.special_ids == {0, 1, 2}


def test_opening_tokens_are_added_unless_they_are_not_wanted(make):
    directory = make()
    content = json.loads((directory / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "bos", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"bos": {"id": "bos", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(directory)
    assert tokenizer.encode("a") == [IM_START, *tokenizer.encode("a", add_special=False)]


def test_stored_truncation_and_padding_do_not_apply(make):
    directory = make()
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode("a long text")
    tokenizer.backend.enable_truncation(2)
    tokenizer.backend.enable_padding(length=50)
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    assert Tokenizer(directory).encode("a long text") == ids


def test_ids_without_a_token_are_no_text(make):
    assert Tokenizer(make()).decode([100_000]) == ""


def test_the_vocabulary_is_the_checkpoints(make):
    directory = make()
    assert Tokenizer(directory).vocabulary == vocabulary.read(directory)


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        (None, None, {2}),
        ({"eos_token_id": [0, 5]}, None, {0, 2, 5}),
        ({"eos_token_id": None}, {"eos_token_id": 7}, {2, 7}),
    ],
)
def test_end_of_text_is_what_any_file_says(make, generation, model, expected):
    assert Tokenizer(make(generation, model)).eos_token_ids == expected


def test_end_of_text_in_the_tokenizers_settings_may_be_an_object(make):
    directory = make(eos_token={"content": "<|endoftext|>", "special": True})
    assert Tokenizer(directory).eos_token_ids == {0, 2}


def test_what_the_settings_name_is_special(make):
    tokenizer = Tokenizer(make(pad_token="Ġthe"))
    pad = tokenizer.backend.token_to_id("Ġthe")
    assert pad in tokenizer.special_ids
    assert Tokenizer(make(pad_token="not a token")).special_ids == {0, 1, 2}


# ---------------------------------------------------------------- chat templates


def _render(directory, messages=CHAT, **options):
    return Tokenizer(directory).render_chat(messages, **options)


def test_a_chat_is_rendered(make):
    assert Tokenizer(make()).has_chat_template
    assert _render(make()) == "<|im_start|>user\nthe é<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{{ bos_token }}|{{ eos_token }}|{{ sep_token }}", "<|im_start|>|<|im_end|>|"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "the é"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "the é"\n}'),
        ("{{ {'a': '<b>'} | tojson }}", '{"a": "<b>"}'),
        ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}", "user"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 3 %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_templates_find_what_they_are_written_for(make, template, expected):
    assert _render(make(chat_template=template)) == expected


def test_the_generation_prompt_can_be_left_out(make):
    directory = make(chat_template="{% if add_generation_prompt %}go{% endif %}")
    assert _render(directory, add_generation_prompt=False) == ""


def test_keys_without_a_value_count_as_absent(make):
    directory = make(chat_template="{{ messages[0].content is defined }}")
    assert _render(directory, [{"role": "assistant", "content": None}]) == "False"


def test_of_several_templates_the_default_is_taken(make):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert _render(make(chat_template=named)) == "plain"
    assert not Tokenizer(make(chat_template=named[:1])).has_chat_template


def test_a_template_file_comes_first(make):
    directory = make()
    (directory / "chat_template.jinja").write_text("from the file")
    assert _render(directory) == "from the file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.no.such }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(make, template):
    with pytest.raises(InvalidRequest) as raised:
        _render(make(chat_template=template))
    assert raised.value.field == "messages"


def test_a_templates_own_words_are_passed_on(make):
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        _render(make(chat_template="{{ raise_exception('roles must alternate') }}"))


@pytest.mark.parametrize("messages", [["text"], [{"role": "user", "content": object()}]])
def test_messages_must_be_plain_data(make, messages):
    with pytest.raises(InvalidRequest):
        _render(make(), messages)


def test_without_a_template_a_chat_is_refused(make):
    tokenizer = Tokenizer(make(chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(CHAT)


def test_a_broken_template_is_the_checkpoints_fault(make):
    with pytest.raises(InvalidConfig, match="chat template") as raised:
        _render(make(chat_template="{% if %}"))
    assert raised.value.field == "target"


# ---------------------------------------------------------------- broken directories


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=r"has no tokenizer\.json") as raised:
        Tokenizer(tmp_path, field="speculator")
    assert raised.value.field == "speculator"
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_an_unreadable_file_is_named(make, name):
    directory = make()
    (directory / name).write_text("{")
    with pytest.raises(InvalidConfig, match=name) as raised:
        Tokenizer(directory)
    assert "\n" not in str(raised.value)
