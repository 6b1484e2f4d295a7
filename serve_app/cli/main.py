"""The command line: `serve_app up | down | check | doctor | env | tenants | keys | usage | models | complete`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from serve_app.cli.tenancy_options import add_tenancy

DEFAULT_URL = "http://127.0.0.1:8000"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 where it went well."""
    options = _parser().parse_args(arguments)
    try:
        match options.command:
            case "up":
                return _up(options)
            case "down":
                return _down(options)
            case "check":
                return _check(options)
            case "env":
                return _env(options)
            case "doctor":
                return _doctor(options)
            case "models":
                return _models(options)
            case "tenants" | "keys" | "usage":
                return _tenancy(options)
            case _:
                return _complete(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve_app", description="Text completion on Ray Serve.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start a local cluster and serve a cluster file until Ctrl-C")
    up.add_argument("file", nargs="?", default="cluster.yaml", help="what to serve; default: %(default)s")
    up.add_argument("--fast", action="store_true", help="throughput mode: HAProxy in front, gRPC inside")

    down = commands.add_parser("down", help="end the cluster that an earlier `up` of that file left behind")
    down.add_argument("file", nargs="?", default="cluster.yaml", help="what was served; default: %(default)s")

    env = commands.add_parser("env", help="print the environment that a cluster of your own wants, as shell lines")
    env.add_argument("--fast", action="store_true", help="with throughput mode")

    check = commands.add_parser("check", help="validate a cluster file; starts nothing")
    check.add_argument("file", nargs="?", default="cluster.yaml", help="what to validate; default: %(default)s")
    check.add_argument("--fast", action="store_true", help="for throughput mode")

    doctor = commands.add_parser("doctor", help="look at what a running service lets in, and say how to mend it")
    doctor.add_argument("file", nargs="?", default="cluster.yaml", help="what is served; default: %(default)s")
    doctor.add_argument("--url", help="where clients reach it, as behind TLS; default: as in the file")
    doctor.add_argument("--fast", action="store_true", help="for throughput mode")
    doctor.add_argument("--json", action="store_true", help="as JSON")

    add_tenancy(commands)

    models = commands.add_parser("models", help="list what a running service answers to")
    models.add_argument("--url", default=DEFAULT_URL, help="of the service; default: %(default)s")

    complete = commands.add_parser("complete", help="complete a prompt")
    complete.add_argument("prompt")
    complete.add_argument("--model", default="demo", help="default: %(default)s")
    complete.add_argument("--max-tokens", type=int, default=64, help="default: %(default)s")
    complete.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    complete.add_argument("--stream", action="store_true", help="print text as it is generated")
    complete.add_argument("--url", default=DEFAULT_URL, help="of the service; default: %(default)s")
    return parser


def _check(options: argparse.Namespace) -> int:
    from serve_app.check.cluster_file import check_file  # imports Ray, which takes its time

    report = check_file(options.file, is_fast=options.fast)
    print("\n".join(report.lines))
    if options.command == "check":
        print("A cluster that you start yourself wants the environment that `serve_app env` prints; `up` sets it.")
    return 0 if report.is_sound else 1


def _up(options: argparse.Namespace) -> int:
    from serve_app.cli.up import serve_until_interrupted

    return 1 if _check(options) else serve_until_interrupted(options.file, is_fast=options.fast)


def _down(options: argparse.Namespace) -> int:
    from serve_app.cli.down import end_cluster

    return end_cluster(options.file)


def _env(options: argparse.Namespace) -> int:
    from serve_app.cli.environment import shell_lines

    print("\n".join(shell_lines(is_fast=options.fast)))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from serve_app.cli.doctor.report import run  # imports Ray, which takes its time

    text, code = run(options.file, url=options.url, as_json=options.json, is_fast=options.fast)
    print(text)
    return code


def _tenancy(options: argparse.Namespace) -> int:
    from serve_app.cli.tenancy import TenancyFailed, carry_out  # imports SQLAlchemy

    try:
        print(carry_out(options))
    except TenancyFailed as error:
        return _fail(error)
    return 0


def _models(options: argparse.Namespace) -> int:
    from serve_app.cli.client import ServiceFailed, list_models

    try:
        print("\n".join(list_models(options.url)))
    except ServiceFailed as error:
        return _fail(error)
    return 0


def _complete(options: argparse.Namespace) -> int:
    from serve_app.cli.client import ServiceFailed, complete

    body = {
        "model": options.model,
        "prompt": options.prompt,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": options.stream,
    }
    try:
        for text in complete(options.url, body):
            print(text, end="", flush=True)
    except ServiceFailed as error:
        return _fail(error)
    print()
    return 0


def _fail(error: Exception) -> int:
    print(f"serve_app: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
