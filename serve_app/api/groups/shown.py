"""What is returned, and how."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.numbers import CountOrFlag, Integer
from serve_app.api.forms.plain import Members, Text
from serve_app.api.forms.shared import CANDIDATES, COUNT, FLAG
from serve_app.api.stream_options import StreamOptions

MAX_PROMPT_LOGPROBS = 20
MAX_REQUEST_ID_CHARS = 256


class Shown(BaseModel):
    """What a client sees of a completion: as a stream or whole, with what beside its text.

    response_fields: of llama.cpp's own results, which alone have them
    """

    stream: Annotated[bool, Parameter(FLAG, "Sends server-sent events as the text is generated.")] = False
    stream_options: Annotated[
        StreamOptions,
        Parameter(Members(tuple(StreamOptions.model_fields)), "What a stream reports beside text."),
    ] = StreamOptions()
    echo: Annotated[bool, Parameter(FLAG, "The prompt comes before the completion.")] = False
    echo_last: Annotated[int, Parameter(COUNT, "So many last tokens of the prompt come before the completion.")] = 0
    logprobs: Annotated[
        int | None,
        Parameter(
            CountOrFlag(count=CANDIDATES), "So many likeliest tokens with their log-probabilities for each position."
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Parameter(
            Integer(low=0, high=lambda terms: max(MAX_PROMPT_LOGPROBS, terms.max_logprobs)),
            "So many likeliest tokens at each position of the prompt, with its own, their log-probabilities and ranks.",
        ),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool, Parameter(FLAG, "Tokens in `logprobs` are written as `token_id:` and their number.")
    ] = False
    post_sampling_probs: Annotated[
        bool, Parameter(FLAG, "Log-probabilities of the distribution that tokens were drawn from.")
    ] = False
    skip_special_tokens: Annotated[bool, Parameter(FLAG, "Whether tokens like the end of text are left out of it.")] = (
        True
    )
    return_token_ids: Annotated[bool, Parameter(FLAG, "The token ids of prompt and completion are returned.")] = False
    request_id: Annotated[
        str | None,
        Parameter(Text(min_chars=1, max_chars=lambda terms: MAX_REQUEST_ID_CHARS), "What follows `cmpl-` in `id`."),
    ] = None
    return_cached_tokens_details: Annotated[
        bool, Parameter(FLAG, "How much of the prompt was cached, and where, is returned.")
    ] = False
    response_fields: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()
    timings_per_token: Annotated[bool, Parameter(FLAG, "Timings are returned.")] = False
