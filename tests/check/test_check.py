"""`serve_app check` finds every mistake that Serve would swallow, and says on which line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from serve_app.check.cluster_file import check_file
from serve_app.cli import main
from serve_app.deployments.arguments import ModelArgs

REPOSITORY = Path(__file__).parents[2]

SOUND = """\
http_options:
  host: 127.0.0.1
applications:
- name: router
  route_prefix: /
  import_path: serve_app.deployments.apps:router
  args: {}
  deployments:
  - name: Router
    num_replicas: 1
    user_config:
      aliases: {latest: demo}
- name: demo
  route_prefix: null
  import_path: serve_app.deployments.apps:model
  args:
    name: demo
    path: builtin:demo
  deployments:
  - name: Model
    num_replicas: 2
    ray_actor_options:
      num_cpus: 1
"""
ROUTER = SOUND[SOUND.index("- name: router") : SOUND.index("- name: demo")]


@pytest.fixture
def report_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Check a text; gives (is it sound, all lines as one text)."""
    monkeypatch.chdir(tmp_path)

    def check(text: str) -> tuple[bool, str]:
        Path("cluster.yaml").write_text(text, encoding="utf-8")
        report = check_file("cluster.yaml")
        return report.is_sound, "\n".join(report.lines)

    return check


def test_the_cluster_file_of_this_repository_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    report = check_file("cluster.yaml")
    assert report.is_sound, report.lines


def test_the_file_that_the_mistakes_below_are_made_in_is_sound(report_of) -> None:  # type: ignore[no-untyped-def]
    is_sound, text = report_of(SOUND)
    assert is_sound, text


def test_a_setting_that_is_gone_is_told_and_changes_nothing(report_of) -> None:  # type: ignore[no-untyped-def]
    is_sound, text = report_of(SOUND.replace("    path: builtin", "    kv_storage: lanes\n    path: builtin"))
    assert "warning: applications[1].args.kv_storage: kv_storage changes nothing any more" in text
    assert is_sound, text
    told = ModelArgs.model_validate({"name": "demo", "path": "builtin:demo", "kv_storage": "lanes"})
    assert told == ModelArgs.model_validate({"name": "demo", "path": "builtin:demo"})


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("http_options:", "http_option:", "cluster.yaml:1: error: http_option: unknown key 'http_option'; did you"),
        ("  host:", "  hots:", "cluster.yaml:2: error: http_options.hots: unknown key 'hots'; did you mean 'host'?"),
        ("- name: router\n", "- name: router\n  route: /\n", "cluster.yaml:5: error: applications[0].route: unknown"),
        ("num_replicas", "num_replica", "did you mean 'num_replicas'?"),
        ("num_replicas: 2", "autoscaling_config: {max_replicas: 2}", "autoscaling_config: Serve scales by the calls"),
        ("num_replicas: 2", "num_replicas: auto", "deployments[0].num_replicas: Serve scales by the calls"),
        ("num_replicas: 1", "autoscaling_config: {min_replicas: 1}", "Write `num_replicas: N` instead"),
        ("num_replicas: 2", "autoscaling_config: {max_replica: 2}", "unknown key 'max_replica'; did you mean"),
        ("num_cpus", "num_cpu", "ray_actor_options.num_cpu: unknown key 'num_cpu'; did you mean 'num_cpus'?"),
        ("    path: builtin", "    paht: builtin", "args.paht: unknown key 'paht'; did you mean 'path'?"),
        ("aliases", "alias", "user_config.alias: unknown key 'alias'; did you mean 'aliases'?"),
        ("    path: builtin:demo\n", "", "applications[1].args: 'path' is required"),
        ("num_replicas: 1", "num_replicas: -1", "deployments[0].num_replicas: "),
        ("num_replicas: 2", "autoscaling_config: {max_replicas: many}", "autoscaling_config.max_replicas: "),
        ("num_cpus: 1", "num_cpus: -1", "ray_actor_options.num_cpus: "),
        ("{latest: demo}", "[demo]", "user_config.aliases: "),
        (
            "{latest: demo}",
            "{}\n      prices: {demo: {promt: 1}}",
            "prices.demo.promt: unknown key 'promt'; did you mean",
        ),
        ("{latest: demo}", "{}\n      prices: {demo: {prompt: .inf}}", "user_config.prices.demo.prompt: "),
        ("{latest: demo}", "{}\n      prices: {demo: {cached: .nan}}", "user_config.prices.demo.cached: "),
        ("name: Model", "name: Modell", "the application has no deployment 'Modell'; did you mean 'Model'?"),
        ("- name: demo", "- name: router", "name 'router' is already that of applications[0]"),
        ("- name: demo", "- name: other", "an application is named as its model"),
        ("route_prefix: null", "route_prefix: /", "route_prefix '/' is already that of applications[0]"),
        ("route_prefix: null", "route_prefix: /demo", "write `route_prefix: null`"),
        ("apps:model", "apps:modell", "'serve_app.deployments.apps:modell' cannot be imported"),
        ("  args: {}", "  args: {}\n  args: {}", "'args' is given twice, first on line 7"),
        ("builtin:demo", "no/such/folder", "args.path: "),
        ("    path: builtin", "    adapters: no/such\n    path: builtin", "args.adapters: "),
        ("applications:", "applications: [", "cluster.yaml:4: error: "),
        ("  host:", "  port: 99999\n  host:", "http_options.port: must be a TCP port, from 1 to 65535; found 99999"),
        ("  host:", "  port: 0\n  host:", "http_options.port: must be a TCP port, from 1 to 65535; found 0"),
        (
            "{latest: demo}",
            "{latest: nemo}",
            "aliases.latest: leads to 'nemo', which is nothing that is served: \"model\"",
        ),
        ("{latest: demo}", "{a: b, b: a}", "aliases: aliases go in a circle: a → b → a"),
        ("{latest: demo}", "{latest: {demo: 1, nemo: 2}}", "aliases.latest.nemo: leads to 'nemo', which is nothing"),
        ("{latest: demo}", "{latest: {'nemo:a@12345678': 2}}", "leads to 'nemo:a@12345678', and no model of this file"),
        (
            "{latest: demo}",
            "{latest: {to: demo, shadow: {nemo: 2}}}",
            "aliases.latest.shadow.nemo: leads to 'nemo', which",
        ),
        ("{latest: demo}", "{latest: {to: {nemo: 2}}}", "aliases.latest.to.nemo: leads to 'nemo', which"),
        ("{latest: demo}", "{latest: {demo: -1}}", "aliases.latest: the weight of 'demo' must be a number from 0 to"),
        ("{latest: demo}", "{latest: {demo: 0}}", "aliases.latest: at least one weight must be above 0"),
        ("{latest: demo}", "{demo: demo}", "aliases: aliases go in a circle: demo → demo"),
        ("{latest: demo}", "{demo: 'demo:pirate'}", "aliases.demo: 'demo' is the name of a model already"),
        (
            "{latest: demo}",
            "{}\n      prices: {nemo: {prompt: 1}}",
            "prices.nemo: is no model of this file, so nothing",
        ),
        ("{latest: demo}", "{x: demo}\n      prices: {x: {prompt: 1}}", "prices.x: is no model of this file"),
        (
            "    path: builtin",
            "    max_model_len: 1000000\n    path: builtin",
            "max_model_len: must be at most 2048, the",
        ),
        pytest.param(
            "    path: builtin",
            "    device: cuda\n    path: builtin",
            "args.device: device: cuda was asked for, but torch sees no CUDA device, here; write `device: cpu`",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (ROUTER, "", "applications: no application is a router, so nobody could ask for anything: add one with"),
        (SOUND[SOUND.index("applications:") :], "applications: []\n", "applications: no application is a router, so"),
        ("  host:", "  port: -1\n  host:", "http_options.port: must be a TCP port, from 1 to 65535; found -1"),
        ("  host:", "  port: '70000'\n  host:", "http_options.port: must be a TCP port, from 1 to 65535; found 70000"),
    ],
)
def test_a_mistake_is_found_and_named(report_of, right: str, wrong: str, said: str) -> None:  # type: ignore[no-untyped-def]
    assert right in SOUND
    is_sound, text = report_of(SOUND.replace(right, wrong, 1))
    assert not is_sound
    assert said in text


def test_serve_itself_accepts_the_misspelt_keys() -> None:
    """The reason why this command exists; once this fails it may be simplified."""
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(yaml.safe_load(SOUND.replace("num_replicas", "num_replica")))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "42", "applications: 7", "applications: [7]", "applications:\n- 7: 8", "\t", "a: &a [*a]", "? [1]\n: 2"],
)
def test_whatever_the_file_holds_there_is_a_report_and_no_traceback(report_of, text: str) -> None:  # type: ignore[no-untyped-def]
    is_sound, said = report_of(text)
    assert not is_sound
    assert "error: " in said


def test_a_file_that_is_missing_or_no_text_is_reported(tmp_path: Path) -> None:
    assert "cannot be read" in check_file(str(tmp_path / "none.yaml")).lines[0]
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in check_file(str(tmp_path / "bytes.yaml")).lines[0]


def test_the_command_exits_by_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(SOUND, encoding="utf-8")
    assert main(["check", str(file)]) == 0
    assert "wants the environment that `serve_app env` prints" in capsys.readouterr().out
    file.write_text("nothing: here", encoding="utf-8")
    assert main(["check", str(file)]) == 1
    assert "unknown key 'nothing'" in capsys.readouterr().out


def test_aliases_and_prices_of_what_is_there_are_sound(report_of) -> None:  # type: ignore[no-untyped-def]
    folder = f"    adapters: {REPOSITORY / 'adapters/demo'}\n    path: builtin"
    names = "{latest: demo, next: latest, sea: 'demo:pirate', both: 'demo:pirate*0.5+shout'}"
    prices = "{demo: {prompt: 1}, 'demo:pirate': {prompt: 2}, '*': {prompt: 3}}"
    text = SOUND.replace("    path: builtin", folder).replace("{latest: demo}", f"{names}\n      prices: {prices}")
    is_sound, said = report_of(text)
    assert is_sound, said


def test_an_alias_may_name_an_adapter_that_is_published_later_and_is_warned_of(report_of) -> None:  # type: ignore[no-untyped-def]
    is_sound, said = report_of(SOUND.replace("{latest: demo}", "{latest: 'demo:pirate'}"))
    assert is_sound, said
    assert "warning: applications[0].deployments[0].user_config.aliases.latest: leads to 'demo:pirate', which" in said


def test_an_alias_with_weights_is_told_in_one_sentence(report_of) -> None:  # type: ignore[no-untyped-def]
    is_sound, said = report_of(SOUND.replace("{latest: demo}", "{latest: {demo: 3, 'demo:sql@12345678': 1}}"))
    assert is_sound, said
    told = "note: applications[0].deployments[0].user_config.aliases.latest: of its requests answers demo 75%, demo:sql"
    assert told in said


POLICY = 'policy_function: "serve_app.deployments.autoscaling:FollowWork"'
FOLLOWS = f"{{min_replicas: 0, max_replicas: 3, policy: {{{POLICY}%s}}}}"


def test_a_model_may_follow_the_work_and_is_told_how_in_one_sentence(report_of) -> None:  # type: ignore[no-untyped-def]
    text = SOUND.replace("num_replicas: 2", f"autoscaling_config: {FOLLOWS % ''}")
    assert text != SOUND
    is_sound, said = report_of(text)
    assert is_sound, said
    told = (
        "autoscaling_config: Serve keeps 0 to 3 replicas: it adds some once their sequences or KV cache are 70% in use,"
        " or a request waits longer than 2 s, for 30 s; it drains those that are not needed for 600 s, and the last one"
        " after 600 s without a request"
    )
    assert told in said


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ("{target_share: 2}", "policy.policy_kwargs: target_share must be above 0 and at most 1; found 2"),
        ("{target_shar: 1}", "policy.policy_kwargs: got an unexpected keyword argument 'target_shar'; known: target_"),
    ],
)
def test_a_setting_that_the_policy_refuses_is_an_error(report_of, kwargs: str, told: str) -> None:  # type: ignore[no-untyped-def]
    follows = FOLLOWS % f", policy_kwargs: {kwargs}"
    is_sound, said = report_of(SOUND.replace("num_replicas: 2", f"autoscaling_config: {follows}"))
    assert not is_sound
    assert told in said


def test_the_router_does_not_follow_the_work_of_models(report_of) -> None:  # type: ignore[no-untyped-def]
    is_sound, said = report_of(SOUND.replace("num_replicas: 1", f"autoscaling_config: {FOLLOWS % ''}"))
    assert not is_sound
    assert "Write `num_replicas: N` instead" in said


def test_an_address_of_adapters_is_read_strictly_and_named_with_what_fetches_it(report_of) -> None:  # type: ignore[no-untyped-def]
    def told(root: str) -> tuple[bool, str]:
        deployment = f"- {{name: Router, user_config: {{adapter_roots: [{root!r}]}}}}"
        found: tuple[bool, str] = report_of(
            "applications:\n- name: router\n  route_prefix: /\n  import_path: serve_app.deployments.apps:router\n"
            f"  args: {{}}\n  deployments:\n  {deployment}\n"
        )
        return found

    is_sound, said = told("https://files.example.org/adapters")
    assert is_sound, said
    assert "note: " in said
    assert "this machine can fetch https://" in said
    is_sound, said = told("/no/such/folder")
    assert is_sound, said
    assert "adapter_roots[0]: this machine has no folder /no/such/folder" in said
    is_sound, said = told("s3://key:secret@bucket/team")
    assert not is_sound
    assert "credentials" in said
