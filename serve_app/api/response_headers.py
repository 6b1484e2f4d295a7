"""Headers that tell a client what its body does not: what was ignored, drawn, chosen, cut and not enforced."""

from __future__ import annotations

from urllib.parse import quote

from serve_app.api.completion import CompletionRequest
from serve_app.core.delta import Usage

IGNORED = "x-ignored-parameters"
SEED = "x-seed"
SUFFIX_MODE = "x-suffix-mode"
TOOL_PROMPT = "x-tool-prompt"
TRUNCATED = "x-truncated-prompt-tokens"
UNENFORCED = "x-unenforced-formats"
MAX_NAME_CHARS = 64
MAX_NAMES_CHARS = 1000


def response_headers(request: CompletionRequest, usage: Usage | None = None) -> list[tuple[bytes, bytes]]:
    """What is known by now; `usage` is None before anything was computed."""
    headers = []
    if request.ignored_parameters:
        headers.append((IGNORED, ignored_names(request.ignored_parameters)))
    if request.seed is not None:
        headers.append((SEED, str(request.seed)))
    if request.suffix_mode is not None and (request.suffix or request.gap is not None):
        headers.append((SUFFIX_MODE, request.suffix_mode.value))
    if request.has_default_tool_prompt:
        headers.append((TOOL_PROMPT, "default"))
    if usage is not None and usage.truncated_tokens:
        headers.append((TRUNCATED, str(usage.truncated_tokens)))
    if usage is not None and usage.unenforced_formats:
        headers.append((UNENFORCED, ignored_names(usage.unenforced_formats)))
    return [(name.encode(), value.encode()) for name, value in headers]


def ignored_names(names: tuple[str, ...]) -> str:
    """The names in ASCII, percent-encoded where needed, each shortened, and `+n` for those that find no place."""
    shown: list[str] = []
    num_chars = 0
    for name in names:
        quoted = quote(name[:MAX_NAME_CHARS], safe="[]", errors="replace")[: 2 * MAX_NAME_CHARS]
        num_chars += len(quoted) + 2
        if num_chars > MAX_NAMES_CHARS:
            return ", ".join([*shown, f"+{len(names) - len(shown)}"])
        shown.append(quoted)
    return ", ".join(shown)
