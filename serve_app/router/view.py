"""What of the fleet somebody sees: its models as far as rights to them go, and what names mean to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from serve_app.api.dialects import ONLY_MODEL
from serve_app.catalog.resolve import Catalog
from serve_app.core.cards import ModelCard
from serve_app.core.errors import ModelLoading, ModelNotFound, NotFound
from serve_app.core.names import ModelRef
from serve_app.core.tenants import Rights
from serve_app.router.link import ReplicaLink

MAX_NAMED = 10


class Fleet(Protocol):
    """What a view asks of a fleet. `version` grows with every change of what follows."""

    @property
    def version(self) -> int: ...
    @property
    def cards(self) -> Mapping[str, ModelCard]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def loading(self) -> list[str]: ...
    @property
    def failed(self) -> list[str]: ...
    def links_for(self, ref: ModelRef) -> list[ReplicaLink]: ...
    def not_ready(self, name: str) -> ModelLoading: ...


class View:
    """A fleet as it is seen with these rights: what they do not allow is not there, nor is it said to be missing.

    It follows the fleet: what was learned since is seen at the next question.
    """

    def __init__(self, fleet: Fleet, rights: Rights) -> None:
        self.rights = rights
        self._fleet = fleet
        self._version = -1
        self._seen = Catalog(())

    @property
    def cards(self) -> Mapping[str, ModelCard]:
        """Models with a ready replica, by name, a base that may not be used but with an adapter among them."""
        return self._catalog.models

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of models that may be used by themselves."""
        return self._catalog.bases

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._catalog.aliases

    @property
    def loading(self) -> list[str]:
        """Known models without a ready replica that may have one later."""
        return [name for name in self._fleet.loading if self.rights.touch(name)]

    @property
    def failed(self) -> list[str]:
        """Models that could not be loaded."""
        return [name for name in self._fleet.failed if self.rights.touch(name)]

    def links_for(self, ref: ModelRef) -> list[ReplicaLink]:
        """As `Fleet.links_for`, of a model that was resolved here."""
        return self._fleet.links_for(ref)

    def resolve(
        self,
        name: str,
        *,
        lora_path: str | None = None,
        takes_any: bool = False,
        param: str = "model",
        lora_param: str = "lora_path",
    ) -> ModelRef:
        """The model meant by a client's words, pinned to the version that is served now.

        takes_any: a name that nobody has means the only model, where there is only one
        param, lora_param: what the client calls the two
        Raises NotFound, AdapterUnusable, InvalidRequest, or ModelLoading where the base exists but no
        replica of it is ready.
        """
        catalog = self._catalog
        if name == ONLY_MODEL and self.bases and name not in catalog.models and name not in self.aliases:
            if len(self.bases) > 1:
                must = f"be one of {', '.join(sorted(self.bases)[:MAX_NAMED])}, as several models are served"
                raise ModelNotFound.refusing(param, must=must, found=f'nothing, or "{ONLY_MODEL}"')
            [name] = self.bases
        try:
            return catalog.resolve(name, lora_path=lora_path, param=param, lora_param=lora_param)
        except NotFound as error:
            missing = self._missing_base(name.strip())
            if missing is not None:
                raise self._fleet.not_ready(missing) from None
            known = {*self.bases, *self.loading, *self.failed}
            if takes_any and isinstance(error, ModelNotFound) and len(known) == 1:
                return self.resolve(*known, lora_path=lora_path, param=param, lora_param=lora_param)
            raise

    @property
    def _catalog(self) -> Catalog:
        if self._version != self._fleet.version:
            self._seen = Catalog(self._fleet.cards.values(), self._fleet.aliases, rights=self.rights)
            self._version = self._fleet.version
        return self._seen

    def _missing_base(self, name: str) -> str | None:
        """The longest name of a model without a replica that this address, or its alias's target, begins with."""
        aliases = self._fleet.aliases
        while name in aliases:
            name = aliases[name]
        matches = [each for each in [*self.loading, *self.failed] if name == each or name.startswith(f"{each}:")]
        allowed = [each for each in matches if self.rights.allow(each, name[len(each) + 1 :] or None)]
        return max(allowed, key=len, default=None)
