"""Writes rules and boards where Prometheus and Grafana can read them: `python -m serve_app.observe FOLDER`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

HERE = Path(__file__).parent
FILES = ("rules.yaml", "prometheus.yaml", "boards/service.json", "boards/replicas.json", "boards/tenants.json")
NEXT = """Wrote {folder}: rules.yaml, prometheus.yaml and boards/.
Prometheus: prometheus --config.file={folder}/prometheus.yaml --web.listen-address=127.0.0.1:9090
Grafana:    Dashboards, New, Import, one file of {folder}/boards after the other; choose that Prometheus."""


def write(folder: Path) -> None:
    """Copy every file there; those of the same names are written over."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / name, folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m serve_app.observe", description=__doc__)
    parser.add_argument("folder", type=Path, help="is made where it is missing")
    folder: Path = parser.parse_args().folder
    write(folder)
    print(NEXT.format(folder=folder))
