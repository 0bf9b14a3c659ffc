"""`python -m bench` measures calls on this machine. `python -m bench COMMAND` runs one of these:

    bounds       compares the counts of our kernels with their bounds, or lowers the bounds
    roofline     writes the tables of bench/APPLE.md
    readme       compares the tables of README and docs with bench/results, or writes them
    agx          prints what the kernels cost on M1 and M2, by Mesa's compiler
    host-cost    times planning and encoding on this CPU
    cuda-build   compiles the kernels for an NVIDIA GPU
    cuda-check   checks their results there, without torch_fattn

`python -m torch_fattn bench` is the same.
"""

import importlib
import sys

COMMANDS = {
    "bounds": "bench.models.bounds",
    "roofline": "bench.models.roofline",
    "readme": "bench.report.readme",
    "agx": "bench.report.agx",
    "host-cost": "bench.backends.host_cost",
    "cuda-build": "bench.backends.cuda.build",
    "cuda-check": "bench.backends.cuda.run",
}


def main(arguments: list[str]) -> int:
    name, *rest = arguments or [""]
    if name in COMMANDS:
        try:
            return int(importlib.import_module(COMMANDS[name]).main(rest))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "softmetal":
                raise
            refusal = f"python -m bench {name}: it needs softmetal, which is for Linux; run it there"
            print(refusal, file=sys.stderr)
            return 2
    if name in ("-h", "--help"):
        print(__doc__)
    return int(importlib.import_module("bench.report.run").main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
