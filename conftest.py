"""Settings for the tests of torch_fattn and softmetal, made before anything imports torch."""

from __future__ import annotations

import os

# Several processes share the cores, and tensors are small: the threads of torch's CPU kernels would spend a
# third of all processor time spinning for work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch_fattn, which the plugin below imports, must not use tuned sizes or archives of this machine.
os.environ["FATTN_TUNING"] = os.environ["FATTN_ARCHIVE"] = "0"

pytest_plugins = ["tests.tiers"]
