"""The random problems on other machines:

python -m tests.distributed --backend nccl --device cuda --ranks 2 --problems 300

It needs as many GPUs as ranks, and nothing but torch and torch_fattn.
"""

from __future__ import annotations

import argparse
import time

from tests.distributed.pool import pool
from tests.distributed.random_problems import OPS, check, draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="the most of a problem")
    parser.add_argument("--problems", type=int, default=300, help="of each function")
    given = parser.parse_args()
    failed = 0
    with pool(given.ranks, backend=given.backend, device=given.device) as made:
        for op in OPS:
            start, before = time.monotonic(), failed
            problems = draw(op, given.problems, given.ranks)
            for sharded in problems:
                try:
                    check(made, sharded)
                except AssertionError as error:
                    failed += 1
                    print(f"{op}: {sharded}\n  {error}", flush=True)
            right = len(problems) - (failed - before)
            print(f"{op}: {right} of {len(problems)} right, in {time.monotonic() - start:.0f} s", flush=True)
    raise SystemExit(f"{failed} failed" if failed else 0)


if __name__ == "__main__":
    main()
