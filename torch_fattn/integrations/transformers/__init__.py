"""Hugging Face transformers: `register()`, then load a model with `attn_implementation="fattn"`.

Two functions meet here. transformers calls the *mask function* (`make_mask`) once per forward and layer
pattern and hands what it returns to the *attention function* (`attend`) of every layer. A model takes part
only if its layers really go through transformers' attention interface; `support` finds out and refuses the
others, whose own attention would misread the mask. Such a model is refused in its first forward, when it asks
for a mask: the registry that `from_pretrained` consults knows names, not models. A model that asks for no
mask and never calls the attention function computes what it computes under "eager"; nothing is refused,
nothing is accelerated.

`model.generate_batch` (continuous batching) calls `attend_paged` under the name `"paged|fattn"`.

Causal layers pass windows, soft caps, sinks and the filled length of static caches to the operators as such.

Inference only. A layer in training mode whose inputs require gradients is refused before it computes
anything; `model.eval()` works with and without `torch.no_grad()`, and a `backward` through it raises.

A row that a bool mask leaves no key gives 0 here, where eager attention gives the mean of all values: such
rows are left padding, and a model's output does not use them. Recurrent models do, and get eager's mask.
"""

from __future__ import annotations

import warnings

from ... import _versions

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    from .attention import attend
    from .masks import make_mask
    from .paged import attend_paged
    from .support import NAME
except ImportError as error:
    raise ImportError(
        "torch_fattn.integrations.transformers needs transformers: "
        f"pip install '{_versions.requirement('transformers', _versions.TRANSFORMERS)}'"
    ) from error

__all__ = ["NAME", "PAGED_NAME", "attend", "attend_paged", "make_mask", "register"]

PAGED_NAME = f"paged|{NAME}"


def register() -> None:
    """Make `attn_implementation="fattn"` and `"paged|fattn"` known to transformers. May be called more than
    once.

    Raises ImportError where transformers is older than what this is made for; a newer one costs a warning.
    """
    version = transformers.__version__
    if (fault := _versions.fault("transformers", version, _versions.TRANSFORMERS)) is not None:
        if _versions.minor(version) < _versions.TRANSFORMERS[0]:
            raise ImportError(fault)
        warnings.warn(fault, stacklevel=2)
    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(PAGED_NAME, attend_paged)
    AttentionMaskInterface.register(NAME, make_mask)
