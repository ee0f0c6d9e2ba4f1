"""What ``--http`` serves: a node's metrics for Prometheus, and its status as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from elastic_agents.probes.health import Page
from elastic_agents.probes.http_server import Response
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.observe.live import LiveLedger
from elastic_launch.observe.metrics import CONTENT_TYPE, NodeMetrics
from elastic_launch.observe.present import Present

__all__ = ["node_pages"]


def node_pages(config: LaunchConfig, metrics: NodeMetrics, ledger: LiveLedger) -> Mapping[str, Page]:
    """Return the pages by their paths."""

    def show_metrics(present: Present) -> Response:
        leads, goodput = ledger.goodput()
        return Response(200, metrics.text(present, leads=leads, goodput=goodput), CONTENT_TYPE)

    def show_status(present: Present) -> Response:
        leads, goodput = ledger.goodput()
        found = {
            "run_id": config.run_id,
            "node": config.node_id,
            "leads": leads,
            "goodput": goodput if leads else None,
        }
        return Response(200, json.dumps(found | asdict(present)).encode() + b"\n", "application/json")

    return {"/metrics": show_metrics, "/status": show_status}
