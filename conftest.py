"""Settings for the tests of torch_fattn and softmetal, made before anything imports torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys

import pytest

# Several processes share the cores, and tensors are small: the threads of torch's CPU kernels would spend a
# third of all processor time spinning for work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch_fattn, which the plugin below imports, must not use tuned sizes or archives of this machine.
os.environ["FATTN_TUNING"] = os.environ["FATTN_ARCHIVE"] = "0"

pytest_plugins = ["tests.tiers", "tests.budget"]


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist, and all processes of tests, inherit the server of the first process."""
    if config.option.collectonly:
        return
    # Where softmetal is not installed, its folder in the checkout is a namespace package, without an origin.
    found = importlib.util.find_spec("softmetal")
    if sys.platform == "linux" and found is not None and found.origin is not None:
        from softmetal.testing import compile_server

        stack = contextlib.ExitStack()
        stack.enter_context(compile_server())
        config.add_cleanup(stack.close)
