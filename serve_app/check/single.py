"""Says of one folder, a model's or an adapter's, whether it can be served; loads no weights and starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.catalog.adapters import CONFIG, read_adapter, read_records
from serve_app.catalog.defaults import chat_templates_of, read_default_sampling
from serve_app.catalog.files import CatalogError
from serve_app.catalog.models import locate_model, read_model_folder
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.loading import engine_config

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
    """A base model, in the numbers that it would be loaded in."""
    from serve_app.engine.decoder.loading import rehearse
    from serve_app.engine.decoder.text_part import ModelNotSupported  # imported here: it brings torch, which takes time

    try:
        folder = read_model_folder(locate_model(path))
        templates = chat_templates_of(folder.path, None)
        found = rehearse(
            engine_config(ModelArgs.model_validate({"name": "model", "path": path, "dtype": dtype}), folder.path)
        )
    except (CatalogError, ModelNotSupported, OSError) as error:
        return FolderReport(name=path, facts={}, reason=str(error))
    judged = found.checked
    facts: dict[str, object] = {
        "family": judged.config.model_type,
        "max_model_len": judged.max_model_len,
        "weight_bytes": found.num_bytes,
        "has_chat_template": bool(templates),
        "default_sampling": dict(read_default_sampling(folder.path).values),
        "sees": judged.vision is not None and not isinstance(judged.vision, str),
    }
    return FolderReport(name=path, facts=facts, notes=found.notes)


def check_adapters(path: str, model: str | None = None) -> list[FolderReport]:
    """One adapter, or each in a folder of them; beside a model also whether they fit it.

    Raises CatalogError where there is no such folder, nothing in it, or the model is none.
    """
    folder = Path(path).expanduser()
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
