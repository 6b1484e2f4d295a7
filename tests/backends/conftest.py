"""What vLLM needs to be loaded again by one process, as no replica does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernels_are_found_beside_llvmlite() -> Iterator[None]:
    """Have vLLM pass over llvmlite's library, which says of every name that it has it.

    vLLM looks for kernels in all modules when it is loaded. Our kernels import llvmlite only afterwards.
    """
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher")

    def has(value: Any, name: str) -> bool:
        return hasattr(value, name) and (name != "__dict__" or isinstance(value.__dict__, Mapping))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "hasattr", has, raising=False)
        yield
