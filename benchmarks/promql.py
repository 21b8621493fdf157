"""A part of PromQL over scrapes that were kept: the expressions of cluster/monitoring, evaluated as Prometheus does.

In: the text of `/metrics` at some times. Out: values of an expression at a time. `promql-parser` reads expressions;
what dashboard and alerts do not use is an error here, never a guess. Not a database: it is for pictures and tests.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import promql_parser as ast
from prometheus_client.parser import text_string_to_metric_families

LOOKBACK_S = 300.0  # how old an instant value may be
NAME = "__name__"

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]


class PromqlError(ValueError):
    """An expression that is no PromQL, or uses what this part of it lacks."""


class Scrapes:
    """Samples by series. A series that a target's next scrape lacks is over, as in Prometheus."""

    def __init__(self) -> None:
        self._series: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
        self._by_name: dict[str, set[Labels]] = defaultdict(set)
        self._times: dict[str, list[float]] = defaultdict(list)  # of scrapes, by instance

    def add(self, at: float, text: str, instance: str = "replica", job: str = "draftloop") -> None:
        """One scrape; `at` in seconds, ascending for each instance."""
        self._times[instance].append(at)
        own = {"instance": instance, "job": job}
        self.put(at, {NAME: "up"} | own, 1.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.put(at, {NAME: sample.name} | sample.labels | own, float(sample.value))

    def put(self, at: float, labels: dict[str, str], value: float) -> None:
        """One sample, of a scrape or of a rule."""
        key = frozenset(labels.items())
        self._series[key].append((at, value))
        self._by_name[labels[NAME]].add(key)

    @classmethod
    def read(cls, file: Path) -> Scrapes:
        """From JSON lines of `at`, `text` and, with several replicas, `instance`."""
        scrapes = cls()
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            scrapes.add(row["at"], row["text"], row.get("instance", "replica"))
        return scrapes

    def span(self) -> tuple[float, float]:
        """Times of the first and of the last scrape."""
        every = [at for times in self._times.values() for at in times]
        return min(every), max(every)

    def names(self) -> set[str]:
        """Names of all series."""
        return set(self._by_name)

    def instant(self, selector: Any, at: float) -> Vector:
        """The latest sample of each series that the selector picks, without those that are over."""
        found: Vector = {}
        for key in self._picked(selector):
            samples = self._series[key]
            place = bisect_right(samples, (at, math.inf)) - 1
            if place < 0 or samples[place][0] <= at - LOOKBACK_S:
                continue
            times = self._times.get(dict(key).get("instance", ""), [])
            latest = bisect_right(times, at) - 1
            if latest >= 0 and times[latest] > samples[place][0]:
                continue  # the target was scraped since, and had it no more
            found[key] = samples[place][1]
        return found

    def range(self, selector: Any, at: float, seconds: float) -> dict[Labels, list[tuple[float, float]]]:
        """The samples of each series that the selector picks, in (at - seconds, at]."""
        found = {}
        for key in self._picked(selector):
            samples = self._series[key]
            low, high = (bisect_right(samples, (t, math.inf)) for t in (at - seconds, at))
            if high > low:
                found[key] = samples[low:high]
        return found

    def _picked(self, selector: Any) -> Iterable[Labels]:
        tests = [_matcher(matcher) for matcher in selector.matchers.matchers]
        for key in self._by_name.get(selector.name, ()):
            labels = dict(key)
            if all(test(labels) for test in tests):
                yield key


def parse(expression: str) -> Any:
    """The expression as promql-parser reads it. Raises PromqlError."""
    try:
        return ast.parse(expression)
    except ValueError as error:
        raise PromqlError(f"no PromQL: {' '.join(expression.split())}: {error}") from error


def evaluate(expression: Any, scrapes: Scrapes, at: float) -> Vector | float:
    """The value at a time. Series of a result have no name, but those of a bare selector. Raises PromqlError."""
    match expression:
        case ast.ParenExpr():
            return evaluate(expression.expr, scrapes, at)
        case ast.NumberLiteral():
            return float(expression.val)
        case ast.VectorSelector():
            return scrapes.instant(expression, at - _offset(expression))
        case ast.AggregateExpr():
            return _aggregate(expression, _vector(expression.expr, scrapes, at))
        case ast.BinaryExpr():
            return _binary(expression, evaluate(expression.lhs, scrapes, at), evaluate(expression.rhs, scrapes, at))
        case ast.Call():
            return _call(expression, scrapes, at)
    raise PromqlError(f"{type(expression).__name__} is not known here: {expression}")


def selectors(expression: Any) -> list[Any]:
    """Every vector selector of an expression."""
    found = []

    def visit(node: Any) -> bool:
        if isinstance(node, ast.VectorSelector):
            found.append(node)
        return True

    ast.walk(expression, pre_visit=visit)
    return found


def _vector(expression: Any, scrapes: Scrapes, at: float) -> Vector:
    value = evaluate(expression, scrapes, at)
    if isinstance(value, float):
        raise PromqlError(f"a number where series are wanted: {expression}")
    return value


def _offset(selector: Any) -> float:
    return selector.offset.total_seconds() if selector.offset is not None else 0.0


def _matcher(matcher: Any) -> Callable[[dict[str, str]], bool]:
    name, value, op = matcher.name, matcher.value, str(matcher.op)
    if op.endswith(("Equal", "NotEqual")):
        wanted = not op.endswith("NotEqual")
        return lambda labels: (labels.get(name, "") == value) == wanted
    pattern, wanted = re.compile(value), not op.endswith("NotRe")
    return lambda labels: (pattern.fullmatch(labels.get(name, "")) is not None) == wanted


# -- functions --------------------------------------------------------------------------------------------------------


def _call(call: Any, scrapes: Scrapes, at: float) -> Vector | float:
    name, arguments = call.func.name, call.args
    if name == "time":
        return float(at)
    if name == "absent":
        return {} if _vector(arguments[0], scrapes, at) else {frozenset(): 1.0}
    if name == "histogram_quantile":
        return _quantile(float(arguments[0].val), _vector(arguments[1], scrapes, at))
    if name in _OVER_TIME:
        matrix = arguments[0]
        seconds = matrix.range.total_seconds()
        end = at - _offset(matrix.vector_selector)
        values = {
            _unnamed(key): _OVER_TIME[name](samples, end, seconds)
            for key, samples in scrapes.range(matrix.vector_selector, end, seconds).items()
        }
        return {key: value for key, value in values.items() if value is not None}
    raise PromqlError(f"the function {name} is not known here")


def _increase(samples: list[tuple[float, float]], end: float, seconds: float) -> float | None:
    """What a counter gained, extended to the ends of the range as Prometheus does."""
    if len(samples) < 2:
        return None
    values = [value for _, value in samples]
    gained = values[-1] - values[0]
    gained += sum(before for before, after in itertools.pairwise(values) if after < before)  # restarts
    (first_at, first), (last_at, _) = samples[0], samples[-1]
    sampled = last_at - first_at
    between = sampled / (len(samples) - 1)
    before, after = first_at - (end - seconds), end - last_at
    before, after = (t if t < 1.1 * between else between / 2 for t in (before, after))
    if gained > 0 and first >= 0:
        before = min(before, sampled * first / gained)  # a counter was never below zero
    return gained * (sampled + before + after) / sampled


def _rate(samples: list[tuple[float, float]], end: float, seconds: float) -> float | None:
    gained = _increase(samples, end, seconds)
    return None if gained is None else gained / seconds


def _mean(samples: list[tuple[float, float]], _end: float, _seconds: float) -> float | None:
    return sum(value for _, value in samples) / len(samples)


def _highest(samples: list[tuple[float, float]], _end: float, _seconds: float) -> float | None:
    return max(value for _, value in samples)


_OVER_TIME: dict[str, Callable[[list[tuple[float, float]], float, float], float | None]] = {
    "increase": _increase,
    "rate": _rate,
    "avg_over_time": _mean,
    "max_over_time": _highest,
}


def _quantile(share: float, buckets: Vector) -> Vector:
    """Prometheus' linear interpolation within the bucket that the quantile falls into."""
    grouped: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for key, count in buckets.items():
        labels = dict(key)
        bound = float(labels.pop("le"))
        grouped[frozenset(labels.items())].append((bound, count))
    found = {}
    for key, counts in grouped.items():
        counts.sort()
        total = counts[-1][1]
        if not total or math.isnan(total) or len(counts) < 2:
            continue
        rank = share * total
        place = next(i for i, (_, count) in enumerate(counts) if count >= rank)
        if math.isinf(counts[place][0]):
            found[key] = counts[-2][0]
            continue
        low, below = counts[place - 1] if place else (0.0, 0.0)
        high, upto = counts[place]
        found[key] = low + (high - low) * (rank - below) / (upto - below)
    return found


# -- operators --------------------------------------------------------------------------------------------------------

_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "max": max,
    "min": min,
    "avg": lambda values: math.fsum(values) / len(values),
    "count": lambda values: float(len(values)),
}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else math.copysign(math.inf, a) if a else math.nan,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


def _unnamed(key: Labels) -> Labels:
    return frozenset(pair for pair in key if pair[0] != NAME)


def _only(key: Labels, names: Iterable[str]) -> Labels:
    wanted = set(names)
    return frozenset(pair for pair in key if pair[0] in wanted)


def _aggregate(expression: Any, vector: Vector) -> Vector:
    how = _AGGREGATES.get(str(expression.op))
    if how is None:
        raise PromqlError(f"the aggregation {expression.op} is not known here")
    modifier = expression.modifier
    if modifier is not None and not str(modifier.type).endswith("By"):
        raise PromqlError(f"only `by` is known here: {expression}")
    names = modifier.labels if modifier is not None else []
    grouped: dict[Labels, list[float]] = defaultdict(list)
    for key, value in vector.items():
        grouped[_only(key, names)].append(value)
    return {key: how(values) for key, values in grouped.items()}


def _binary(expression: Any, left: Vector | float, right: Vector | float) -> Vector | float:
    op = str(expression.op)
    if isinstance(left, float) and isinstance(right, float):
        return _ARITHMETIC[op](left, right)
    if isinstance(left, float) or isinstance(right, float):
        return _with_number(op, left, right)
    on = _matching(expression)
    if op in ("and", "unless"):
        there = {on(key) for key in right}
        return {key: value for key, value in left.items() if (on(key) in there) == (op == "and")}
    if op == "or":
        there = {on(key) for key in left}
        return left | {key: value for key, value in right.items() if on(key) not in there}
    others: dict[Labels, float] = {}
    for key, value in right.items():
        if on(key) in others:
            raise PromqlError(f"several series on the right side match one on the left: {expression}")
        others[on(key)] = value
    found: Vector = {}
    many = expression.modifier is not None and "ManyToOne" in str(expression.modifier.card)
    for key, value in left.items():
        if on(key) not in others:
            continue
        if op in _COMPARISONS:
            if _COMPARISONS[op](value, others[on(key)]):
                found[key] = value
            continue
        result = _unnamed(key) if many else on(key)
        if result in found:
            raise PromqlError(f"several series on the left side match one on the right: {expression}")
        found[result] = _ARITHMETIC[op](value, others[on(key)])
    return found


def _with_number(op: str, left: Vector | float, right: Vector | float) -> Vector:
    vector, number = (right, left) if isinstance(left, float) else (left, right)
    assert isinstance(vector, dict), "one of the two sides has series"
    assert isinstance(number, float), "and the other is a number"
    swapped = isinstance(left, float)
    if op in _COMPARISONS:
        compare = _COMPARISONS[op]
        return {k: v for k, v in vector.items() if (compare(number, v) if swapped else compare(v, number))}
    do = _ARITHMETIC[op]
    return {_unnamed(k): do(number, v) if swapped else do(v, number) for k, v in vector.items()}


def _matching(expression: Any) -> Callable[[Labels], Labels]:
    """By which labels the two sides match."""
    modifier = expression.modifier
    matching = modifier.matching if modifier is not None else None
    if matching is None:
        return _unnamed
    if not str(matching.type).endswith(("On", "Include")):
        raise PromqlError(f"only `on` is known here: {expression}")
    return lambda key: _only(key, matching.labels)
