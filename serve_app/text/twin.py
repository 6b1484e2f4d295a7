"""Makes a second tokenizer of one, whose settings may be others."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer


def sharing_model(tokenizer: Tokenizer) -> Tokenizer | None:
    """One that cuts texts as the other does, over the same vocabulary and merges in memory (45 MB of 152k tokens).

    None where added tokens would have other ids: the library numbers them anew, behind each other.
    """
    twin = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (found := getattr(tokenizer, part)) is not None:
            setattr(twin, part, found)
    added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    for token_id in sorted(added):
        twin.add_tokens([added[token_id]])
    return twin if twin.get_added_tokens_decoder() == added else None
