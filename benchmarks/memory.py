"""Peak memory of an iteration against the number of pairs and the group size, at a fixed micro-batch.

    python -m benchmarks.memory

Each setting runs in a process of its own; what is compared is the peak resident memory above the process's state just
before the iteration, as a ratio to the smallest setting's. The pair-by-pair scheme makes it flat in both.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

SETTINGS = [(2, 8), (4, 8), (8, 8), (4, 16), (4, 32)]  # (pairs, group size)


def measure(n_pairs: int, group_size: int) -> None:
    """In the child: print the peak during one iteration and the peak before it, MiB."""
    import torch

    from benchmarks.overhead import iteration, make_trainer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), 2, group_size, 8)
        trainer.algorithm = replace(
            trainer.algorithm, clip=0.01, updates=2, elbo=replace(trainer.algorithm.elbo, n_pairs=n_pairs)
        )
        trainer.collector.prepare()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        iteration(trainer, 0)
        print(json.dumps({"before": before, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(*args.child)
        return
    print("pairs  group  peak MiB  above the start  ratio")
    smallest = None
    for pairs, size in SETTINGS:
        command = [sys.executable, "-m", "benchmarks.memory", "--child", str(pairs), str(size)]
        out = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        above = out["peak"] - out["before"]
        smallest = above if smallest is None else smallest
        print(f"{pairs:5d}  {size:5d}  {out['peak']:8.0f}  {above:15.1f}  {above / smallest:5.2f}")


if __name__ == "__main__":
    main()
