"""Looks at the files of a model and of its adapters, and says of each whether it can be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from serve_app.catalog.adapters import WEIGHTS, read_records
from serve_app.catalog.defaults import chat_templates_of
from serve_app.catalog.files import CatalogError
from serve_app.catalog.models import locate_model, read_model_folder
from serve_app.check.document import Finding, Path, Severity
from serve_app.check.single import judged_adapters
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.loading import default_sampling_of, embedding_form_of, engine_config

if TYPE_CHECKING:
    from serve_app.core.cards import AdapterRecord
    from serve_app.engine.lora.adapter import Adapter


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
    from serve_app.engine.decoder.loading import rehearse
    from serve_app.engine.decoder.text_part import ModelNotSupported  # imported here: it brings torch, which takes time

    is_sound = True
    try:
        folder = read_model_folder(locate_model(args.path))
        if args.chat_template is None:
            chat_templates_of(folder.path, None)
        found = rehearse(engine_config(args, folder.path))
        own = found.checked.max_model_len
        if args.max_model_len is not None and own is not None and args.max_model_len > own:
            message = f"must be at most {own}, the model's own context, or left out; found {args.max_model_len}"
            yield Finding(path=(*path, "max_model_len"), message=message)
    except (CatalogError, ModelNotSupported, OSError) as error:
        is_sound = False
        yield Finding(path=(*path, "path"), message=str(error))
    else:
        yield from (Finding(path=(*path, "path"), message=note, severity=Severity.NOTE) for note in found.notes)
        yield from _notes(args, (*path, "path"))
    if args.chat_template is not None:
        try:
            chat_templates_of(FilePath(), args.chat_template)
        except CatalogError as error:
            yield Finding(path=(*path, "chat_template"), message=str(error))
    if args.adapters_folder is not None:
        yield from _check_adapters(args, args.adapters_folder, (*path, "adapters"), is_sound=is_sound)


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


def check_device(args: ModelArgs, path: Path, *, severity: Severity) -> Iterator[Finding]:
    """Yield what the replica would say of its device on this machine."""
    from serve_app.engine.decoder.loading import choose_device
    from serve_app.engine.decoder.text_part import ModelNotSupported  # imported here: it brings torch, which takes time

    if args.device == "cuda":
        try:
            choose_device(args.device)
        except ModelNotSupported as error:
            message = f"{error}, here; write `device: cpu`, or `auto`"
            yield Finding(path=(*path, "device"), message=message, severity=severity)


def needs_of(args: ModelArgs) -> Needs:
    """What a replica takes, all of its shards together.

    Raises CatalogError, ModelNotSupported, OSError.
    """
    from serve_app.engine.decoder.config_check import check_config, weight_bytes_on_cpu
    from serve_app.engine.kv.budget import PROCESS_BYTES, bytes_of_steps  # imported here: torch takes time
    from serve_app.engine.tensor_parallel.division import divide

    folder = read_model_folder(locate_model(args.path))
    judged, count = check_config(folder.path, with_images=args.images), args.tensor_parallel
    own = PROCESS_BYTES + bytes_of_steps(engine_config(args, folder.path), int(judged.text.vocab_size))
    if count > 1:
        judged = divide(judged, count, weights=args.weights).narrowed(judged)
    weight_bytes = weight_bytes_on_cpu(judged, args.dtype, args.weights)
    return Needs(weight_bytes=count * weight_bytes, own_bytes=count * own, adapter_bytes=_resident_bytes(args))


def _resident_bytes(args: ModelArgs) -> int:
    """What the file sets aside, or the files of as many adapters as may be resident, by their sizes alone."""
    if isinstance(args.adapter_bytes, int):
        return args.adapter_bytes
    files = [] if args.adapters_folder is None else args.adapters_folder.glob(f"*/{WEIGHTS}")
    sizes = (each.stat().st_size for each in files if each.is_file())
    return sum(sorted(sizes, reverse=True)[: args.max_adapters])


def _check_adapters(args: ModelArgs, folder: FilePath, path: Path, *, is_sound: bool) -> Iterator[Finding]:
    """is_sound: whether the model can be asked if they fit it"""
    if args.watches_adapters:
        message = f"is watched: while the service runs, a router publishes each complete folder below {str(folder)!r}"
        yield Finding(path=path, message=message, severity=Severity.NOTE)
    try:
        records = read_records(folder)
    except CatalogError as error:
        yield Finding(path=path, message=str(error))
        return
    judged = _judged(args, records) if is_sound and records else {}
    for record in records:
        found = judged.get(record.name) or record.reason
        if isinstance(found, str):
            yield Finding(path=path, message=f"adapter {record.name}: refused, {found}", severity=Severity.WARNING)
            continue
        rank = record.card().rank if found is None else found.rank
        message = f"adapter {record.name}: OK, rank {rank}, version {record.version[:12]}"
        yield Finding(path=path, message=message, severity=Severity.NOTE)
        for note in () if found is None else found.notes:
            yield Finding(path=path, message=f"adapter {record.name}: {note}", severity=Severity.NOTE)


def _judged(args: ModelArgs, records: Sequence[AdapterRecord]) -> dict[str, Adapter | str]:
    return judged_adapters(
        records, args.path, dtype=args.dtype, images=args.images, tensor_parallel=args.tensor_parallel
    )
