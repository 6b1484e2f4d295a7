"""Makes the demo model, its adapters and their report by one command: `python -m tools.demo_model.make`."""

import argparse
import logging
import os
from pathlib import Path

ROOM = Path(__file__).resolve().parent
REPOSITORY = ROOM.parent.parent
MODEL = REPOSITORY / "serve_app" / "demo" / "model"

NUM_THREADS = 2


def main() -> None:
    """Read the options and build; the full build takes an hour or two on two cores."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.make", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="train for a few steps only, to see that all works")
    parser.add_argument("--out", type=Path, help="write everything under this folder, and not into the repository")
    parser.add_argument("--only", choices=("adapters", "lessons", "report"), help="make this from what is there")
    options = parser.parse_args()
    if options.quick and options.out is None:
        parser.error("--quick needs --out: a model of a few steps is no use in the repository")

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read once, when torch is imported
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["TQDM_DISABLE"] = "1"
    import torch

    from tools.demo_model.build import FULL, QUICK, Places, build, build_adapters, build_lessons, build_report

    places = Places(
        model=MODEL if options.out is None else options.out / "model",
        adapters=REPOSITORY / "adapters" / "demo" if options.out is None else options.out / "adapters",
        report=ROOM / "report.json" if options.out is None else options.out / "report.json",
    )
    torch.set_num_threads(NUM_THREADS)
    makers = {"adapters": build_adapters, "lessons": build_lessons, "report": build_report, None: build}
    makers[options.only](QUICK if options.quick else FULL, places)


if __name__ == "__main__":
    main()
