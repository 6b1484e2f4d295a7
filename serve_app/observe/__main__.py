"""Writes rules and boards where Prometheus and Grafana can read them: `python -m serve_app.observe FOLDER`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

HERE = Path(__file__).parent
KEY_LINE, KEY_FILE = "  # authorization: ", "metrics.key"
TARGET, PROMETHEUS = "127.0.0.1:8000", "http://127.0.0.1:9090"
FILES = ("rules.yaml", "prometheus.yaml", "boards/service.json", "boards/replicas.json", "boards/tenants.json")
NEXT = """Wrote {folder}: rules.yaml, prometheus.yaml, boards/ and provisioning/.
Prometheus: prometheus --config.file={folder}/prometheus.yaml --web.listen-address={address}
Grafana:    GF_PATHS_PROVISIONING={provisioning} grafana server, or import the files of {folder}/boards by hand."""


def write(folder: Path, *, target: str = TARGET, prometheus: str = PROMETHEUS, key_file: str | None = None) -> None:
    """Write every file there; those of the same names are written over.

    target:     host and port of the service, which Prometheus scrapes
    prometheus: its URL, which Grafana asks
    key_file:   holds the key of scope `metrics` that Prometheus presents; None presents none
    """
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / name, folder / name)
    scrape = folder / "prometheus.yaml"
    text = scrape.read_text(encoding="utf-8").replace(TARGET, target)
    if key_file is not None:
        text = text.replace(KEY_LINE, KEY_LINE.replace("# ", "")).replace(KEY_FILE, key_file)
    scrape.write_text(text, encoding="utf-8")
    source = {"name": "serve_app", "type": "prometheus", "access": "proxy", "url": prometheus, "isDefault": True}
    boards = {"name": "serve_app", "type": "file", "options": {"path": str((folder / "boards").resolve())}}
    for name, content in (("datasources", [source]), ("dashboards", [boards])):
        key = "providers" if name == "dashboards" else name
        file = folder / "provisioning" / name / "serve_app.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"apiVersion": 1, key: content}, indent=1) + "\n", encoding="utf-8")  # YAML, too


def main() -> None:
    """Read the command line, write the files and say what to do with them."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.observe", description=__doc__)
    parser.add_argument("folder", type=Path, help="is made where it is missing")
    parser.add_argument("--target", default=TARGET, metavar="HOST:PORT", help="of the service, usually %(default)s")
    parser.add_argument("--prometheus", default=PROMETHEUS, metavar="URL", help="of Prometheus, usually %(default)s")
    parser.add_argument("--key-file", metavar="FILE", help="with a key of scope metrics, if the service asks for keys")
    asked = parser.parse_args()
    write(asked.folder, target=asked.target, prometheus=asked.prometheus, key_file=asked.key_file)
    provisioning = (asked.folder / "provisioning").resolve()
    address = asked.prometheus.partition("://")[2].rstrip("/")
    print(NEXT.format(folder=asked.folder, provisioning=provisioning, address=address))


if __name__ == "__main__":
    main()
