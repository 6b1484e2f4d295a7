"""Looks at the files of a model and of its adapters, and says of each whether it can be used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath

from serve_app.catalog.adapters import WEIGHTS, read_adapters
from serve_app.catalog.chat_template import chat_template_of
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.models import locate_model, read_model_folder
from serve_app.check.findings import Finding, Path, Severity
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.loading import default_sampling_of, embedding_form_of, engine_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes of memory that a replica takes beside its keys and values.

    own_bytes:     of its processes: libraries, steps, logits
    adapter_bytes: of those that may be resident at once
    """

    weight_bytes: int
    own_bytes: int
    adapter_bytes: int


def check_model(args: ModelArgs, path: Path) -> Iterator[Finding]:
    """Findings of `args.path`, `args.chat_template` and `args.adapters`. Notes: usable adapters, default sampling."""
    from serve_app.engine.errors import ModelNotSupported  # imported here: it brings torch, which takes time

    try:
        needs_of(args)
    except (CatalogError, ModelNotSupported, OSError) as error:
        yield Finding(path=(*path, "path"), message=str(error))
    else:
        yield from _notes(args, (*path, "path"))
    if args.chat_template is not None:
        try:
            chat_template_of(FilePath(), args.chat_template)
        except CatalogError as error:
            yield Finding(path=(*path, "chat_template"), message=str(error))
    if args.adapters is not None:
        yield from _check_adapters(FilePath(args.adapters), (*path, "adapters"))


def _notes(args: ModelArgs, path: Path) -> Iterator[Finding]:
    """What requests that say nothing sample with, and why there are no embeddings where the folder wants others."""
    folder = locate_model(args.path)
    found, form = default_sampling_of(args, folder), embedding_form_of(args, folder)
    sentences = list(found.unheard)
    if form is not None and form.reason is not None:
        sentences.append(f"it has no embeddings: {form.reason}; `pooling: mean` or `last` gives it these")
    if found.values:
        values = ", ".join(f"{name} {value:g}" for name, value in found.values)
        sentences.append(f"its default sampling is {values}; with `default_sampling: none` it is the dialect's")
    for sentence in sentences:
        yield Finding(path=path, message=sentence, severity=Severity.NOTE)


def needs_of(args: ModelArgs) -> Needs:
    """What a replica takes, all of its shards together. To make the model without weights shows what it lacks.

    Raises CatalogError, ModelNotSupported, OSError.
    """
    from serve_app.engine.budget import PROCESS_BYTES, bytes_of_steps  # imported here: torch takes time
    from serve_app.engine.judgement import judge
    from serve_app.engine.shards.division import divide
    from serve_app.engine.weights import weight_bytes_on_cpu

    folder = read_model_folder(locate_model(args.path))
    judged, count = judge(folder.path, with_images=args.images), args.tensor_parallel
    own = PROCESS_BYTES + bytes_of_steps(engine_config(args, folder.path), int(judged.text.vocab_size))
    if count > 1:
        judged = divide(judged, count, weights=args.weights).narrowed(judged)
    weight_bytes = weight_bytes_on_cpu(judged, args.dtype, args.weights)
    return Needs(weight_bytes=count * weight_bytes, own_bytes=count * own, adapter_bytes=_resident_bytes(args))


def _resident_bytes(args: ModelArgs) -> int:
    """The files of as many adapters as may be resident, the largest; only their sizes are looked at."""
    files = [] if args.adapters is None else FilePath(args.adapters).glob(f"*/{WEIGHTS}")
    sizes = (each.stat().st_size for each in files if each.is_file())
    return sum(sorted(sizes, reverse=True)[: args.max_adapters])


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
