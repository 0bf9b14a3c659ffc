"""Supported model classes and the form of their masks: a rule on the declarations of a class and on whether
its module ever looks up the attention interface, tried on invented classes."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import BloomModel, FalconModel, LlamaConfig, LlamaModel, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, create_causal_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.helpers.synchronisations import Synchronisations
from tests.transformers.tiny_models import DEVICE, TOLERANCE, VISIBLE_ERROR
from torch_fattn.integrations.transformers import NAME, attend, make_mask

LENGTH = 12
SUPPORTS = ("sdpa", "flash_attn", "attention_backend")


def new_model(*supports: str, config: type[PreTrainedConfig] | None = None) -> type[PreTrainedConfig]:
    """A new model class, as remote code brings them, that declares this support; returns its config class."""
    config = config or type("MadeUpConfig", (PreTrainedConfig,), {"model_type": "invented"})
    declared = {f"_supports_{name}": name in supports for name in SUPPORTS}
    invented.append(type("MadeUpModel", (PreTrainedModel,), {"config_class": config, **declared}))
    return config


invented: list[type] = []  # keeps the classes alive: loaded classes count


def mask_for(config: PreTrainedConfig, device: str = "cpu", **options: Any) -> torch.Tensor:
    sizes = {
        "batch_size": 2,
        "q_length": LENGTH,
        "kv_length": LENGTH,
        "device": device,
        "dtype": torch.float32,
    }
    return make_mask(config=config, **sizes | options)


def test_a_model_outside_the_interface_is_refused() -> None:
    with pytest.raises(
        NotImplementedError, match='MadeUpModel .*interface.*; use attn_implementation="eager"'
    ):
        mask_for(new_model()())
    for support in ("sdpa", "attention_backend"):
        mask_for(new_model(support)())


@pytest.mark.parametrize("model", [BloomModel, FalconModel])
def test_library_models_are_refused(model: type[PreTrainedModel]) -> None:
    """Falcon declares sdpa and calls F.scaled_dot_product_attention itself."""
    with pytest.raises(NotImplementedError, match=model.__name__.removesuffix("Model")):
        mask_for(model.config_class())
    mask_for(LlamaModel.config_class())


OWN_MODEL = """
from torch import nn
from transformers import PreTrainedModel

class OwnModel(PreTrainedModel):
    config_class = CONFIG
    _supports_sdpa = True
"""
OWN_ATTENTION = """
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

class OwnAttention({base}):
    {body}
"""
FORWARD = "def forward(self, *inputs, **options):\n        return "


def loaded(name: str, text: str, monkeypatch: pytest.MonkeyPatch, path: Path, **names: Any) -> None:
    """A module from a file, as remote code is loaded."""
    file = path / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize(
    ("base", "body", "accepted"),
    [
        ("nn.Module", FORWARD + "inputs", False),
        ("nn.Module", FORWARD + "ALL_ATTENTION_FUNCTIONS[self.name](*inputs)", True),
        ("LlamaAttention", FORWARD + "inputs", False),
        ("LlamaAttention", FORWARD + "super().forward(*inputs, **options)", True),
        ("LlamaAttention", "scale = 1.0", True),
    ],
)
def test_declared_sdpa_without_the_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: int, base: str, body: str, accepted: bool
) -> None:
    """A class may inherit its declarations, and the layers may be in another file than the model."""
    name = f"own_{files}_{base.partition('.')[0]}_{abs(hash(body))}"
    config = type("OwnConfig", (PreTrainedConfig,), {"model_type": name})
    attention = OWN_ATTENTION.format(base=base, body=body)
    if files == 2:
        loaded(f"{name}_layers", attention, monkeypatch, tmp_path)
        attention = f"from {name}_layers import OwnAttention\n"
    loaded(name, attention + OWN_MODEL, monkeypatch, tmp_path, CONFIG=config)
    invented.append(vars(sys.modules[name])["OwnModel"])
    if accepted:
        mask_for(config())
    else:
        with pytest.raises(NotImplementedError, match="OwnModel"):
            mask_for(config())


def test_a_notebook_that_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without source, and a layer that did not exist when the class was first looked up."""
    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    config = type("NotebookConfig", (PreTrainedConfig,), {"model_type": "notebook"})
    notebook.CONFIG = config  # type: ignore[attr-defined]
    exec(OWN_MODEL, vars(notebook))
    invented.append(notebook.OwnModel)
    mask_for(config())
    exec(OWN_ATTENTION.format(base="nn.Module", body=FORWARD + "inputs"), vars(notebook))
    with pytest.raises(NotImplementedError, match="OwnModel"):
        mask_for(config())
    vars(notebook)["ALL_ATTENTION_FUNCTIONS"] = {}
    other = OWN_ATTENTION.replace("OwnAttention", "OtherAttention")
    exec(other.format(base="nn.Module", body=FORWARD + "inputs"), vars(notebook))
    mask_for(config())


def test_two_models_of_one_config() -> None:
    """It is unknown which of them calls, so both must be supported."""
    config = new_model("sdpa")
    mask_for(config())
    new_model(config=config)
    with pytest.raises(NotImplementedError, match="MadeUpModel"):
        mask_for(config())


def test_a_config_without_a_model() -> None:
    extended = type("ExtendedConfig", (LlamaConfig,), {"model_type": "extended"})
    mask_for(extended())
    alone = type("AloneConfig", (PreTrainedConfig,), {"model_type": "alone"})
    with pytest.raises(NotImplementedError, match="no loaded model class has the config AloneConfig"):
        mask_for(alone())


def test_a_config_of_a_part() -> None:
    """T5Gemma's encoder and decoder have a config that no class names. A class of MiniMax-M3 names two."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaModel

    assert len(get_args(modeling_minimax_m3_vl.MiniMaxM3VLPreTrainedModel.config_class)) == 2
    assert mask_for(T5GemmaModel.config_class().encoder).shape == (2, LENGTH)
    part = type("PartConfig", (PreTrainedConfig,), {"model_type": "part"})
    whole = type("WholeConfig", (PreTrainedConfig,), {"model_type": "whole", "sub_configs": {"part": part}})
    new_model(config=whole)
    with pytest.raises(NotImplementedError, match="MadeUpModel"):
        mask_for(part())


@pytest.mark.parametrize(("builds", "accepted"), [("LlamaModel", True), ("BloomModel", False)])
def test_a_config_that_an_auto_class_builds_another_family_for(
    builds: str, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case of InternLM3 in transformers 5.23."""
    monkeypatch.setitem(MODEL_MAPPING_NAMES, "mapped", builds)
    mapped = type("MappedConfig", (PreTrainedConfig,), {"model_type": "mapped"})
    if accepted:
        mask_for(mapped())
    else:
        with pytest.raises(NotImplementedError, match="Bloom"):
            mask_for(mapped())


def test_form_follows_declaration() -> None:
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    assert mask_for(new_model("sdpa", "flash_attn")()).shape == (2, LENGTH)
    assert mask_for(new_model("sdpa")()).equal(causal)
    assert mask_for(new_model("sdpa")(), attention_mask=padding).equal(causal)
    additive = mask_for(new_model("attention_backend")())
    assert additive.dtype is torch.float32 and (additive == 0).equal(causal)
    padding[0, :3] = False
    assert mask_for(new_model("sdpa", "flash_attn")(), attention_mask=padding).equal(padding)


def test_recurrent_models_get_padding_as_eager_has_it() -> None:
    """Their state carries what attention gives at a padding token on to the others."""
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[0, :3] = False
    config = new_model("sdpa", "flash_attn")
    assert mask_for(config(), attention_mask=padding).equal(padding)
    invented[-1]._is_stateful = True  # type: ignore[attr-defined]
    with Synchronisations() as found:
        additive = mask_for(config(), attention_mask=padding)
    assert additive.shape == (2, 1, LENGTH, LENGTH) and additive.is_floating_point() and found.ops
    assert additive[0, 0, 0].isfinite().all(), "a row without a key is the mean of all values"
    assert mask_for(config(), attention_mask=torch.ones_like(padding)).shape == (2, LENGTH)
    with Synchronisations() as found:  # a step does not wait
        step = mask_for(config(), attention_mask=padding, q_length=1, q_offset=LENGTH - 1)
    assert step.equal(padding) and not found.ops


Attention = Callable[[torch.Tensor | None], torch.Tensor]


@pytest.fixture(params=[True, False, None])
def attention_of_layer(request: pytest.FixtureRequest) -> Attention:
    layer = nn.Module()
    if request.param is not None:
        layer.is_causal = request.param
    tensors = torch.randn(3, 2, 4, LENGTH, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return lambda mask: attend(layer, *tensors, mask)[0].cpu()


def test_the_mask_has_the_pattern(attention_of_layer: Attention) -> None:
    """Whatever `is_causal` of the layer is, as under eager attention: the layers of BigBird-Pegasus and
    PaliGemma declare themselves bidirectional although their mask is causal."""
    config = LlamaModel.config_class()
    bidirectional = {"mask_function": bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    causal_4d = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril()[None, None]
    full = attention_of_layer(mask_for(config, DEVICE, **bidirectional))
    causal = attention_of_layer(mask_for(config, DEVICE))
    assert (full - attention_of_layer(torch.ones_like(causal_4d))).abs().max() < TOLERANCE
    assert (causal - attention_of_layer(causal_4d)).abs().max() < TOLERANCE
    assert (causal - full).abs().max() > VISIBLE_ERROR


def test_mask_made_twice() -> None:
    """A composite model makes a mask and its text model makes one of it again."""
    config = LlamaConfig()
    config._attn_implementation = NAME
    embeddings = torch.zeros(2, LENGTH, 8)
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[0, :3] = False
    for mask in (None, padding):
        once = create_causal_mask(config, embeddings, mask, None)
        assert create_causal_mask(config, embeddings, once, None).equal(once)
