"""The dashboard in a real browser: it loads, streams, shows a death and a recovery, in both themes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from serving import ask, events, served

browser = pytest.importorskip("browser", reason="the dashboard's test needs websockets")
pytestmark = pytest.mark.skipif(
    browser.CHROMIUM is None, reason="there is no chromium here; try apt-get install chromium"
)
TARGET = "vocabulary=256,step_ms=5"
DRAFT = "vocabulary=256,agree=0.9,step_ms=1"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots go; $SPECLANE_ARTEFACTS keeps them."""
    kept = os.environ.get("SPECLANE_ARTEFACTS")
    directory = Path(kept) if kept else tmp_path
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def background(tab: Any) -> str:
    color: str = tab.run("getComputedStyle(document.body).backgroundColor")
    return color


def drawn(lane: str) -> str:
    """Whether there is anything in a lane's timeline."""
    canvas = f"document.querySelector('[data-lane={lane}] canvas')"
    pixels = f"{canvas}.getContext('2d').getImageData(0, 0, {canvas}.width, {canvas}.height).data"
    return f"{pixels}.some(value => value > 0)"


def test_the_page(pictures):
    with served(target=TARGET, speculator=DRAFT) as toys, browser.tab(toys.url) as tab:
        tab.resize(1280, 1000)
        tab.wait_for("document.getElementById('health').textContent === 'healthy'")
        assert tab.text("model") == TARGET
        assert tab.run("document.querySelectorAll('.lane').length") == 2
        for name in ("target", "speculator"):
            tab.wait_for(drawn(name))
        plan = tab.text("memory")
        assert plan.count("keys and values of 32,768 tokens") == 2
        assert plan.index("target") < plan.index("speculator")

        # A prompt, by keyboard alone.
        tab.press("/")
        assert tab.run("document.activeElement.id") == "prompt"
        tab.run("document.getElementById('prompt').value = 'hello'")
        tab.run("document.getElementById('tokens').value = 60; document.getElementById('seed').value = 7")
        tab.press("Enter", control=True)
        tab.wait_for("document.getElementById('told').textContent.startsWith('60 tokens in')")
        body = {"messages": [{"role": "user", "content": "hello"}], "seed": 7, "max_tokens": 60}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_acceptance": True}}
        chunks = [
            chunk
            for chunk in events(ask(toys.url, "/v1/chat/completions", body).body)
            if "acceptance" in chunk
        ]
        said = [
            (chunk["choices"][0]["delta"]["content"], chunk["acceptance"]["characters"]) for chunk in chunks
        ]
        assert tab.text("answer") == "".join(text for text, _ in said)
        tinted = tab.run(
            "[...document.querySelectorAll('#answer mark')].map(mark => mark.textContent).join('')"
        )
        assert tinted == "".join(text[:guessed] for text, guessed in said) != ""
        tab.wait_for("document.querySelectorAll('#bars .bar').length === 5")

        # A death, and the recovery from it.
        speculator = toys.llm.coordinator.lanes[1]
        os.kill(speculator.process.pid, signal.SIGKILL)
        tab.wait_for("document.getElementById('events').textContent.includes('lane died: speculator')")
        tab.wait_for("document.getElementById('events').textContent.includes('lane restarted: speculator')")
        tab.wait_for("document.getElementById('health').textContent === 'healthy'")
        tab.wait_for("document.querySelector('[data-lane=speculator]').textContent.includes('1 restarts')")

        # Another speculator, and none.
        tab.run("document.getElementById('toggle').click()")
        tab.wait_for("document.getElementById('swapped').textContent === 'Drafts now: off'")
        tab.wait_for("document.querySelector('[data-lane=speculator]').textContent.includes('off')")

        # Both themes, and a narrow screen.
        colors = set()
        for _ in range(2):
            colors.add(background(tab))
            tab.screenshot(pictures / f"page-{tab.run('document.documentElement.dataset.theme')}.png")
            tab.run("document.getElementById('theme').click()")
        assert len(colors) == 2
        assert {path.name for path in pictures.glob("page-*.png")} >= {"page-dark.png", "page-light.png"}
        tab.resize(390, 844)
        tab.wait_for("document.documentElement.scrollWidth <= 390")
        tab.screenshot(pictures / "page-narrow.png")
        assert tab.complaints == []


def test_the_page_asks_for_nothing_elsewhere():
    with served() as toys:
        answer = ask(toys.url, "/")
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "http" not in policy
