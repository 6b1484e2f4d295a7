"""How each token is chosen."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.numbers import Integer, Real
from serve_app.api.forms.samplers import Samplers
from serve_app.api.forms.shared import COUNT, FLAG, FRACTION, PENALTY, RATE, SHARE, STRENGTH, WINDOW, WORDS
from serve_app.api.forms.strings import Breakers
from serve_app.api.forms.tokens import AllowedIds, LogitBias
from serve_app.api.limits import INT32_MAX, INT64_MAX
from serve_app.core.request import DRY_ALLOWED_LENGTH, DRY_BASE, SamplerName


class Sampling(BaseModel):
    """The chain of samplers, the penalties and the seed.

    A None says: seed is to be drawn; repeat_last_n has no window at all; mirostat was not sent; samplers run, and
    temperature stands, in the dialect's order.
    """

    temperature: Annotated[
        float, Parameter(Real(low=0, high=2), "Divides the logits; 0 takes the likeliest token.")
    ] = 1.0
    top_p: Annotated[
        float,
        Parameter(
            Real(low=0, high=1, besides="; 0 keeps the likeliest token alone"),
            "Keeps the smallest likeliest set whose probability reaches it.",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            Integer(
                low=-1,
                high=lambda terms: terms.dialect.max_top_k,
                besides="; 0 and -1 keep every token",
                read_as={-1: 0},
            ),
            "Keeps so many likeliest tokens.",
        ),
    ] = 0
    min_p: Annotated[
        float, Parameter(FRACTION, "Keeps tokens of at least this share of the likeliest one's probability.")
    ] = 0.0
    seed: Annotated[
        int | None,
        Parameter(
            Integer(low=-INT64_MAX - 1, high=INT64_MAX, besides="; -1 is a random one", read_as={-1: None}),
            "Decides every draw, so that a completion can be asked for again.",
        ),
    ] = None
    typical_p: Annotated[
        float, Parameter(SHARE, "Keeps the smallest set of tokens of typical surprise that reaches it; 1 keeps all.")
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Parameter(
            Real(high=INT32_MAX, besides="; 0 or less keeps every token"),
            "Keeps logits within so many standard deviations of the highest.",
        ),
    ] = -1.0
    min_keep: Annotated[int, Parameter(COUNT, "Tokens that each truncation leaves at least.")] = 0
    samplers: Annotated[
        tuple[SamplerName, ...] | None, Parameter(Samplers(), "What chooses the token, in this order.")
    ] = None
    temperature_last: Annotated[
        bool | None, Parameter(FLAG, "Whether temperature comes after truncation, where `samplers` was not sent.")
    ] = None
    dynatemp_range: Annotated[
        float, Parameter(STRENGTH, "The temperature moves by so much with the entropy; 0 is off.")
    ] = 0.0
    dynatemp_exponent: Annotated[float, Parameter(STRENGTH, "How the temperature follows the entropy.")] = 1.0
    presence_penalty: Annotated[float, Parameter(PENALTY, "Taken once from the logit of every token seen.")] = 0.0
    frequency_penalty: Annotated[float, Parameter(PENALTY, "Taken from a token's logit as often as it was seen.")] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            Real(
                low=0,
                high=lambda terms: terms.dialect.max_repetition_penalty,
                besides="; what is below 0.01 counts as 0.01",
            ),
            "Divides positive logits of tokens seen and multiplies negative ones; 1 is off.",
        ),
    ] = 1.0
    repeat_last_n: Annotated[
        int | None, Parameter(WINDOW, "The three penalties see so many last tokens; 0 switches them off.")
    ] = None
    logit_bias: Annotated[
        tuple[tuple[int | str, float], ...],
        Parameter(LogitBias(), "Added to the logits of these tokens, at most 100 either way; false bans."),
    ] = ()
    allowed_token_ids: Annotated[
        tuple[int, ...] | None,
        Parameter(AllowedIds(), "Only these tokens are drawn, the end of text among them or never."),
    ] = None
    bad_words: Annotated[
        tuple[str, ...], Parameter(WORDS, "The last token of each is not drawn behind the tokens before it.")
    ] = ()
    mirostat: Annotated[
        int | None,
        Parameter(Integer(low=0, high=2), "The version of Mirostat that takes the place of other samplers; 0 is none."),
    ] = None
    mirostat_tau: Annotated[float, Parameter(RATE, "Mirostat's target surprise, in bits.")] = 5.0
    mirostat_eta: Annotated[float, Parameter(RATE, "Mirostat's learning rate.")] = 0.1
    dry_multiplier: Annotated[
        float, Parameter(STRENGTH, "How much DRY takes from tokens that would continue a repetition; 0 is off.")
    ] = 0.0
    dry_base: Annotated[
        float, Parameter(STRENGTH, f"How fast that grows with the length of the repetition; below 1 is {DRY_BASE}.")
    ] = DRY_BASE
    dry_allowed_length: Annotated[int, Parameter(COUNT, "Shorter repetitions are free.")] = DRY_ALLOWED_LENGTH
    dry_sequence_breakers: Annotated[
        tuple[str, ...], Parameter(Breakers(), "Texts across which no repetition is followed.")
    ] = ("\n", ":", '"', "*")
    dry_penalty_last_n: Annotated[int, Parameter(WINDOW, "DRY sees so many last tokens.")] = -1
    xtc_probability: Annotated[
        float, Parameter(FRACTION, "How often XTC drops all but the least likely of the tokens above its threshold.")
    ] = 0.0
    xtc_threshold: Annotated[
        float, Parameter(FRACTION, "The probability that XTC asks of a token; above 0.5 is off.")
    ] = 0.1
