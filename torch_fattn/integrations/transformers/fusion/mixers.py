"""Layers of linear attention, gated delta net and KDA, between their projections: one kernel in a decode
step, and four in a prefill.

A layer is fused if `readers` knows the source of its forward. In other layers the functions that they call
are, by `delta_functions`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ....operators.delta import MAX_STEP_LENGTH
from . import norms, running
from .delta_functions import ACTIVATIONS, RULES, Form, is_column_count
from .readers import FAMILIES, Family, Operands, source_of

_MARK = "_fattn_mixer"  # the family of a fused layer
_SPARE = "_fattn_conv_state"  # where the next step of a cache's states writes that of the convolution


def is_mixer(module: nn.Module) -> bool:
    """Whether its forward calls a function of linear attention."""
    return bool(_rules(type(module)))


def _rules(kind: type[nn.Module]) -> list[str]:
    """The names of those functions."""
    code = getattr(_own_forward(kind), "__code__", None)
    return [] if code is None else [name for name in RULES if name in code.co_names]


def _own_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    return inspect.unwrap(kind.forward)


def fuse(layer: nn.Module, functions: Mapping[str, Form | str]) -> str:
    """Fuses a layer, whose norm is fused, if its family is known and its functions have their form. Returns
    why not, or an empty string."""
    if is_fused(layer):
        return ""
    if "forward" not in vars(type(layer)):
        return "its class inherits the forward"
    file = type(layer).__module__.rpartition(".")[2]
    if not all(functions.get(f"{file}.{name}") is Form.RULE for name in _rules(type(layer))):
        return "its functions compute something else than the gated delta rule"
    source = source_of(layer)
    family = FAMILIES.get(source)
    why = f"the source {source} of its forward is not known" if family is None else _fault(layer, family)
    if why:
        return f"{why}; its functions are fused"
    layer.forward = MethodType(forward, layer)
    vars(layer)[_MARK] = family
    return ""


def _fault(layer: Any, family: Family) -> str:
    if norms.replaced_by(layer) not in (None, forward):
        return "its forward is replaced"
    keys, values, *columns = family.sizes(layer)
    norm, gates, taps = getattr(layer, family.norm), getattr(layer, "forget_gate", layer), layer.conv1d.weight
    if layer.activation not in ACTIVATIONS or layer.activation is None:
        return f"there is no kernel for the activation {layer.activation}"
    if not all(map(is_column_count, columns)) or values % keys or not 2 <= taps.shape[-1] <= 8:
        return "there is no kernel for its sizes"
    if not norms.is_fused(norm) or not norms.form_in(norm).is_gated:
        return "its norm is not fused"
    if norm.weight is None or norms.form_in(norm).alike["norm"] == "plus_one":
        return "its norm does not multiply by a weight"
    counts = {
        taps: (2 * keys * columns[0] + values * columns[1]) * taps.shape[-1],
        gates.A_log: values,
        gates.dt_bias: values * (1 if gates is layer else columns[0]),
    }
    if any(type(each) is not nn.Parameter or each.is_meta or each.numel() != counts[each] for each in counts):
        return "its weights are shards, or not in memory"
    return ""


def restore(layer: nn.Module) -> None:
    vars(layer).pop(_MARK, None)
    if norms.replaced_by(layer) is forward:
        del layer.forward


def is_fused(layer: nn.Module) -> bool:
    return _MARK in vars(layer) and norms.replaced_by(layer) is forward


def forward(
    layer: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **options: Any
) -> Tensor:
    """The forward of a fused layer. Runs the layer's own for calls that the operators do not take, which
    are those of `running.takes`, while the cache records the past, and if its class has another by now."""
    cache = options.pop("cache_params", cache)  # its name until 5.23
    family: Family | None = vars(layer).get(_MARK)
    is_fusable = is_mixer(layer) and running.takes(hidden_states)
    if is_fusable and family is not None and _has_plain_modules(layer, family):
        packed = options.get("cu_seq_lens_q")
        states = None if cache is None else cache.layers[layer.layer_idx]
        if _fits(layer, family, states, hidden_states, packed):
            return _run(layer, family, hidden_states, states, attention_mask, packed)
    own: Tensor = type(layer).forward(layer, hidden_states, cache, attention_mask, **options)
    return own


def _run(
    layer: Any, family: Family, hidden_states: Tensor, states: Any, mask: Any, packed: Tensor | None
) -> Tensor:
    mask_padding = _own_forward(type(layer)).__globals__["apply_mask_to_padding_states"]
    x = mask_padding(hidden_states, mask)
    begun = states is not None and states.has_previous_state[0]
    is_step = begun and x.shape[1] <= MAX_STEP_LENGTH
    operands = family.read(layer, x, is_step)
    if is_step and operands.gates is not None:
        out = _step(layer, family, operands, states)
    else:
        out = _prefill(layer, family, operands, states, packed)
    result: Tensor = getattr(layer, family.projection)(out.flatten(2))
    return result


def _step(layer: Any, family: Family, operands: Operands, states: Any) -> Tensor:
    norm, conv_state = getattr(layer, family.norm), states.conv_states[0]
    form, spare = norms.form_in(norm), vars(states).get(_SPARE)
    if spare is None or (spare.shape, spare.dtype) != (conv_state.shape, conv_state.dtype):
        with torch.inference_mode(conv_state.is_inference()):
            spare = torch.empty_like(conv_state)
    out: Tensor = torch.ops.fattn.gated_delta_step(
        *_heads(layer, family, operands, operands.rows),
        *(operands.z, operands.a, operands.b, *_gates(operands)),
        *(layer.conv1d.weight[:, 0], layer.conv1d.bias, norm.weight),
        *(conv_state, states.recurrent_states[0]),
        conv_state_out=spare,
        gate=form.alike["activation"],
        eps=getattr(norm, form.eps),
    )
    states.conv_states[0], vars(states)[_SPARE] = spare, conv_state
    return out


def _prefill(layer: Any, family: Family, operands: Operands, states: Any, packed: Tensor | None) -> Tensor:
    if packed is not None:
        packed = packed.to(torch.int32)
    rows = operands.rows[0] if len(operands.rows) == 1 else torch.cat(operands.rows, -1)
    conv_state = state = none = None
    if states is not None:
        if not states.has_previous_state[0]:
            none = _none(len(rows), rows.device)
            _begin(layer, family, states, rows)
        conv_state, state = states.conv_states[0], states.recurrent_states[0]
    rows = torch.ops.fattn.causal_conv1d(
        *(rows, layer.conv1d.weight[:, 0], layer.conv1d.bias, conv_state),
        cu_seqlens=packed,
        activation="silu",
    )
    a_log, dt_bias = _gates(operands)
    out = torch.ops.fattn.gated_delta_rule(
        *_heads(layer, family, operands, (rows,)),
        *(operands.a, operands.b, state),
        A_log=a_log,
        dt_bias=dt_bias,
        has_initial_state=none,
        cu_seqlens=packed,
        use_qk_l2norm_in_kernel=True,
    )
    result: Tensor = getattr(layer, family.norm)(out, operands.z.reshape(out.shape))
    return result


def _heads(layer: Any, family: Family, operands: Operands, rows: tuple[Tensor, ...]) -> list[Tensor]:
    """Query, key and value, the last with the axes that b has."""
    keys, values, columns, value_columns = family.sizes(layer)
    if len(rows) == 1:
        rows = rows[0].split([keys * columns, keys * columns, values * value_columns], -1)
    shapes = (keys, columns), (keys, columns), (*operands.b.shape[2:], value_columns)
    return [row.view(*row.shape[:2], *shape) for row, shape in zip(rows, shapes, strict=True)]


def _gates(operands: Operands) -> tuple[Tensor | None, Tensor | None]:
    """A_log and dt_bias in the shapes of the operators."""
    if operands.gates is None:
        return None, None
    a_log, dt_bias = operands.gates
    return a_log.flatten(), dt_bias.reshape(-1, *operands.a.shape[operands.b.ndim :])


def _has_plain_modules(layer: Any, family: Family) -> bool:
    """Whether no hook waits for modules whose weights the operators read: accelerate's, that loads them, and
    others, which want to be called."""
    norm = getattr(layer, family.norm)
    if any("_hf_hook" in vars(child) for child in layer.children()) or not norms.is_fused(norm):
        return False
    skipped = norm, getattr(layer, "forget_gate", norm)
    return running.is_counted() or not any(m._forward_hooks or m._forward_pre_hooks for m in skipped)


def _fits(layer: Any, family: Family, states: Any, x: Tensor, packed: Tensor | None) -> bool:
    """Whether the operators take its weights, and the states are those of its sequences."""
    weight, gates = layer.conv1d.weight, getattr(layer, "forget_gate", layer)
    weights = weight, getattr(layer, family.norm).weight, gates.A_log, gates.dt_bias
    if any(each.dtype not in (x.dtype, torch.float32) for each in weights):
        return False
    if states is None:
        return True
    if packed is not None:
        return False  # the cache has no place for a state of each
    if getattr(states, "record_past", True):
        return False  # another kind of layer, or one that keeps more columns than a step does
    found = states.conv_states[0], states.recurrent_states[0]
    if all(state is None for state in found):
        return not states.has_previous_state[0]
    keys, values, columns, value_columns = family.sizes(layer)
    shapes = (len(x), weight.shape[0], weight.shape[2]), (len(x), values, columns, value_columns)
    return all(
        type(state) is Tensor
        and (state.shape, state.dtype, state.device) == (shape, dtype, x.device)
        and state.is_contiguous()
        for state, shape, dtype in zip(found, shapes, (x.dtype, torch.float32), strict=True)
    )


@functools.cache
def _none(sequences: int, device: torch.device) -> Tensor:
    """That no sequence has an initial state."""
    return torch.zeros(sequences, dtype=torch.bool, device=device)


def _begin(layer: Any, family: Family, states: Any, rows: Tensor) -> None:
    """As the first update of a cache's states does, but for the zeros of the matrices."""
    keys, values, columns, value_columns = family.sizes(layer)
    taps = layer.conv1d.weight.shape[2]
    if not states.is_conv_states_initialized[0]:
        new = rows.new_empty(len(rows), rows.shape[2], taps)
        states.lazy_initialization(conv_states=new, conv_kernel_size=taps)
    if not states.is_recurrent_states_initialized[0]:
        shape = len(rows), values, columns, value_columns
        states.recurrent_states[0] = rows.new_empty(shape, dtype=torch.float32)  # written before it is read
        states.is_recurrent_states_initialized[0] = True
    states.has_previous_state[0] = True
