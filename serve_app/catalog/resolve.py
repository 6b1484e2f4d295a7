"""Resolves the model that a client asks for to a base and the versions of adapters on it, or a mix of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from posixpath import basename, dirname, normpath

from serve_app.catalog.aliases import Aliases, Order, heaviest_first, read_aliases
from serve_app.catalog.files import CatalogError
from serve_app.core.cards import AdapterCard, ModelCard
from serve_app.core.errors import AdapterNotFound, AdapterUnusable, Forbidden, InvalidRequest, ModelNotFound, ServeError
from serve_app.core.names import MAX_SCALE, ModelRef, mixed
from serve_app.core.tenants import Rights

ALL = Rights()
MAX_LISTED = 20
MAX_SHOWN_CHARS = 96
PIN = "@"
"""Stands between an adapter's name and the version that a request wants of it."""
MIN_VERSION_CHARS = 8
PATH = re.compile(r"[/\\~]")
# What mistral.rs escapes in `base::alias`.
_ESCAPES: Mapping[str, str] = {"%3A": ":", "%23": "#", "%25": "%"}


Draw = Callable[[str], float]
"""Gives a number in [0, 1) for an address; a canary gets the request if its share is larger."""


def no_canary(address: str) -> float:
    """Draw no canary."""
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model as a client names it: by `model`, and an adapter beside it. The params are what it calls the two."""

    model: str
    param: str = "model"
    adapter: str | None = None
    adapter_param: str = "lora_path"


class Catalog:
    """What is served at one moment: base models with their adapters, and aliases for addresses.

    A served address comes before an alias of the same name, so that an alias never hides a model: an adapter
    that appears on disk takes its address back from the alias, which is then listed in `hidden_aliases`. An
    alias may name an address that is not served (yet); a request for it is told so, unless another target answers.

    aliases: as `read_aliases` reads them
    rights: of the tenant that asks; a model they do not allow looks exactly like one that does not exist
    Raises CatalogError for a base given twice and for aliases that `read_aliases` refuses.
    """

    def __init__(
        self, models: Iterable[ModelCard], aliases: Mapping[str, object] | None = None, *, rights: Rights = ALL
    ) -> None:
        self._models: dict[str, ModelCard] = {}
        for model in models:
            if model.name in self._models:
                raise CatalogError(f"the model {model.name!r} is there twice")
            if rights.touch(model.name):
                allowed = _as_allowed(model, rights)
                if allowed.adapters or rights.allow(model.name):
                    self._models[model.name] = allowed
        self._rights = rights
        said, served = read_aliases(aliases or {}), set(self._addresses())
        self._aliases = {name: alias for name, alias in said.items() if name not in served}
        self.hidden_aliases = tuple(sorted(set(said) - set(self._aliases)))
        if not rights.allow_everything:
            self._aliases = {name: alias for name, alias in self._aliases.items() if self._leads_somewhere(name)}

    def names(self) -> tuple[str, ...]:
        """List every address: bases, each with its usable adapters, then aliases."""
        return (*self._addresses(), *sorted(self._aliases))

    @property
    def models(self) -> Mapping[str, ModelCard]:
        """Bases that may be used, or that have an adapter which may; with no other adapters on their cards."""
        return self._models

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of the bases that may be used by themselves."""
        return tuple(name for name in self._models if self._rights.allow(name))

    @property
    def aliases(self) -> Aliases:
        """Aliases that are not hidden by what is served."""
        return self._aliases

    def resolve(self, wanted: Wanted | str, *, order: Order = heaviest_first, draw: Draw = no_canary) -> ModelRef:
        """Find what `model` means; `adapter` names the adapter, or its folder, only where `model` does not.

        order: in which targets of an alias are tried; the first that can be used answers
        draw: of an adapter that has a canary and is named without a version; a mix has none

        The first that fits: a base or an alias as it stands, `left#deployment`, `base::adapter`, `base:adapter`
        with the longest base, an adapter's name that only one base has. Behind an adapter's name `@` may pin one of the
        versions that are at hand, by its digest or the first 8 characters or more. In place of an adapter's name there
        may be a mix, as `read_mix` reads it.
        Raises ModelNotFound, AdapterNotFound, AdapterUnusable, Forbidden for a folder outside of those where the
        model's adapters are, and InvalidRequest where a name is ambiguous or a mix is none.
        """
        first: ServeError | None = None
        asked = Wanted(model=wanted) if isinstance(wanted, str) else wanted
        for _, found in self.tried(asked, order, draw):
            if isinstance(found, ModelRef):
                return found
            first = first or found
        assert first is not None, "a name stands for one address at least"
        raise first

    def tried(self, asked: Wanted, order: Order, draw: Draw) -> Iterator[tuple[str, ModelRef | ServeError]]:
        """Yield each address that a name stands for, in this order, with what it means or why it cannot be used."""
        for address in self._follow(asked.model.strip(), order):
            try:
                found = self._resolve_target(address, asked, draw)
            except ServeError as error:
                yield address, error
            else:
                yield address, found

    def _resolve_target(self, address: str, asked: Wanted, draw: Draw) -> ModelRef:
        found = self._resolve_name(address, asked)
        path = (asked.adapter or "").strip()
        if found.adapter is None and path:
            model = self._models[found.base]
            param = asked.adapter_param
            found = _with_adapters(model, _name_at(path, model, param=param), param=param)
        if found.adapter is None and not self._rights.allow(found.base):
            raise self._not_found(asked)
        is_pinned = PIN in address or PIN in path
        return found if is_pinned else self._as_drawn(found, draw)

    def _as_drawn(self, found: ModelRef, draw: Draw) -> ModelRef:
        """Return the canary of an adapter if it is drawn and at hand."""
        model = self._models[found.base]
        card = None if found.adapter is None or found.mix else model.adapter(found.adapter)
        if card is None or card.canary is None:
            return found
        version, share = card.canary
        canary = next((each for each in model.versions(card.name) if each.version == version and each.is_usable), None)
        if canary is None or draw(found.name) >= share:
            return found
        return mixed(found.base, [canary.part(1.0)])

    def _resolve_name(self, name: str, asked: Wanted) -> ModelRef:
        if name not in self._models:
            left, _, deployment = name.partition("#")
            if deployment:
                raise ModelNotFound.refusing(
                    asked.param,
                    must=f"name no deployment, as models have none to choose from here, but be {_quoted(left)}",
                    found=_quoted(name),
                )
            name = left.rstrip()
        if name in self._models:
            return ModelRef(base=name)
        for sign in ("::", ":"):
            for base in sorted(self._models, key=len, reverse=True):
                if name.startswith(base + sign):
                    text = name.removeprefix(base + sign)
                    text = _unescape(text) if sign == "::" else text
                    return _with_adapters(self._models[base], text, param=asked.param)
        return self._resolve_bare(name, asked)

    def _resolve_bare(self, name: str, asked: Wanted) -> ModelRef:
        adapters = [adapter for adapter, _ in read_mix(name) or ((name, 1.0),)]
        at_hand = [(model, [_at_hand(model, each) for each in adapters]) for model in self._models.values()]
        holders = [model for model, cards in at_hand if None not in cards]
        usable = [model for model, cards in at_hand if all(card is not None and card.is_usable for card in cards)]
        if len(usable) > 1:
            candidates = ", ".join(sorted(f"{model.name}:{name}" for model in usable))
            must = f"be one of {candidates}, as adapters of several models have that name"
            raise InvalidRequest.refusing(asked.param, must=must, found=_quoted(name))
        if holders:
            return _with_adapters((usable or holders)[0], name, param=asked.param)
        raise self._not_found(asked)

    def _not_found(self, asked: Wanted) -> ModelNotFound:
        must = f"be one that is served ({_listed(self.bases)}), or an adapter of it"
        return ModelNotFound.refusing(asked.param, must=must, found=_quoted(asked.model.strip()))

    def _leads_somewhere(self, alias: str) -> bool:
        try:
            self.resolve(alias)
        except ServeError:
            return False
        return True

    def _addresses(self) -> list[str]:
        """List bases and usable adapters. An adapter whose address is also a base's is reached by `base::adapter`."""
        found: dict[str, None] = {}
        for model in self._models.values():
            found |= {model.name: None} if self._rights.allow(model.name) else {}
            found |= dict.fromkeys(f"{model.name}:{card.name}" for card in model.adapters if card.is_usable)
        return list(found)

    def _follow(self, name: str, order: Order) -> Iterator[str]:
        """Yield what an alias leads to; `alias:adapter` is an adapter of that, unless a base has such a name."""
        if name in self._aliases:
            for target in order(name, self._aliases[name].weights):
                yield from self._follow(target, order)
            return
        if not any(name == base or name.startswith(f"{base}:") for base in self._models):
            for alias in sorted(self._aliases, key=len, reverse=True):
                if name.startswith(f"{alias}:"):
                    yield from (left + name[len(alias) :] for left in self._follow(alias, order))
                    return
        yield name


def _as_allowed(model: ModelCard, rights: Rights) -> ModelCard:
    """Return the card without the adapters that the tenant may not use."""
    if rights.allow_everything:
        return model
    adapters, staged = (
        tuple(card for card in cards if rights.allow(model.name, card.name)) for cards in (model.adapters, model.staged)
    )
    return replace(model, adapters=adapters, staged=staged)


def _with_adapters(model: ModelCard, text: str, *, param: str) -> ModelRef:
    """Return the model with the adapter, or the mix, that the text names."""
    text = text.strip()
    if not text:
        return ModelRef(base=model.name)
    parts = read_mix(text) if is_mix(text) else ((text, 1.0),)
    if parts is None:
        raise InvalidRequest.refusing(param, must=f"mix adapters as {MIX_WORDS}", found=_quoted(text))
    cards = [(_adapter(model, name, param=param), scale) for name, scale in parts]
    if len({card.version for card, _ in cards}) > model.max_mixed_adapters:
        must = f"mix at most {model.max_mixed_adapters} adapters of {_quoted(model.name)}"
        raise InvalidRequest.refusing(param, must=must, found=str(len(cards)))
    return mixed(model.name, [card.part(scale) for card, scale in cards])


def _at_hand(model: ModelCard, name: str) -> AdapterCard | None:
    """Return the adapter of a name: in the version that it means, or in the one that is pinned behind `@`."""
    name, sign, version = name.partition(PIN)
    if not sign:
        return model.adapter(name)
    found = {card.version: card for card in model.versions(name) if card.version.startswith(version)}
    is_alone = len(found) == 1 and len(version) >= MIN_VERSION_CHARS
    return found.get(version) or (next(iter(found.values())) if is_alone else None)


def _adapter(model: ModelCard, name: str, *, param: str) -> AdapterCard:
    card = _at_hand(model, name)
    if card is None and PIN in name and (versions := model.versions(name.partition(PIN)[0])):
        known = _listed({card.version for card in versions})
        must = f"pin a version that is at hand ({known}), or {MIN_VERSION_CHARS} characters that only one begins with"
        raise AdapterNotFound.refusing(param, must=must, found=_quoted(name))
    if card is None:
        if not model.adapters and not model.adapters_revision:
            none = f"name no adapter of {_quoted(model.name)}, for which LoRA is not enabled"
            raise InvalidRequest.refusing(param, must=none, found=_quoted(name))
        usable = _listed(card.name for card in model.adapters if card.is_usable)
        must = f"name an adapter of {_quoted(model.name)}, which has {usable}"
        raise AdapterNotFound.refusing(param, must=must, found=_quoted(name))
    if card.reason is not None:
        must = f"name an adapter of {_quoted(model.name)} that can be used"
        raise AdapterUnusable.refusing(param, must=must, found=f"{_quoted(name)}: {card.reason}")
    return card


def _name_at(path: str, model: ModelCard, *, param: str) -> str:
    """Return the adapter's name if its folder's path was given; a mix stays as it is. No file is looked at.

    Raises Forbidden for any path but those beside the adapters that are listed, AdapterNotFound for what is neither.
    """
    if read_mix(path) is not None:
        return path
    places = {normpath(card.root): card.name for card in model.adapters if card.root}
    wanted = normpath(path)
    if wanted in places:
        return places[wanted]
    if dirname(wanted) in {dirname(place) for place in places} and not is_mix(basename(wanted)):
        return basename(wanted)
    kind = Forbidden if PATH.search(path) else AdapterNotFound
    raise kind.refusing(param, must="be the name or the listed path of a served adapter", found=_quoted(path))


def _unescape(name: str) -> str:
    for escape, character in _ESCAPES.items():
        name = name.replace(escape, character).replace(escape.lower(), character)
    return name


def _quoted(name: str) -> str:
    """Return a client's name as it is shown back to it, shortened."""
    return json.dumps(name[:MAX_SHOWN_CHARS]) + ("…" if len(name) > MAX_SHOWN_CHARS else "")


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    if not ordered:
        return "none"
    more = f", and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else ""
    return ", ".join(ordered[:MAX_LISTED]) + more


ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,96}")
"""Of adapters; `*` and `+` have their meaning in addresses."""
MIX_WORDS = f"name*scale+name*scale with scales from -{MAX_SCALE:g} to {MAX_SCALE:g}"
_PINNED = re.compile(rf"{ADAPTER_NAME.pattern}({PIN}[A-Za-z0-9]{{1,64}})?")
_SIGNS = re.compile(r"[*+]")
_SCALE = re.compile(r"-?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})(e-[0-9]{1,3})?")

NamesAndScales = tuple[tuple[str, float], ...]


def is_mix(text: str) -> bool:
    """Return whether the name cannot be one adapter's."""
    return _SIGNS.search(text) is not None


def read_mix(text: str) -> NamesAndScales | None:
    """Return the adapters, pinned or not, with their scales, 1 by default; None if the name is no mix."""
    parts = tuple(_part(part.strip()) for part in text.split("+"))
    found = tuple(part for part in parts if part is not None)
    return found if len(found) == len(parts) else None


def write_mix(parts: NamesAndScales) -> str:
    """Return the text that `read_mix` reads as these adapters."""
    return "+".join(f"{name}*{scale!r}" for name, scale in parts)


def _part(text: str) -> tuple[str, float] | None:
    name, sign, written = (piece.strip() for piece in text.partition("*"))
    if not _PINNED.fullmatch(name) or (sign and not _SCALE.fullmatch(written)):
        return None
    scale = float(written) if sign else 1.0
    return (name, scale) if abs(scale) <= MAX_SCALE else None
