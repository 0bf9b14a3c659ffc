"""Makes device="mps" work when torch is imported (entry point of the group "torch.backends")."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from pathlib import Path


def register() -> None:
    """torch calls this at the end of `import torch`. Does nothing with SOFTMETAL=0 and on macOS."""
    if sys.platform != "linux" or os.environ.get("SOFTMETAL") == "0":
        return
    from . import control

    if not control.LIBRARY.exists():
        warnings.warn(
            f"softmetal is installed, but {control.LIBRARY.name} is not built, so there is no mps device; "
            "run `python -m softmetal build`, or set SOFTMETAL=0.",
            stacklevel=2,
        )
        return
    import torch

    control.load()
    torch._C._has_mps = True  # read by torch.backends.mps.is_built() and torch.mps.device_count()
    # Compiled out of the Linux wheel:
    torch._C._mps_get_name = lambda: control.device_facts()["name"]
    torch._C._mps_get_core_count = lambda: control.device_facts()["cores"]
    if hasattr(torch.mps, "current_stream"):
        from . import mps_streams

        mps_streams.provide()
    atexit.register(_settle_autograd)
    setattr(torch.UntypedStorage, "mps", _storage_to_mps)  # noqa: B010
    if not torch.backends.mps.is_available():
        warnings.warn(
            "torch was asked about mps before softmetal was loaded and remembers that there is none; "
            "let `import torch` load softmetal (TORCH_DEVICE_BACKEND_AUTOLOAD must not be 0).",
            stacklevel=2,
        )


def _settle_autograd() -> None:
    """Run another backward pass, which makes torch's backward thread release the previous graph.

    That thread may hold the last reference to a graph and its Python objects (the raised error, the context
    of the call). If it releases them while Python shuts down, the process aborts ("terminate called without
    an active exception"). `backward()` instead of `run_backward` would give the new graph a context, too.
    """
    import torch

    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    if any(name.startswith("pt_autograd") for name in names):
        with torch.inference_mode(False), torch.enable_grad():
            result = torch.ones((), device="mps", requires_grad=True).clone()
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((result,), (result.detach(),), False, False, (), True, True)


def _storage_to_mps(storage):  # type: ignore[no-untyped-def]
    """torch.UntypedStorage.mps, which torch.load uses for tensors saved on mps."""
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(storage).to("mps").untyped_storage()
