"""Decides by a model's folder, before any weight is read, whether its images are taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor

from serve_app.engine.vision.kinds import KINDS, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a model sees. processor: transformers' own, which makes of an image what the tower takes"""

    kind: Kind
    processor: Any


def judge_sight(config: Any, path: str | Path, *, is_wanted: bool = True) -> Sight | str | None:
    """How the model sees, or why it does not here; None for a model that has no eyes.

    is_wanted: as its operator has configured it
    """
    if getattr(config, "vision_config", None) is None:
        return None
    if not is_wanted:
        return "its operator has switched images off"
    kind = KINDS.get(config.model_type)
    if kind is None:
        return f"images of {config.model_type} are not supported, its text is"
    if (fault := kind.fault(config)) is not None:
        return f"{config.model_type}: {fault}"
    try:
        processor = AutoImageProcessor.from_pretrained(
            path, config=config, local_files_only=True, trust_remote_code=False, backend="pil"
        )
    except (OSError, ValueError, TypeError, ImportError) as error:
        return f"its folder has no image processor that can be used: {str(error).strip().splitlines()[0][:200]}"
    return Sight(kind=kind, processor=processor)
