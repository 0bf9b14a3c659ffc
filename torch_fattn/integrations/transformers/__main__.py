"""transformers' own command line, with `fattn` registered:

python -m torch_fattn.integrations.transformers serve MODEL --continuous-batching

`transformers serve` accepts only its own names and repositories of kernels. Through this module it also
accepts `--attn-implementation fattn`, the default here. Layers that the kernels cannot run use sdpa
attention, with one warning.
"""

from __future__ import annotations

import sys

from transformers.utils.import_utils import is_serve_available

from .compat import let_serve_end, let_serve_take
from .registration import register
from .support import NAME

OPTION = "--attn-implementation"


def with_default(arguments: list[str]) -> list[str]:
    given = any(argument.split("=")[0] == OPTION for argument in arguments)
    return arguments if arguments[:1] != ["serve"] or given else [*arguments, OPTION, NAME]


def main() -> None:
    register(on_unsupported="sdpa")
    try:
        if sys.argv[1:2] == ["serve"] and not is_serve_available():
            raise ImportError("pydantic, fastapi, uvicorn or openai is not installed")
        let_serve_take(NAME)
        end = let_serve_end()
        from transformers.cli.transformers import main as command_line
    except ImportError as error:
        sys.exit(
            f"transformers serve: {error}; run `pip install 'transformers[serving]' accelerate requests`"
        )

    sys.argv[1:] = with_default(sys.argv[1:])
    try:
        command_line()
    finally:
        end()


if __name__ == "__main__":
    main()
