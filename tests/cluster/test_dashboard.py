"""Queries of alerts and dashboard are PromQL over series that `/metrics` has, and the picture shows what they say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from benchmarks.promql import Scrapes, evaluate, parse, selectors
from serving.node_metrics import PREFIX
from tests.cluster.monitoring_files import MONITORING, ROOT, dashboard, exported, rules

OF_OTHERS = {  # series that we do not export
    "up": {"job"},  # Prometheus' own
    "kube_cronjob_status_last_successful_time": {"namespace", "cronjob"},  # kube-state-metrics
}
TARGET = {"job", "instance"}  # labels that Prometheus adds
WANTED = (  # what an operator must be able to see
    "tau by version", "Tokens per second", "Acceptance by position", "Time to first token", "T_base, T_draft, T_verify",
    "Draft length", "Fallbacks per second", "Replicas by version", "Queue", "Traffic log",
)  # fmt: skip


def filled(query: str) -> str:
    return query.replace("$__rate_interval", "1m").replace("$model", ".*")


def queries() -> list[Any]:
    """(where, expression) of every query."""
    found = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    for panel in dashboard()["panels"]:
        found += [(panel["title"], filled(target["expr"])) for target in panel["targets"]]
    return found + [(note["name"], filled(note["expr"])) for note in dashboard()["annotations"]["list"]]


@pytest.mark.parametrize(("where", "query"), queries(), ids=[f"{n}:{where}" for n, (where, _) in enumerate(queries())])
def test_a_query_asks_for_series_that_there_are(where, query):
    recorded = {rule["record"]: {"model_name", "drafter_version"} for rule in rules() if "record" in rule}
    known = exported() | OF_OTHERS | recorded
    expression = parse(query)
    picked = selectors(expression)
    assert all(selector.name in known for selector in picked), [selector.name for selector in picked]
    labels = set().union(*(known[selector.name] for selector in picked)) | TARGET
    for selector in picked:
        matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert set(matchers) <= known[selector.name] | TARGET
        ours = selector.name in exported() or selector.name == "up"
        assert (matchers.get("job") == "draftloop") == ours, "other services may use the same names"
    grouped: set[str] = set()

    def visit(node: Any) -> bool:
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
            grouped.update(modifier.labels)
        return True

    promql_parser.walk(expression, pre_visit=visit)
    assert grouped <= labels
    evaluate(expression, Scrapes(), 0.0)  # and nothing in it is unknown to the picture


def test_nodes_are_scraped_for_the_same_names():
    """What Ray's port calls ray_draftloop_... is called as on `/metrics` again, and its other figures are left out."""
    [job] = yaml.safe_load((MONITORING / "prometheus-nodes.yaml").read_text())["scrape_configs"]
    keep, rename = job["metric_relabel_configs"]
    assert (job["job_name"], keep["action"], rename["target_label"]) == ("draftloop", "keep", "__name__")
    named = {f"ray_{PREFIX}{name}": name for name in exported()}
    assert all(re.fullmatch(keep["regex"], name) for name in named)
    assert {re.fullmatch(rename["regex"], name)[1] for name in named} == set(exported())
    assert not re.fullmatch(keep["regex"], "ray_node_cpu_utilization")


def test_the_metrics_that_an_operator_needs_are_shown():
    board = dashboard()
    titles = [panel["title"] for panel in board["panels"]]
    assert set(WANTED) <= set(titles)
    assert [panel["id"] for panel in board["panels"]] == list(range(1, len(titles) + 1))
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(titles), "no panel lies on another"
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "model"}
    for panel in board["panels"]:
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert 'model_name=~"$model"' in target["expr"]
            assert target["legendFormat"]


PAGE = """# TYPE drafter_info gauge
drafter_info{{model_name="m",drafter_version="{version}"}} 1
# TYPE spec_decode_num_drafts counter
spec_decode_num_drafts_total{{model_name="m",drafter_version="{version}"}} {rounds}
# TYPE spec_decode_num_accepted_tokens counter
spec_decode_num_accepted_tokens_total{{model_name="m",drafter_version="{version}"}} {accepted}
"""


def scrapes() -> Scrapes:
    """Ten minutes: v1 accepts two drafts a round, then v2 three."""
    found = Scrapes()
    for n in range(60):
        version, each = ("v1", 2) if n < 30 else ("v2", 3)
        found.add(10.0 * n, PAGE.format(version=version, rounds=100 * n, accepted=each * 100 * n))
    return found


def test_a_swap_ends_one_curve_and_begins_another():
    tau = parse(filled(dashboard()["panels"][0]["targets"][0]["expr"]))
    before, after = (evaluate(tau, scrapes(), at) for at in (250.0, 550.0))
    assert {dict(key)["drafter_version"]: value for key, value in before.items()} == {"v1": pytest.approx(3.0)}
    assert {dict(key)["drafter_version"]: value for key, value in after.items()} == {"v2": pytest.approx(4.0)}
    replicas = parse('count by (drafter_version) (drafter_info{job="draftloop"})')
    assert [list(evaluate(replicas, scrapes(), at)) for at in (299.0, 300.0)] == [
        [frozenset({("drafter_version", "v1")})], [frozenset({("drafter_version", "v2")})],
    ]  # fmt: skip


def test_replicas_that_share_a_target_keep_their_own_counters():
    """Behind one proxy each scrape meets another replica: without its label a counter would jump up and down."""
    page = '# TYPE generation_tokens counter\ngeneration_tokens_total{{model_name="m"{replica}}} {tokens}\n'
    tokens = parse(filled(dashboard()["panels"][1]["targets"][0]["expr"]))
    mixed, apart = Scrapes(), Scrapes()
    for n in range(60):
        number = n % 2  # the one has 10 tokens a second, the other, which began long ago, 30
        total = (10 + 20 * number) * 10 * n + 50_000 * number
        mixed.add(10.0 * n, page.format(replica="", tokens=total))
        apart.add(10.0 * n, page.format(replica=f',replica="r{number}"', tokens=total))
    [right], [wrong] = (evaluate(tokens, kept, 590.0).values() for kept in (apart, mixed))
    assert right == pytest.approx(40.0)
    assert wrong > 1000


@pytest.mark.parametrize(("query", "expected"), [
    ("increase(c[1m])", 60.0),  # extended to the ends of the minute, as Prometheus does
    ("rate(c[1m])", 1.0),
    ("increase(reset[1m])", 48.0),  # 20 before the restart and 20 after it within 50 s
    ("histogram_quantile(0.5, h_bucket)", 1.55),
    ("histogram_quantile(0.95, h_bucket)", 2.0),  # above the last bound
    ("c / on (job) group_left d", 2.5),
    ("avg_over_time(c[20s])", 95.0), ("max_over_time(reset[1m] offset 10s)", 70.0),
    ("absent(c)", None), ("absent(nothing)", 1.0), ("c > 200", None), ("c offset 50s", 50.0),
    ('c{job=~"draft.*", other!="x"} and d', 100.0), ("c unless d", None), ("nothing or d", 40.0), ("3 - d / 20", 1.0),
    ("time()", 100.0),
])  # fmt: skip
def test_the_part_of_promql_gives_prometheus_values(query, expected):
    found = Scrapes()
    for at in range(0, 101, 10):
        for name, value in {"c": at, "d": 40, "reset": at if at < 80 else at - 80}.items():
            found.put(at, {"__name__": name, "job": "draftloop"}, value)
        for bound, value in {"1": 0, "2": 10, "+Inf": 11}.items():
            found.put(at, {"__name__": "h_bucket", "le": bound}, value)
    value = evaluate(parse(query), found, 100)
    assert (value if isinstance(value, float) else next(iter(value.values()), None)) == pytest.approx(expected)


def test_the_picture_draws_the_dashboards_panels(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # scripts import one another by name
    picture = importlib.import_module("dashboard_picture")
    picture.matplotlib.use("agg")
    monkeypatch.setattr(picture, "POINTS", 60)
    board = dashboard()
    board["panels"] = board["panels"][:4]  # the queries of the others are tested above; axes cost time
    figure = picture.draw(board, picture.from_scrapes(scrapes()), (0.0, 590.0), 60.0)
    axes = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title() for axis in axes] == [panel["title"] for panel in board["panels"]]
    v1, v2 = (line for line in axes[0].lines if line.get_label().startswith("v"))
    assert (v1.get_label(), v2.get_label()) == ("v1", "v2")
    assert min(v2.get_xdata()) > 300
    assert max(v2.get_ydata()) == pytest.approx(4.0)
    assert [text.get_text() for text in axes[0].texts] == ["v1", "v2"], "when a version came into service"


def test_scrapes_are_read_as_they_were_kept(tmp_path: Path):
    file = tmp_path / "scrapes.jsonl"
    text = "# TYPE g gauge\\ng 1\\n"
    file.write_text("\n".join(f'{{"at": {at}, "text": "{text}", "instance": "{at % 2}"}}' for at in range(4)))
    found = Scrapes.read(file)
    assert found.span() == (0, 3)
    assert len(found.instant(parse('g{job="draftloop"}'), 3)) == 2
