"""Hugging Face transformers: `register()`, then load a model with `attn_implementation="fattn"`.

transformers calls the *mask function* (`make_mask`) once per forward and layer pattern, and passes its result
to the *attention function* (`attend`) of every layer. A model is supported only if its layers use
transformers' attention interface. `support` checks this and refuses other models, whose own attention would
misread the mask. It refuses in the first forward, when the model requests a mask: the registry of
`from_pretrained` has only names. A model that never requests a mask or calls the attention function runs as
under "eager".

A row whose bool mask hides every key is 0 here and the mean of all values in eager attention. Such rows are
left padding, which the output of most models does not use. Recurrent models do use them and get eager's mask.
"""

from __future__ import annotations

from ...runtime import versions
from ...runtime.signatures import public

try:
    from transformers import PreTrainedModel

    from .attention import attend, attend_paged
    from .fusion.report import Report, report
    from .masks import make_mask
    from .paged_cache import PagedCache
    from .registration import register, unregister
    from .sharded import SHARDED_NAME, ShardedCache, attend_sharded, make_sharded_mask
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
    "SHARDED_NAME",
    "PagedCache",
    "Report",
    "ShardedCache",
    "attend",
    "attend_paged",
    "attend_sharded",
    "make_mask",
    "make_sharded_mask",
    "register",
    "report",
    "unregister",
    "use_packed",
]


@public("torch_fattn.integrations.transformers.use_packed", ahead=False)
def use_packed(model: PreTrainedModel) -> None:
    """Makes a model pass all its packed sequences in one call per layer, as it does for flash attention. The
    vision tower of a Qwen2-VL, for example, otherwise calls its attention once for each image."""
    model.config._attn_implementation = FLASH_NAME
