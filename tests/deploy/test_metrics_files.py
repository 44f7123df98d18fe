"""What alerts and dashboard ask for is what a server really exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "process"))
from serving import ask, served

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "speclane.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels of each series, by name."""
    with served() as server:
        ask(server.url, "/v1/completions", {"prompt": "x", "max_tokens": 4})
        text = ask(server.url, "/metrics").body
    names: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    for group in RULES["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                names[rule["record"]] = {"model_name", "lane"}
    return names


def expressions() -> list[tuple[str, str]]:
    rules = [
        (rule.get("alert") or rule["record"], rule["expr"])
        for group in RULES["groups"]
        for rule in group["rules"]
    ]
    queries = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
    return rules + [
        (name, expr.replace("$__rate_interval", "5m").replace("$instance", ".*")) for name, expr in queries
    ]


def selectors(expression: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    found = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(expression, visit)
    return found


@pytest.mark.parametrize(("name", "expression"), expressions())
def test_every_query_asks_for_what_there_is(name, expression, exported):
    asked = selectors(promql_parser.parse(expression))
    assert asked
    for selector in asked:
        assert selector.name in exported, f"{name} asks for {selector.name}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= exported[selector.name] | SCRAPED


def test_the_query_check_sees_what_is_missing(exported):
    (selector,) = selectors(promql_parser.parse("rate(speclane_nothing_total[5m])"))
    assert selector.name not in exported


def test_labels_in_texts_are_labels_of_the_series(exported):
    for group in RULES["groups"]:
        for rule in group["rules"]:
            texts = " ".join(rule.get("annotations", {}).values())
            used = set(re.findall(r"\$labels\.(\w+)", texts))
            has = set().union(*(exported[each.name] for each in selectors(promql_parser.parse(rule["expr"]))))
            assert used <= has | SCRAPED, rule.get("alert")


def test_alerts_say_how_bad_it_is_and_what_to_do():
    alerts = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) >= 8
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "action"}


def test_rules_alert_when_they_should():
    promtool = shutil.which("promtool") or pytest.skip("promtool is not installed")
    here = DEPLOY / "prometheus"
    for words in (["check", "config", "prometheus.yaml"], ["test", "rules", "rules.test.yaml"]):
        done = subprocess.run(
            [promtool, *words], cwd=here, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_can_be_imported():
    assert DASHBOARD["uid"] == "speclane"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert [target["refId"] for target in panel["targets"]] == list("ABC"[: len(panel["targets"])])
