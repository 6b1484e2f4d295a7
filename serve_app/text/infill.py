"""Arranges a prompt with a gap in tokens: project, prefix, suffix, middle, each between its markers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from serve_app.core.prompt import Infill, Prompt
from serve_app.text.fast_tokenizer import Markers
from serve_app.text.tokenizer import TextTokenizer

# as llama.cpp writes them, for models that were trained on whole repositories
PROJECT = "myproject\n"
OPEN_FILE = "filename\n"
SNIPPET = "\n\n--- snippet ---\n\n"
"""Between files, for a model that has no token for it."""
SUFFIX_SHARE = 4
"""Of what is left for prefix and suffix, the suffix has the right to one part in so many."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The parts of a prompt with a gap.

    leading: what the tokenizer puts before a prompt;  files: other files, with their names and separators
    """

    markers: Markers
    leading: Ids
    files: Ids
    prefix: Ids
    suffix: Ids
    opening: Ids

    @property
    def token_ids(self) -> list[int]:
        markers = self.markers
        before = (*self.leading, *self.files, markers.prefix)
        return [*before, *self.prefix, markers.suffix, *self.suffix, markers.middle, *self.opening]

    @property
    def shown(self) -> range:
        """Where the prefix stands among the tokens."""
        start = len(self.leading) + len(self.files) + 1
        return range(start, start + len(self.prefix))

    def fitted(self, num_tokens: int) -> Gap:
        """Return the same gap in at most so many tokens, as far as what has to stay allows.

        Prefix and suffix are taken three to one, nearest to the gap first; what one of them leaves is the other's.
        The files have the rest, the last of them first.
        """
        room = max(0, num_tokens - (len(self.leading) + len(self.opening) + 3))
        num_suffix = min(len(self.suffix), max(room // SUFFIX_SHARE, room - len(self.prefix)))
        num_prefix = min(len(self.prefix), room - num_suffix)
        return replace(
            self,
            files=_last(self.files, room - num_suffix - num_prefix),
            prefix=_last(self.prefix, num_prefix),
            suffix=self.suffix[:num_suffix],
        )


def arrange(tokenizer: TextTokenizer, prompt: Prompt, infill: Infill) -> Gap:
    """Cut a gap's texts into tokens. Names of special tokens in them are text; what is control is in ids.

    Raises InvalidRequest for a token id outside the vocabulary.
    """
    markers = tokenizer.markers
    assert markers is not None, "only a model with markers is asked to fill a gap"
    starts_with_text = not prompt.parts or isinstance(prompt.parts[0], str)
    return Gap(
        markers=markers,
        leading=tokenizer.prefix_ids if starts_with_text else (),
        files=_files(tokenizer, markers, infill),
        prefix=tokenizer.encode_parts(prompt),
        suffix=tokenizer.encode_inside(infill.suffix),
        opening=tokenizer.encode_inside(infill.opening),
    )


def _files(tokenizer: TextTokenizer, markers: Markers, infill: Infill) -> Ids:
    if not infill.files:
        return ()
    ids: list[int] = []
    if markers.repository is not None and markers.separator is not None:
        ids += (markers.repository, *tokenizer.encode_literal(PROJECT))
    for file in infill.files:
        ids += _heading(tokenizer, markers, file.name)
        ids += tokenizer.encode_literal(file.text)
    if markers.separator is not None:
        ids += (markers.separator, *tokenizer.encode_literal(OPEN_FILE))
    return tuple(ids)


def _heading(tokenizer: TextTokenizer, markers: Markers, name: str) -> Ids:
    if markers.separator is None:
        return tokenizer.encode_literal(SNIPPET)
    return (markers.separator, *tokenizer.encode_literal(f"{name}\n"))


def _last(ids: Ids, count: int) -> Ids:
    return ids[len(ids) - count :] if count < len(ids) else ids
