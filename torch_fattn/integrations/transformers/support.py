"""Checks whether a model is supported, and which form of mask its layers expect.

A mask function gets only a model's config, so the classes of this config are looked up among all loaded model
classes, remote code included. The flags of a class (`_supports_sdpa`, `_supports_flash_attn`,
`_supports_attention_backend`) are the ones that transformers checks for its own implementations.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from ...runtime.tracing import constant_in_graphs

NAME = "fattn"
# Used where transformers requires "flash" in the name: see `compat.switch_batching` and `use_packed`.
FLASH_NAME = "fattn_flash"
PAGED_NAME = f"paged|{NAME}"
USE_EAGER = 'use attn_implementation="eager" for this model'
USE_PAGED_EAGER = 'use attn_implementation="paged|eager" for this model'
USE_ANOTHER = 'use attn_implementation="sdpa" or "eager" for this model'


class MaskForm(enum.Enum):
    """The form of mask that a class's layers accept, by the implementations that it declares."""

    PADDING = "flash"  # a 2D padding mask; the pattern is implied
    BOOL = "sdpa"  # 4D, True = attend
    ADDITIVE = "eager"  # 4D, added to the scores


def mask_form(config: PreTrainedConfig) -> MaskForm:
    """The mask form for models of this config. Raises NotImplementedError if they do not use the attention
    interface."""
    form, refusal = _form_or_refusal(type(config))
    if refusal:
        raise NotImplementedError(f"fattn attention: {refusal}; {USE_EAGER}")
    return MaskForm(form)


def refusal_of_model(config: PreTrainedConfig) -> str:
    """Why `mask_form` refuses the models of this config, without advice; empty if it accepts them."""
    return _form_or_refusal(type(config))[1]


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether models of this config carry a state from token to token, so that the attention result of a
    padding token affects later tokens."""
    return _is_recurrent(type(config))


# torch.compile treats the results as constants instead of tracing through the class tree.
@constant_in_graphs
def _is_recurrent(config_class: type[PreTrainedConfig]) -> bool:
    return any(model_class._is_stateful for model_class in _base_classes(config_class))


@constant_in_graphs
def _form_or_refusal(config_class: type[PreTrainedConfig]) -> tuple[str, str]:
    classes = _base_classes(config_class)
    if not classes:
        return "", (
            f"no loaded model class has the config {config_class.__name__}, so nothing shows whether it uses "
            "transformers' attention interface"
        )
    for model_class in classes:
        if not _goes_through_interface(model_class):
            return "", (
                f"{model_class.__name__} does not declare that it uses transformers' attention interface, "
                "and would misread the mask"
            )
    if all(model_class._supports_flash_attn for model_class in classes):
        return MaskForm.PADDING.value, ""
    if all(model_class._supports_sdpa for model_class in classes):
        return MaskForm.BOOL.value, ""
    return MaskForm.ADDITIVE.value, ""


def _base_classes(config_class: type[PreTrainedConfig]) -> list[type[PreTrainedModel]]:
    """The loaded base model classes of a config: `LlamaPreTrainedModel` for `LlamaConfig`. For a config class
    without models, these are the models of its base class, of the config that contains it (T5Gemma), or of
    the Auto classes (InternLM3)."""
    loaded = list(dict.fromkeys(_subclasses(PreTrainedModel)))
    for ancestor in config_class.__mro__:
        if ancestor is PreTrainedConfig:
            break
        if found := _first_with(ancestor, loaded):
            return found
    named = MODEL_MAPPING_NAMES.get(config_class.model_type)
    configs = [(model_class, config) for model_class in loaded for config in _configs_of(model_class)]
    wholes = dict.fromkeys(config for _, config in configs if config_class in config.sub_configs.values())
    built = [config for model, config in configs if model.__name__ == named and _is_transformers(model)]
    return [model_class for config in wholes or built for model_class in _first_with(config, loaded)]


def _configs_of(model_class: type[PreTrainedModel]) -> tuple[type[PreTrainedConfig], ...]:
    """The annotation of a class may name several: `config: MiniMaxM3VLConfig | MiniMaxM3VLTextConfig`."""
    named: Any = model_class.config_class
    return get_args(named) or ((named,) if named else ())


def _is_transformers(model_class: type[PreTrainedModel]) -> bool:
    return model_class.__module__.startswith("transformers.")


def _first_with(
    config_class: type[PreTrainedConfig], loaded: list[type[PreTrainedModel]]
) -> list[type[PreTrainedModel]]:
    return [
        model_class
        for model_class in loaded
        if model_class.config_class is config_class
        and not any(getattr(base, "config_class", None) is config_class for base in model_class.__bases__)
    ]


def _subclasses(model_class: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    for subclass in model_class.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _goes_through_interface(model_class: type[PreTrainedModel]) -> bool:
    declared = model_class._supports_sdpa or model_class._supports_attention_backend
    own = (_has_attention_of_its_own(name, _layers_in(name)) for name in _modules_of(model_class))
    return bool(declared) and not any(own)


def _modules_of(model_class: type[PreTrainedModel]) -> list[str]:
    """The module of a class and those beside it whose layers it imports: remote code may be several files."""
    package = _package(model_class.__module__)
    found = [model_class.__module__]
    for name in found:  # grows during the loop
        beside = {layer.__module__ for layer in _layers_in(name) if _package(layer.__module__) == package}
        found += sorted(beside - set(found))
    return found


def _package(module_name: str) -> str:
    return module_name.rpartition(".")[0]


def _layers_in(module_name: str) -> tuple[type[nn.Module], ...]:
    named = tuple(vars(sys.modules[module_name]).values()) if module_name in sys.modules else ()
    return tuple(thing for thing in named if isinstance(thing, type) and issubclass(thing, nn.Module))


@functools.cache
def _has_attention_of_its_own(module_name: str, layers: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module defines attention layers that never use the interface. `_supports_sdpa` is not enough:
    a class may call F.scaled_dot_product_attention directly (Falcon) or inherit the flag. Like
    `PreTrainedModel.set_attn_implementation`, this reads the source. The layers are an argument because a
    script or notebook may define more later. Layers inserted into a finished model are not found."""
    if not any(layer.__module__ == module_name and _computes(layer) for layer in layers):
        return False
    module = sys.modules[module_name]
    try:
        return "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(module)
    except (OSError, TypeError):  # a notebook
        return "ALL_ATTENTION_FUNCTIONS" not in vars(module)


def _computes(layer: type[nn.Module]) -> bool:
    """Whether this is an attention layer whose `forward` does not delegate to its base class."""
    code = getattr(vars(layer).get("forward"), "__code__", None)
    if code is None or not re.search("attention|attn", layer.__name__, re.IGNORECASE):
        return False
    return not {"super", "forward"} <= {*code.co_names}
