"""Hugging Face transformers: `register()`, then load a model with `attn_implementation="fattn"`.

Two functions meet here. transformers calls the *mask function* (`make_mask`) once per forward and layer
pattern and hands what it returns to the *attention function* (`attend`) of every layer. A model takes part
only if its layers really go through transformers' attention interface; `support` finds out and refuses the
others, whose own attention would misread the mask. Such a model is refused in its first forward, when it asks
for a mask: the registry that `from_pretrained` consults knows names, not models. A model that asks for no
mask and never calls the attention function computes what it computes under "eager"; nothing is refused,
nothing is accelerated.

What cannot run raises, in one sentence; `register(on_unsupported="sdpa")` lets transformers' sdpa attention
run it instead, layer by layer, with one warning for each kind of layer and reason. Training, for which the
kernels have no backward, always does. Refused all the same is what sdpa would drop without a word.

`model.generate_batch` (continuous batching) runs under this name too.

Causal layers pass windows, soft caps, sinks and the filled length of static caches to the operators as such.

A row that a bool mask leaves no key gives 0 here, where eager attention gives the mean of all values: such
rows are left padding, and a model's output does not use them. Recurrent models do, and get eager's mask.
"""

from __future__ import annotations

from ...runtime import versions
from ...runtime.signatures import public

try:
    from transformers import PreTrainedModel

    from .attention import attend
    from .masks import make_mask
    from .paged import attend_paged
    from .registration import register, unregister
    from .support import FLASH_NAME, NAME, PAGED_NAME
except ImportError as error:
    raise ImportError(
        "torch_fattn.integrations.transformers needs transformers: "
        f"pip install '{versions.requirement('transformers', versions.TRANSFORMERS)}'"
    ) from error

__all__ = [
    "FLASH_NAME",
    "NAME",
    "PAGED_NAME",
    "attend",
    "attend_paged",
    "make_mask",
    "register",
    "unregister",
    "use_packed",
]


@public("torch_fattn.integrations.transformers.use_packed", ahead=False)
def use_packed(model: PreTrainedModel) -> None:
    """Lets a model take all its packed sequences in one call of every layer, as it does for flash attention:
    the vision tower of a Qwen2-VL, say, which otherwise calls its attention once for each image."""
    model.config._attn_implementation = FLASH_NAME
