"""One continuation being generated, from admission to its finish."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

from serve_app.constraints.matcher import Matcher
from serve_app.core.delta import Delta, Finish, FinishReason, TokenLogprob
from serve_app.core.request import GenerationRequest
from serve_app.engine.decoder.record import Record
from serve_app.engine.kv.storage import Holding
from serve_app.engine.lora.plan import Mix
from serve_app.engine.sampling.state import SamplingState
from serve_app.engine.scheduler.pace import NONE_BEYOND, Beyond
from serve_app.engine.vision.images import Illustration
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.stops import Ending


class Sequence:
    """A prompt and what has been generated after it.

    There is no phase: a sequence has `num_tokens` tokens of which `num_computed` have keys and values, and it
    catches up. It may be sampled when nothing but its next token is missing.

    holding:    what it has of the key/value store while it runs, else None
    mix:        its adapters' slots in the bank while they are pinned there, each with its factor; () for the base
    siblings:   sequences of the same request that start when this one has computed their common prompt
    max_tokens: bound on generated tokens, the context's end considered
    num_dropped_tokens: of the prompt's beginning, which are not in `token_ids`
    shown_prompt: where the prompt that is echoed stands among `token_ids`; of a gap that is its prefix alone
    illustration: the images of its prompt, if any
    matcher:    follows what was generated along the request's constraint, if any; preemption leaves it as it is
    record:     what of its positions is kept for its client, if anything; preemption leaves it as it is
    prediction: tokens that its client expects it to generate
    num_drafted, num_accepted: guesses that were computed along with its tokens, and those of them that were drawn
    sampling_state: what sampling remembers of its tokens; preemption leaves it as it is
    num_held:   of its last tokens, which were forced and are shown once they were scored
    gathered:   of what it gained, what was not passed on yet
    is_prompt_published: whether others can find its prompt's blocks
    first_taken_at: when its first token came, where its time is limited
    passed_over_at: since when others begin before it as it lacks something
    num_charged, is_prompt_charged: what of it was counted as spent;  engine_ns: its share of the steps' time
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
        illustration: Illustration | None = None,
        record: Record | None = None,
        prediction: Items[int] = (),
    ) -> None:
        self.request = request
        self.sample = sample
        self.prompt_length = len(prompt_ids)
        self.token_ids: list[int] = list(prompt_ids)
        self.max_tokens = max_tokens
        self.num_dropped_tokens = num_dropped_tokens
        self.shown_prompt = range(len(prompt_ids)) if shown_prompt is None else shown_prompt
        self.detokenizer = detokenizer
        self.matcher = matcher
        self.illustration, self.record = illustration, record
        self.prediction = prediction
        self.stop_matcher = Ending(request.stop)
        self.sampling_state = SamplingState(request.sampling, len(prompt_ids))
        self.arrived_at = time.monotonic()
        self.started_at: float | None = None
        self.passed_over_at: float | None = None
        self.first_taken_at: float | None = None
        self.num_computed = self.num_held = 0
        self.is_prompt_published = False
        self.holding: Holding | None = None
        self.mix: Mix = ()
        self.siblings: list[Sequence] = []
        self.finish: Finish | None = None

        self.num_drafted = self.num_accepted = 0
        self.num_cached_tokens = self.num_charged = self.engine_ns = self.num_shown_chars = 0
        self.was_reported = self.is_prompt_charged = False
        self.prompt_logprobs: list[TokenLogprob] = []
        self.pending_logprobs: list[TokenLogprob] = []
        self.gathered: list[Delta] = []

    def end(self, reason: FinishReason, *, matched_stop: str | int | None = None) -> Finish:
        """End it, once and for good."""
        assert self.finish is None, f"{self} has ended already"
        if self.num_held:  # they are behind its end
            del self.token_ids[-self.num_held :]
            self.num_held = 0
        wanted = self.request.stop.max_tokens
        is_short = wanted is None or self.num_generated < wanted
        self.finish = Finish(
            reason=reason,
            matched_stop=matched_stop,
            num_tokens=self.num_generated,
            is_context_end=reason is FinishReason.LENGTH and is_short,
            predicted=(self.num_accepted, self.num_drafted - self.num_accepted) if self.prediction else None,
        )
        return self.finish

    def give_up_held(self) -> None:
        """Forget the tokens that wait for their scores; they will be forced again."""
        if self.num_held:
            assert self.matcher is not None, f"{self} is not constrained"
            self.matcher.go_back(self.num_held)
            del self.token_ids[-self.num_held :]
            self.num_held = 0

    @property
    def salt(self) -> bytes:
        """What besides tokens names its keys and values: most often the adapter's version, or the mix's, which decides
        them, and the client's own salt.

        No version holds the byte between the two.
        """
        version, own = self.request.model.salt.encode(), self.request.cache_salt
        return version + b"\0" + own.encode("utf-8", "surrogatepass") if own else version

    @property
    def names(self) -> Items[int]:
        """What its blocks are named by: its tokens, and of images their digests."""
        if self.illustration is None:
            return self.token_ids
        return [*self.illustration.names, *self.token_ids[self.prompt_length :]]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def num_taken(self) -> int:
        """Generated tokens without those that wait for their scores."""
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
        """Whether positions that were computed before need not be computed for it: nothing is wanted of them."""
        record = self.record
        return not self.scores_prompt and (record is None or record.next >= self.num_tokens - 1)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's own tokens are still wanted of this sequence."""
        wanted = self.request.logprobs
        return wanted is not None and wanted.scores_prompt and self.sample == 0 and not self.was_reported

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
        """Tokens that are computed for it, guesses included."""
        return self.length + len(self.draft)

    @property
    def num_rows(self) -> int:
        """Of logits."""
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
        """Where the logits of each span begin among those of the batch."""
        first_rows, row = [], 0
        for span in self.spans:
            first_rows.append(row)
            row += span.num_rows
        return first_rows

    def __bool__(self) -> bool:
        return bool(self.spans)


def num_common(left: Items[int], right: Items[int]) -> int:
    """How many tokens both begin with."""
    differing = (place for place, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differing, min(len(left), len(right)))
