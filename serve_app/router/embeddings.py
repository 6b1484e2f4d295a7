"""Reads a run of prompts that are embedded to its end."""

from __future__ import annotations

import asyncio

from serve_app.api.chunks import dump
from serve_app.api.embeddings import EmbeddingRequest, embeddings_body
from serve_app.api.fragments import Fragment
from serve_app.core.request import Recording
from serve_app.router.run import Run


async def collect_embeddings(run: Run, request: EmbeddingRequest) -> Fragment:
    """The whole body, written already, its vectors in the order of the inputs."""
    found: dict[int, Recording] = {}
    async for event in run:
        if event.delta.recording is not None:
            found[event.index] = event.delta.recording
    recordings = [found[index] for index in range(len(request.prompts))]
    usage = run.tally.usage
    return await asyncio.to_thread(lambda: Fragment(dump(embeddings_body(request, recordings, usage=usage))))
