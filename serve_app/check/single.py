"""Says of one folder, a model's or an adapter's, whether it can be served; loads no weights and starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.catalog.adapters import CONFIG, read_adapter, read_records
from serve_app.catalog.chat_template import chat_template_of
from serve_app.catalog.errors import CatalogError
from serve_app.catalog.models import locate_model, read_model_folder
from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.loading import engine_config

if TYPE_CHECKING:
    from serve_app.core.adapters import AdapterRecord


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
    from serve_app.engine.errors import ModelNotSupported  # imported here: it brings torch, which takes time
    from serve_app.engine.loading import rehearse

    try:
        folder = read_model_folder(locate_model(path))
        template = chat_template_of(folder.path, None)
        found = rehearse(
            engine_config(ModelArgs.model_validate({"name": "model", "path": path, "dtype": dtype}), folder.path)
        )
    except (CatalogError, ModelNotSupported, OSError) as error:
        return FolderReport(name=path, facts={}, reason=str(error))
    judged = found.judged
    facts: dict[str, object] = {
        "family": judged.config.model_type,
        "max_model_len": judged.max_model_len,
        "weight_bytes": found.num_bytes,
        "has_chat_template": bool(template),
        "sees": judged.sight is not None and not isinstance(judged.sight, str),
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
    module = None if model is None else _module_of(model)
    return [_report(record, module) for record in records]


def _report(record: AdapterRecord, module: Any) -> FolderReport:
    facts: dict[str, object] = {"rank": record.rank, "version": record.version, "num_modules": len(record.changes)}
    reason = record.reason if record.reason is not None or module is None else _misfit(record, module)
    return FolderReport(name=record.name, facts=facts, reason=reason)


def _misfit(record: AdapterRecord, module: Any) -> str | None:
    """Why it does not fit the model; None where it does."""
    from serve_app.engine.lora.adapter import bind_adapter
    from serve_app.engine.lora.errors import AdapterRefused

    try:
        bind_adapter(record, module)
    except AdapterRefused as error:
        return str(error)
    return None


def _module_of(model: str) -> Any:
    """The model's shapes without its numbers. Raises CatalogError."""
    from serve_app.engine.errors import ModelNotSupported
    from serve_app.engine.judgement import judge
    from serve_app.engine.weights import shapes_of

    try:
        return shapes_of(judge(read_model_folder(locate_model(model)).path))
    except (ModelNotSupported, OSError) as error:
        raise CatalogError(str(error)) from error
