"""Looks at folders of models and adapters, and says of each whether it can be used; loads no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from serve_app.backends.vllm.options import outlook, wrong_settings
from serve_app.catalog.adapters import CONFIG, WEIGHTS, read_adapter, read_records
from serve_app.catalog.defaults import chat_templates_of, read_default_sampling
from serve_app.catalog.files import CatalogError
from serve_app.catalog.models import locate_model, read_model_folder
from serve_app.check.document import Finding, Path, Severity
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.loading import default_sampling_of, embedding_form_of, engine_config

if TYPE_CHECKING:
    from serve_app.core.cards import AdapterRecord
    from serve_app.engine.lora.adapter import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport:
    """reason: why it cannot be served; None where it can;  facts: what is worth knowing of it, by name

    notes: what its files say that changes nothing
    """

    name: str
    facts: dict[str, object]
    reason: str | None = None
    notes: tuple[str, ...] = ()


def check_model_folder(path: str, *, dtype: str) -> FolderReport:
    """A base model, in the numbers that it would be loaded in, and which engine is advised for it."""
    from serve_app.engine.decoder.loading import rehearse
    from serve_app.engine.decoder.text_part import ModelNotSupported  # imported here: it brings torch, which takes time

    try:
        folder = read_model_folder(locate_model(path))
        templates = chat_templates_of(folder.path, None)
        found = rehearse(
            engine_config(ModelArgs.model_validate({"name": "model", "path": path, "dtype": dtype}), folder.path)
        )
    except ModelNotSupported as error:
        has, why = outlook(folder.path)
        if has:
            return FolderReport(name=path, facts={"engine": "vllm"}, notes=(f"our engine refuses it: {error}", why))
        return FolderReport(name=path, facts={}, reason=str(error), notes=(f"with `engine: vllm`: {why}",))
    except (CatalogError, OSError) as error:
        return FolderReport(name=path, facts={}, reason=str(error))
    judged = found.checked
    engine_note = f"`engine: own` is advised: it carries out every parameter. {outlook(folder.path)[1]}"
    facts: dict[str, object] = {
        "engine": "own",
        "family": judged.config.model_type,
        "max_model_len": judged.max_model_len,
        "weight_bytes": found.num_bytes,
        "has_chat_template": bool(templates),
        "default_sampling": dict(read_default_sampling(folder.path).values),
        "sees": judged.vision is not None and not isinstance(judged.vision, str),
    }
    return FolderReport(name=path, facts=facts, notes=(*found.notes, engine_note))


def check_adapters(path: str, model: str | None = None) -> list[FolderReport]:
    """One adapter, or each in a folder of them; beside a model also whether they fit it.

    Raises CatalogError where there is no such folder, nothing in it, or the model is none.
    """
    folder = FilePath(path).expanduser()
    if not folder.is_dir():
        raise CatalogError(f"{path!r} is no folder")
    is_one = (folder / CONFIG).exists()
    records = (read_adapter(folder.resolve(), root=folder.resolve()),) if is_one else read_records(folder)
    if not records:
        raise CatalogError(f"{path!r} holds no adapter: neither {CONFIG} nor folders with one")
    judged = {} if model is None else judged_adapters(records, model)
    return [_report(record, judged.get(record.name)) for record in records]


def judged_adapters(
    records: Sequence[AdapterRecord], model: str, *, dtype: str = "auto", images: bool = True, tensor_parallel: int = 1
) -> dict[str, Adapter | str]:
    """Say of adapters, by name, what a replica of that model binds them to, or its reason to refuse them.

    Raises CatalogError where the model is none.
    """
    from serve_app.engine.decoder.text_part import ModelNotSupported
    from serve_app.engine.lora.registration import judge_adapters

    path = read_model_folder(locate_model(model)).path
    try:
        return judge_adapters(records, path, dtype=dtype, images=images, tensor_parallel=tensor_parallel)
    except (ModelNotSupported, OSError) as error:
        raise CatalogError(str(error)) from error


def _report(record: AdapterRecord, found: Adapter | str | None) -> FolderReport:
    """found: what it is bound to, or why not; None where no model was asked"""
    base = record.fields.get("base_model_name_or_path")
    facts: dict[str, object] = {"rank": record.card().rank, "version": record.version}
    facts |= {"made_for": base} if isinstance(base, str) and base else {}
    if found is None or isinstance(found, str):
        notes = () if found or record.reason else ("whether it fits a model is said with --model FOLDER",)
        return FolderReport(name=record.name, facts=facts, reason=found or record.reason, notes=notes)
    facts |= {"rank": found.rank, "num_modules": len(found.changes)}
    return FolderReport(name=record.name, facts=facts, notes=found.notes)


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
    from serve_app.engine.decoder.text_part import ModelNotSupported  # imported here: it brings torch, which takes time

    is_sound = True
    try:
        folder = read_model_folder(locate_model(args.path))
        if args.chat_template is None:
            chat_templates_of(folder.path, None)
        if args.engine == "vllm":
            is_sound = False  # vLLM judges model and adapters when it loads them
            yield from (Finding(path=(*path, name), message=wrong) for name, wrong in wrong_settings(args))
        else:
            yield from _rehearsed(args, folder.path, path)
    except (CatalogError, ModelNotSupported, OSError) as error:
        is_sound = False
        yield Finding(path=(*path, "path"), message=str(error))
    else:
        yield from _notes(args, (*path, "path"))
    if args.chat_template is not None:
        try:
            chat_templates_of(FilePath(), args.chat_template)
        except CatalogError as error:
            yield Finding(path=(*path, "chat_template"), message=str(error))
    if args.adapters_folder is not None:
        yield from _check_adapters(args, args.adapters_folder, (*path, "adapters"), is_sound=is_sound)


def _rehearsed(args: ModelArgs, folder: FilePath, path: Path) -> Iterator[Finding]:
    """What our engine says of a model without loading its weights. Raises ModelNotSupported."""
    from serve_app.engine.decoder.loading import rehearse

    found = rehearse(engine_config(args, folder))
    own = found.checked.max_model_len
    if args.max_model_len is not None and own is not None and args.max_model_len > own:
        message = f"must be at most {own}, the model's own context, or left out; found {args.max_model_len}"
        yield Finding(path=(*path, "max_model_len"), message=message)
    yield from (Finding(path=(*path, "path"), message=note, severity=Severity.NOTE) for note in found.notes)


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
    judged = {}
    if is_sound and records:
        judged = judged_adapters(
            records, args.path, dtype=args.dtype, images=args.images, tensor_parallel=args.tensor_parallel
        )
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
