"""What two equal tenants get of one replica, if one keeps 40 streams running and the other 8.

    python -m benchmarks.bench_shares --seconds 60
    python -m benchmarks.bench_shares --engine vllm --python .venv-vllm/bin/python

Starts the service with keys and one replica of the demo, with room for 8 sequences. Each client sends a stream, reads
it to its end and sends the next. Prints JSON: the tokens of each tenant within the time, and what one had of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench_failover import with_engine
from tests.cluster.clients import TENANTS
from tests.cluster.house import with_keys
from tests.cluster.kills import begun

NUM_STREAMS = (40, 8)
NUM_SEQUENCES = 8
WARM_S = 5.0
ASKED = {"prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True, "stream": True, "temperature": 0}


async def measured(url: str, keys: dict[str, str], seconds: float) -> dict[str, Any]:
    told, refused = Counter[str](), Counter[tuple[str, str]]()
    begin = time.monotonic() + WARM_S
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:

        async def one_after_another(tenant: str) -> None:
            while time.monotonic() < begin + seconds:
                headers = {"authorization": f"Bearer {keys[tenant]}"}
                body = ASKED | {"model": "demo"}
                async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                    if response.status_code != HTTPStatus.OK:
                        refused[tenant, (await response.aread()).decode()] += 1
                        await asyncio.sleep(float(response.headers.get("retry-after", "1")))
                        continue
                    async for line in response.aiter_lines():
                        if line.startswith("data: {") and begin <= time.monotonic() < begin + seconds:
                            told[tenant] += len(json.loads(line[6:]).get("choices", ()))

        async with asyncio.TaskGroup() as group:
            for tenant, count in zip(TENANTS, NUM_STREAMS, strict=False):
                for _ in range(count):
                    group.create_task(one_after_another(tenant))
    share = {tenant: count / told.total() for tenant, count in told.items()}
    return {"pieces": dict(told), "share": share, "refused": [[*why, count] for why, count in refused.most_common(4)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engine", default="own")
    parser.add_argument("--python", help="that has the engine, for its replica")
    options = parser.parse_args()

    def changed(content: dict[str, Any]) -> None:
        with_keys(content)
        with_engine(content, options.engine, options.python)
        content["applications"][1]["args"]["max_num_sequences"] = NUM_SEQUENCES
        content["applications"][0]["deployments"][0]["user_config"] |= {"max_wait_s": 600, "max_open_requests": 512}

    with tempfile.TemporaryDirectory() as folder:
        house, _, keys = begun(Path(folder), changed)
        try:
            print(json.dumps(asyncio.run(measured(house.run.url, keys, options.seconds)), indent=1))
        finally:
            house.run.end()


if __name__ == "__main__":
    main()
