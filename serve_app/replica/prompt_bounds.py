"""Refuses long texts by the tokens of their beginnings, before all of them is cut into tokens."""

from __future__ import annotations

from serve_app.core.cards import PromptLength
from serve_app.core.request import GenerationRequest
from serve_app.text.tokenizer import TextTokenizer

# Of a text longer than this many characters per token of the context, the beginning is counted first. What stands
# behind a place in a text changes the tokens before it only nearby; half of them is more than it ever takes back.
HEAD_CHARS_PER_TOKEN = 16
HEAD_MARGIN = 2


def check_heads(request: GenerationRequest, tokenizer: TextTokenizer, length: PromptLength) -> None:
    """Count the beginning of each long text, and raise ContextOverflow where it leaves the rest no chance."""
    if request.context.takes_any_length:
        return
    num_head = HEAD_CHARS_PER_TOKEN * length.max_model_len
    for text in request.texts:
        if len(text) > num_head:
            num_tokens = tokenizer.count(text[:num_head])
            if num_tokens > HEAD_MARGIN * length.max_model_len:
                found = f"has {len(text)} characters, of which {num_head} alone are {num_tokens} tokens"
                raise length.overflow(request, found, {"n_prompt_chars": len(text)})
