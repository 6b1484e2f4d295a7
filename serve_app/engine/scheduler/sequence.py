"""A sequence is one completion being generated. A span is the part of it that one step computes."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import ne

from serve_app.constraints.vocabulary import Matcher
from serve_app.core.delta import Delta, Finish, FinishReason, TokenLogprob
from serve_app.core.request import GenerationRequest
from serve_app.engine.decoder.record import Record
from serve_app.engine.kv.storage import Holding
from serve_app.engine.lora.plan import Mix
from serve_app.engine.sampling.state import SamplingState
from serve_app.engine.scheduler.policy import NONE_BEYOND, Beyond
from serve_app.engine.vision.images import PlacedImages
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.stops import Ending


@dataclass(slots=True)
class Place:
    """What a sequence has while it runs, and its turns. `scheduler/` alone writes it.

    holding:             its part of the key/value store while it runs, else None
    mix:                 its adapters' slots while they are pinned, each with its factor; () for the base
    arrived_at, started_at: when it came, and first began
    passed_over_at:      since when others begin before it, as it lacks something
    num_cached_tokens:   of its prompt, found when it first began
    is_prompt_published: whether others can find its prompt's blocks
    """

    holding: Holding | None = None
    mix: Mix = ()
    arrived_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    passed_over_at: float | None = None
    num_cached_tokens: int = 0
    is_prompt_published: bool = False


@dataclass(slots=True)
class Shown:
    """What a client was shown of a sequence, and what waits to be. `sampling/output.py` alone writes it.

    ending:             finds stop strings in the text
    prompt:             where the prompt that is echoed stands among the tokens; of a gap that is its prefix alone
    num_dropped_tokens: of the prompt's beginning, which are not among the tokens
    first_token_at:     when its first token came, where its time is limited
    prompt_logprobs:    of prompt tokens that were scored so far
    logprobs:           of tokens whose text waits
    deltas:             that wait to be passed on together
    """

    detokenizer: Detokenizer
    ending: Ending
    prompt: range
    num_dropped_tokens: int = 0
    num_chars: int = 0
    first_token_at: float | None = None
    is_prompt_reported: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)


@dataclass(slots=True)
class Spent:
    """What a sequence cost. `accounting.py` alone writes it, and the verification of guesses its guesses.

    engine_ns:                  its part of the steps' time
    num_counted, is_prompt_counted: generated tokens, and whether its prompt, that are in its flow's account
    num_drafted, num_accepted:  guesses that were computed with its tokens, and those of them that were drawn
    """

    engine_ns: int = 0
    num_counted: int = 0
    is_prompt_counted: bool = False
    num_drafted: int = 0
    num_accepted: int = 0


class Sequence:
    """A prompt and what has been generated after it.

    There is no phase: a sequence has `num_tokens` tokens of which `num_computed` have keys and values, and it
    catches up. It may be sampled when nothing but its next token is missing. Preemption sets `num_computed` back and
    leaves all else as it is.

    max_tokens: bound on generated tokens, the context's end considered
    matcher:    follows what was generated along the request's constraint, if any
    illustration: the images of its prompt, if any
    record:     what of its positions is kept for its client, if anything
    prediction: tokens that its client expects it to generate
    sampling_state: what sampling remembers of its tokens
    num_held:   of its last tokens, which were forced and are shown once they were scored
    forks:      sequences of the same request that start when this one has computed their common prompt
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompt_ids: Items[int],
        *,
        sample: int,
        max_tokens: int,
        num_dropped_tokens: int = 0,
        shown_prompt: range | None = None,
        detokenizer: Detokenizer,
        matcher: Matcher | None = None,
        illustration: PlacedImages | None = None,
        record: Record | None = None,
        prediction: Items[int] = (),
    ) -> None:
        self.request = request
        self.sample = sample
        self.prompt_length = len(prompt_ids)
        self.max_tokens = max_tokens
        self.matcher = matcher
        self.illustration, self.record = illustration, record
        self.prediction = prediction
        self.sampling_state = SamplingState(request.sampling, len(prompt_ids))

        self.token_ids: list[int] = list(prompt_ids)
        self.num_computed = self.num_held = 0
        self.finish: Finish | None = None
        self.forks: list[Sequence] = []

        shown_prompt = range(len(prompt_ids)) if shown_prompt is None else shown_prompt
        self.shown = Shown(detokenizer, Ending(request.stop), shown_prompt, num_dropped_tokens)
        self.place, self.spent = Place(), Spent()

    def end(self, reason: FinishReason, *, matched_stop: str | int | None = None) -> Finish:
        """End the sequence, once and for good."""
        assert self.finish is None, f"{self} has ended already"
        self._drop_held()  # they are behind its end
        wanted, spent = self.request.stop.max_tokens, self.spent
        is_short = wanted is None or self.num_generated < wanted
        self.finish = Finish(
            reason=reason,
            matched_stop=matched_stop,
            num_tokens=self.num_generated,
            is_context_end=reason is FinishReason.LENGTH and is_short,
            predicted=(spent.num_accepted, spent.num_drafted - spent.num_accepted) if self.prediction else None,
        )
        return self.finish

    def go_back(self) -> None:
        """Forget what was computed, and tokens and scores that wait for more of it: they will be computed again."""
        if self.num_held:
            assert self.matcher is not None, f"{self} is not constrained"
            self.matcher.go_back(self.num_held)
            self._drop_held()
        if not self.shown.is_prompt_reported:
            self.shown.prompt_logprobs.clear()
        self.num_computed = 0

    def _drop_held(self) -> None:
        if self.num_held:
            del self.token_ids[-self.num_held :]
            self.num_held = 0

    @property
    def salt(self) -> bytes:
        """Return what names its keys and values besides tokens: the version of its adapter or mix, and a client's salt.

        No version holds the byte between the two.
        """
        version, own = self.request.model.salt.encode(), self.request.cache_salt
        return version + b"\0" + own.encode("utf-8", "surrogatepass") if own else version

    @property
    def names(self) -> Items[int]:
        """Return what its blocks are named by: its tokens, and of images their digests."""
        if self.illustration is None:
            return self.token_ids
        return [*self.illustration.names, *self.token_ids[self.prompt_length :]]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Count the tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def num_taken(self) -> int:
        """Count the generated tokens without those that wait for their scores."""
        return self.num_generated - self.num_held

    @property
    def is_prompt_computed(self) -> bool:
        return self.num_computed >= self.prompt_length

    @property
    def is_finished(self) -> bool:
        return self.finish is not None

    @property
    def is_sound(self) -> bool:
        """Whether its keys and values are known to be numbers: logits that followed from them were."""
        has_failed = self.finish is not None and self.finish.reason is FinishReason.ERROR
        return self.is_prompt_computed and not has_failed

    @property
    def may_skip_computed(self) -> bool:
        """Whether it may begin with what others computed: its client agrees and wants nothing of those positions."""
        is_recorded = self.record is None or self.record.next >= self.num_tokens - 1
        return self.request.uses_cache and not self.scores_prompt and is_recorded

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's own tokens are still wanted of this sequence."""
        wanted = self.request.logprobs
        return wanted is not None and wanted.scores_prompt and self.sample == 0 and not self.shown.is_prompt_reported

    def __repr__(self) -> str:
        return f"Sequence({self.request.request_id}#{self.sample}, {self.num_computed}/{self.num_tokens})"


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens of a sequence from position `start` on.

    samples: its last token is the sequence's last, so the next one is drawn after this step
    scores:  its first positions, whose logits are wanted for the log-probabilities of the tokens behind them, which are
             the prompt's own or forced
    draft:   guesses of the tokens behind it, computed with it; where there are any, its last token is sampled, and the
             logits of each guess are wanted, too
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    scores: int = 0
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_computed(self) -> int:
        """Count the tokens that are computed for it, guesses included."""
        return self.length + len(self.draft)

    @property
    def num_rows(self) -> int:
        """Count its rows of logits."""
        return self.scores + self.samples + len(self.draft)

    @property
    def decodes(self) -> bool:
        """Whether it goes on with what was generated, rather than computing a prompt."""
        return self.start >= self.sequence.prompt_length


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of one step: single tokens first, by place, then chunks.

    beyond: of those that decode
    """

    spans: tuple[Span, ...]
    beyond: Beyond = NONE_BEYOND

    @property
    def num_decoding(self) -> int:
        return sum(span.decodes for span in self.spans)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(span.length for span in self.spans if not span.decodes)

    @property
    def num_guesses(self) -> int:
        return sum(len(span.draft) for span in self.spans)

    @property
    def first_rows(self) -> list[int]:
        """Return where the logits of each span begin among those of the batch."""
        first_rows, row = [], 0
        for span in self.spans:
            first_rows.append(row)
            row += span.num_rows
        return first_rows

    def __bool__(self) -> bool:
        return bool(self.spans)


def num_common(left: Items[int], right: Items[int]) -> int:
    """Return how many tokens both begin with."""
    return [*map(ne, left, right), True].index(True)
