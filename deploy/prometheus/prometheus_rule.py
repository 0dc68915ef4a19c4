"""The rules of this folder as one PrometheusRule, the form in which the Prometheus operator takes them.

    python deploy/prometheus/prometheus_rule.py > deploy/kubernetes/components/monitoring/prometheusrule.yaml

after a change of the rules; a test says when that was forgotten. Knows the two forms; does not know what the rules say.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).with_name("rules")
HEADER = "# Made by deploy/prometheus/prometheus_rule.py from deploy/prometheus/rules.\n"


def prometheus_rule() -> dict[str, Any]:
    """All groups of all rule files, in the files' order, inside the operator's resource."""
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(RULES.glob("*.yaml"))]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "ropewalk", "labels": {"app.kubernetes.io/name": "ropewalk"}},
        "spec": {"groups": [group for file in files for group in file["groups"]]},
    }


if __name__ == "__main__":
    sys.stdout.write(HEADER + yaml.safe_dump(prometheus_rule(), sort_keys=False, width=120, allow_unicode=True))
