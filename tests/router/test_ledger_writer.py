"""What replicas spent, until the ledger was told: of each flow the last, whatever came in which order and was lost."""

from __future__ import annotations

import random

import pytest

from serve_app.core.ledger import Counted, Row, Spent, UsageLine, UsageQuestion
from serve_app.router.ledger_writer import Counts, LedgerWriter


class DeafLedger:
    """Hears every other batch."""

    def __init__(self) -> None:
        self.heard: list[list[Counted]] = []
        self.is_deaf = False

    async def record(self, rows: list[Row], counted: list[Counted]) -> None:  # type: ignore[override]
        self.is_deaf = not self.is_deaf
        if self.is_deaf:
            raise ConnectionError("nobody heard")
        self.heard.append(list(counted))

    async def usage(self, question: UsageQuestion) -> list[UsageLine]:
        raise AssertionError("nobody asks")


def spent(flow: str, number: int) -> Spent:
    return Spent(flow=flow, completion_tokens=number, prompt_tokens=number // 2, engine_ns=number // 3)


@pytest.mark.parametrize("seed", range(5))
async def test_what_was_lost_on_its_way_is_told_again_and_in_the_end_the_ledger_knows_the_last(seed: int) -> None:
    drawn, counts, ledger = random.Random(seed), Counts(), DeafLedger()
    ledger_writer, last = LedgerWriter(ledger, counts), dict[str, int]()  # type: ignore[arg-type]
    for number in range(200):
        flow, at = f"f{drawn.randrange(9)}", max(0, number - drawn.randrange(4))  # now and then one that was passed
        last[flow] = max(last.get(flow, 0), at)
        counts.note("r0", "tiny", [spent(flow, at)])
        if drawn.random() < 0.2:
            with pytest.raises(ConnectionError):
                await ledger_writer.flush()
            await ledger_writer.flush()
    counts.note("r0", "tiny", [spent("f0", 1000)])
    with pytest.raises(ConnectionError):
        await ledger_writer.flush()
    await ledger_writer.flush()
    last["f0"] = 1000
    found: dict[str, int] = {}
    for batch in ledger.heard:
        found |= {each.spent.flow: max(found.get(each.spent.flow, 0), each.spent.completion_tokens) for each in batch}
    assert found == last


async def test_the_ledger_is_told_of_those_that_something_was_computed_for_since_and_of_nobody_else() -> None:
    counts, ledger = Counts(), DeafLedger()
    ledger.is_deaf = True
    ledger_writer = LedgerWriter(ledger, counts)  # type: ignore[arg-type]
    counts.note("r0", "tiny", [spent(f"f{number}", 5) for number in range(500)])
    await ledger_writer.flush()
    ledger.is_deaf = True
    counts.note("r0", "tiny", [spent("f3", 9)])
    await ledger_writer.flush()
    assert [len(each) for each in ledger.heard] == [500, 1]
    assert counts.take() == []
