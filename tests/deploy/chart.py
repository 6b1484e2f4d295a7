"""Renders the chart, where Helm is installed; `python -m tests.deploy.chart` writes the plain manifest anew."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "serve-app"
MANIFEST = DEPLOY / "serve-app.yaml"
HELM = shutil.which("helm")
HEADER = """\
# What `helm template serve-app deploy/helm/serve-app` writes, for `kubectl apply -f`: the chart with default values.
# `python -m tests.deploy.chart` writes it anew. Change the chart, not this file.
"""


def rendered(*options: str) -> str:
    """Return the chart's manifests with these options. Raises CalledProcessError where Helm refuses them."""
    assert HELM is not None
    command = [HELM, "template", "serve-app", str(CHART), *options]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return HEADER + re.sub(r"\n\n+", "\n", told)


if __name__ == "__main__":
    MANIFEST.write_text(rendered(), encoding="utf-8")
