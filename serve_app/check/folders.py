"""Looks at the files of a model and of its adapters, and says of each whether it can be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath

from serve_app.catalog.adapters import read_adapters
from serve_app.catalog.chat_template import chat_template_of
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.models import locate_model, read_model_folder
from serve_app.check.findings import Finding, Path, Severity
from serve_app.deployments.arguments import ModelArgs


def check_model(args: ModelArgs, path: Path) -> Iterator[Finding]:
    """Findings of `args.path`, `args.chat_template` and `args.adapters`; usable adapters are notes."""
    from serve_app.engine.errors import ModelNotSupported  # imported here: it brings torch, which takes time

    try:
        weights_of(args)
    except (CatalogError, ModelNotSupported, OSError) as error:
        yield Finding(path=(*path, "path"), message=str(error))
    if args.chat_template is not None:
        try:
            chat_template_of(FilePath(), args.chat_template)
        except CatalogError as error:
            yield Finding(path=(*path, "chat_template"), message=str(error))
    if args.adapters is not None:
        yield from _check_adapters(FilePath(args.adapters), (*path, "adapters"))


def weights_of(args: ModelArgs) -> int:
    """The bytes that its weights take once loaded, in all of its shards. To make it without them shows what it lacks.

    Raises CatalogError, ModelNotSupported, OSError.
    """
    from serve_app.engine.judgement import judge  # imported here: it brings torch, which takes time
    from serve_app.engine.shards.division import divide
    from serve_app.engine.weights import weight_bytes_on_cpu

    folder = read_model_folder(locate_model(args.path))
    judged, count = judge(folder.path, with_images=args.images), args.tensor_parallel
    if count > 1:
        judged = divide(judged, count, weights=args.weights).narrowed(judged)
    return count * weight_bytes_on_cpu(judged, args.dtype, args.weights)


def _check_adapters(folder: FilePath, path: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding(path=path, message=f"{str(folder)!r} is no folder")
        return
    for card in read_adapters(folder):
        if card.is_usable:
            message = f"adapter {card.name}: OK, rank {card.rank}, version {card.version[:12]}"
            yield Finding(path=path, message=message, severity=Severity.NOTE)
        else:
            yield Finding(path=path, message=f"adapter {card.name}: refused, {card.reason}", severity=Severity.WARNING)
