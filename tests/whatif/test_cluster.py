"""One model's settings as the cluster file has them; what is no cluster file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.whatif.cluster import read_cluster
from serve_app.whatif.trace import Unusable
from tests.whatif.traffic import COSTS

CLUSTER = Path(__file__).parents[2] / "cluster.yaml"


def test_settings_are_those_of_the_file() -> None:
    found = read_cluster(str(CLUSTER), COSTS, model="demo")
    config = found.config
    assert (config.name, config.max_num_sequences, config.max_adapters) == ("demo", 32, 16)
    assert (found.num_replicas, found.policy, found.admission.max_wait_s) == (2, "warm", 30)


def test_an_autoscaled_model_has_its_most_replicas(tmp_path: Path) -> None:
    text = CLUSTER.read_text(encoding="utf-8")
    scaled = text.replace("num_replicas: 2", "autoscaling_config: {min_replicas: 0, max_replicas: 7}")
    scaled = scaled.replace("auth: none ", "placement: random\n      auth: none ")
    (tmp_path / "cluster.yaml").write_text(scaled, encoding="utf-8")
    found = read_cluster(str(tmp_path / "cluster.yaml"), COSTS)
    assert (found.num_replicas, found.policy) == (7, "random")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "is no cluster file"),
        ("applications: 3", "is no cluster file"),
        ("applications: []", "has no model ''; it has none"),
        ("applications: [{args: {name: a, path: b, max_waiting: -1}}]", "cannot be used"),
        ("a: [", "cannot be used"),
        *(
            (CLUSTER.read_text(encoding="utf-8").replace("num_replicas: 2", f"num_replicas: {number}"), reason)
            for number, reason in (
                ("auto", "num_replicas of 'demo', or max_replicas, must be a whole number to simulate; found 'auto'"),
                ("2.0", "num_replicas of 'demo', or max_replicas, must be a whole number to simulate; found 2.0"),
            )
        ),
    ],
)
def test_what_is_no_cluster_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(Unusable, match=reason):
        read_cluster(str(tmp_path / "cluster.yaml"), COSTS)
