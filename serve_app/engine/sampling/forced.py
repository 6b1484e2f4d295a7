"""Forced tokens: a constraint leaves no choice, so the token is known before anything is computed.

A token is forced where the mask of its place would allow it alone, so it is what would be drawn without this, greedy or
not. A forced text could be written in several ways of tokens; the mask allows the one that the tokenizer writes.
"""

from __future__ import annotations

from serve_app.engine.sampling.logprobs import Scored
from serve_app.engine.sampling.stages import next_mu
from serve_app.engine.scheduler.sequence import Sequence


def forced_token(sequence: Sequence) -> int | None:
    """The only token that the constraint allows now, where nothing else forbids it; else the sampler has to see."""
    matcher = sequence.matcher
    if matcher is None or matcher.failure is not None:
        return None
    token_id = matcher.forced
    return None if token_id is None or _is_forbidden(sequence, token_id) else token_id


def waits_for_scores(sequence: Sequence) -> bool:
    """Whether a forced token is shown only when the model has said how likely it was."""
    wanted = sequence.request.logprobs
    return wanted is not None and wanted.top is not None and not wanted.post_sampling


def certain_score(sequence: Sequence, token_id: int) -> Scored | None:
    """Of the distribution that a forced token is drawn from, where that is what is reported."""
    wanted = sequence.request.logprobs
    if wanted is None or wanted.top is None or not wanted.post_sampling:
        return None
    return Scored(token_id, 0.0, ((token_id, 0.0),) if wanted.top else ())


def steer_by_certainty(sequence: Sequence) -> None:
    """Carry Mirostat on over a token without surprise, as its draw would."""
    params, state = sequence.request.sampling, sequence.sampling_state
    if params.mirostat and not params.is_greedy:
        state.mu = next_mu(state.mu, 1.0, tau=params.mirostat_tau, eta=params.mirostat_eta)


def hold(sequence: Sequence, token_id: int) -> bool:
    """Append a forced token whose score is waited for.

    Return False, and change nothing, if a drawn token has to be the last: the text, or what may be generated, ends with
    it.
    """
    matcher = sequence.matcher
    assert matcher is not None, f"{sequence} is not constrained"
    if sequence.num_generated + 1 >= sequence.max_tokens:
        return False
    matcher.advance(token_id)
    if matcher.is_complete or matcher.failure is not None:
        matcher.go_back(1)
        return False
    sequence.token_ids.append(token_id)
    sequence.num_held += 1
    return True


def _is_forbidden(sequence: Sequence, token_id: int) -> bool:
    """By the bans and the like; however many there are of these, it is asked for every forced token."""
    state, stop = sequence.sampling_state, sequence.request.stop
    bad_words = state.bad_words
    if state.allowed and token_id not in state.allowed:
        return True
    if sequence.num_generated < stop.min_tokens and token_id in stop.token_ids:
        return True
    if token_id in state.biased:
        return True  # a ban, or what is as good as one
    if bad_words is None:
        return False
    return token_id in bad_words.completions(sequence.token_ids, num_generated=sequence.num_generated)
