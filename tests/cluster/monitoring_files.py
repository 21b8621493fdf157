"""cluster/monitoring, read, and the names and labels that `/metrics` really has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from serving.engine.load import Load
from serving.metric_families import (
    Labels,
    drafter_families,
    load_families,
    registry_families,
    request_families,
    service_families,
    traffic_families,
)
from serving.registry_figures import RegistryFigures
from serving.traffic_schema import TrafficCounts

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "cluster" / "monitoring"
ALERTS = MONITORING / "alerts.yaml"
PARTS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "dashboard.json").read_text())


def exported() -> dict[str, set[str]]:
    """Labels by name of a series, of every family that a replica exports."""
    labels = Labels("m", "r1", lambda version: "colocated")
    load = Load(running=0, waiting=0, tokens_in_flight=0, oldest_wait_s=0.0, slot_use=0.0, token_use=0.0)
    traffic = TrafficCounts(rows=0, shards=0, bytes=0, deleted=0, pending=0, dropped={}, failures={})
    follower = RegistryFigures(champion=0, followed=0, following=True, polls={}, guard_away=0, rollbacks={})
    families = [
        *request_families(labels, {}),
        *service_families(labels, {}, {}, {}, {}),
        *registry_families(labels, follower),
        *traffic_families(labels, traffic),
        *load_families(labels, load),
        *drafter_families(labels, {}, "v@1", "recursive", "s3://bucket/v"),
    ]
    return {
        family.name + part: {*family._labelnames, *(["le"] if part == "_bucket" else [])}
        for family in families
        for part in PARTS[family.type]
    }
