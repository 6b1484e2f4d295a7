"""Complete a Parquet file by Ray Data, with one model in each of two workers.

python docs/ray_data.py prompts.parquet answers
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from serve_app.offline.files import COLUMNS, Form, Question, columns_of
from serve_app.offline.model import LocalModel
from serve_app.offline.run import answer


class Answers:
    """Adds the columns of answers to rows that have a column `prompt`."""

    def __init__(self, args: dict[str, Any], parameters: dict[str, object]) -> None:
        """args: of the model, as in a cluster file;  parameters: of all requests"""
        self._form = Form(default=args["name"], parameters=parameters)
        self._model = LocalModel(args)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = zip(*(column.tolist() for column in batch.values()), strict=True)
        questions = [self._form.question(at, dict(zip(batch, row, strict=True))) for at, row in enumerate(rows)]
        with ThreadPoolExecutor(len(questions)) as threads:
            answers = list(threads.map(self._columns, questions))
        return {**batch, **{name: [each[name] for each in answers] for name in COLUMNS}}

    def _columns(self, question: Question) -> dict[str, object]:
        answered = answer(question, self._model.ask, question.custom_id)
        return columns_of(answered.line(question.custom_id, question.custom_id))


if __name__ == "__main__":
    source, target = sys.argv[1:]
    ray.data.read_parquet(source).map_batches(
        Answers,
        fn_constructor_kwargs={
            "args": {"name": "demo", "path": "builtin:demo"},
            "parameters": {"max_tokens": 24, "temperature": 0},
        },
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=0.5,  # of two CPUs one is left to the tasks that read and write
    ).write_parquet(target)
