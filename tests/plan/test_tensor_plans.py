"""Which calls are planned on tensor operations: the state of the GPU decides, and everything that the
kernels do not take falls to those of simdgroup matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_fattn
from tests.helpers.tensor_kernels import (
    BACKWARD_KERNELS,
    DIMS,
    DTYPES,
    KERNEL,
    LATENT,
    LATENT_KERNEL,
    LATENT_VALUE,
    STATES,
)

pytestmark = pytest.mark.host_only

M5: dict[str, Any] = {"device_name": "Apple M5", "family": 10, "cores": 10}
HEADS = "they are for heads of 64, 72, 80, 96, 128, 192, 256, and of 576 with values of 512"
UNEQUAL = "they are for values as wide as keys, or of 512 columns beside 576"
SIMDGROUP_KERNELS = ("fattn_prefill", "fattn_prefill_wide")


def operands(
    dtype: torch.dtype = torch.float16, dim: int = 128, value_dim: int | None = None, rows: int = 512
) -> list[torch.Tensor]:
    sizes = ((8, rows, dim), (2, 512, dim), (2, 512, value_dim or dim))
    return [torch.empty(1, *size, dtype=dtype, device="meta") for size in sizes]


def plan(*tensors: torch.Tensor, op: str = "prefill", tensor: str = "registers", **options: Any) -> Any:
    return torch_fattn.explain(op, *tensors, **M5, tensor=tensor, **options)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dim", [*DIMS, LATENT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_taken(dtype: torch.dtype, dim: int, state: str) -> None:
    """Latent heads have one variant, through threadgroup memory."""
    is_latent = dim == LATENT
    explained = plan(*operands(dtype, dim, LATENT_VALUE if is_latent else dim), tensor=state)
    (step,) = explained.passes
    registers = state == "registers" and not is_latent
    assert step["kernel"] == (LATENT_KERNEL if is_latent else KERNEL) and step["threadgroup_bytes"] <= 32768
    assert step["macros"]["FATTN_REGISTERS"] == str(int(registers))
    words = "stay in registers" if registers else "pass through threadgroup memory"
    assert explained.data["tensor"] == f"used; scores {words}"
    assert "tensors      used; scores " in str(explained)


def decode_of(rows: int, heads: int = 8, keys: int = 512, dim: int = 128) -> list[torch.Tensor]:
    sizes = ((heads, rows, dim), (2, keys, dim), (2, keys, dim))
    return [torch.empty(2, *size, dtype=torch.float16, device="meta") for size in sizes]


@pytest.mark.parametrize(
    ("rows", "heads", "dim", "row_groups"),
    [(6, 8, 128, 2), (8, 8, 64, 2), (9, 8, 128, 4), (16, 16, 96, 4), (3, 16, 256, 2), (12, 4, 128, 2)],
)
def test_decodes_of_many_rows(rows: int, heads: int, dim: int, row_groups: int) -> None:
    """A tile has as many groups of 16 rows as the rows fill, up to those of a prefill."""
    explained = plan(*decode_of(rows, heads, dim=dim), op="decode")
    step = explained.passes[0]
    assert step["kernel"] == KERNEL and explained.data["tensor"].startswith("used; scores ")
    assert step["macros"]["FATTN_ROW_GROUPS"] == str(row_groups)
    assert step["constants"]["causal"] and step["constants"]["grouped"]


def test_unsupported_decodes() -> None:
    for rows, heads in ((5, 8), (16, 2), (1, 46)):
        explained = plan(*decode_of(rows, heads), op="decode")
        assert explained.passes[0]["kernel"].startswith("fattn_decode")
        assert explained.data["tensor"] == "fewer than 24 rows of a decode share keys"


@pytest.mark.parametrize(("rows", "taken"), [(15, False), (16, True)])
def test_decodes_of_latent_heads(rows: int, taken: bool) -> None:
    query, key = (torch.empty(2, heads, 1, 576, dtype=torch.float16, device="meta") for heads in (rows, 1))
    explained = plan(query, key, key[..., :512], op="decode")
    assert (explained.passes[0]["kernel"] == LATENT_KERNEL) == taken


def test_decodes_under_a_mask() -> None:
    """Heads share a tile, as there is no map of rows of one head."""
    mask = torch.empty(2, 8, 6, 512, dtype=torch.bool, device="meta")
    step = plan(*decode_of(6), attn_mask=mask, op="decode").passes[0]
    assert step["kernel"] == KERNEL and step["constants"]["grouped"]


def test_parts_of_a_decode() -> None:
    """A cache has parts for what it can hold, as many as fill the GPU at most. Neither the batch nor the
    capacity changes how a sequence is cut."""
    cuts, launches = set(), []
    for keys in (256, 300, 2000, 100_000):
        explained = plan(*decode_of(6, keys=keys), op="decode")
        params = explained.passes[0]["params"]
        cuts.add(tuple(params[name] for name in ("max_parts", "min_part", "largest_part")))
        launches.append((len(explained.passes), params["parts"], explained.data["launches"][:3]))
    assert len(cuts) == 1
    assert launches == [(1, 1, "one"), (2, 2, "two"), (2, 8, "two"), (2, 20, "two")]


def backward_plan(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    """With the result of the forward and its remainder."""
    out, lse = query[..., : value.shape[-1]], torch.empty(query.shape[:-1], device="meta")
    given = {"out_remainder": out, "op": "prefill_backward"} | options
    return plan(out, None, query, key, value, out, lse, **given)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_taken(dtype: torch.dtype, dim: int, state: str) -> None:
    explained = backward_plan(*operands(dtype, dim), tensor=state)
    assert tuple(step["kernel"] for step in explained.passes) == BACKWARD_KERNELS
    assert all(step["threadgroup_bytes"] <= 32768 for step in explained.passes)
    assert explained.data["tensor"].startswith("used; scores ")


def test_unsupported_gradients() -> None:
    """Also where a prefill of the same operands is: its tiles have rows of several heads."""
    tensors = operands(rows=15)
    assert plan(*tensors).passes[0]["kernel"] == KERNEL
    assert backward_plan(*tensors).data["tensor"] == "fewer than 16 rows share keys"
    without = backward_plan(*operands(), out_remainder=None)
    assert without.data["tensor"] == "out came without its remainder"
    apart = torch.empty(1, 8, 64, 65536, dtype=torch.float16, device="meta")[..., :128]
    explained = backward_plan(apart, *operands()[1:])
    why = "rows of query or of the gradient of out are not 1 to 65,535 elements apart"
    assert explained.data["tensor"] == why
    assert [step["kernel"] for step in explained.passes] == ["fattn_backward_query", "fattn_backward_key"]


@pytest.mark.parametrize(("state", "why"), [("off", None), ("untested", "not tested yet on this GPU")])
def test_not_trusted(state: str, why: str | None) -> None:
    explained = plan(*operands(), tensor=state)
    assert explained.passes[0]["kernel"] == "fattn_prefill"
    assert explained.data.get("tensor") == why


def test_no_gpu_has_them_by_default() -> None:
    for family in (7, 9, 10):
        explained = torch_fattn.explain("prefill", *operands(), family=family, cores=10)
        assert explained.passes[0]["kernel"] == "fattn_prefill" and "tensor" not in explained.data


def _aligned(elements: int) -> list[torch.Tensor]:
    """Keys and values that lie so many elements apart."""
    query, key, value = operands(rows=64)
    apart = torch.empty(1, 2, 512, elements, dtype=key.dtype, device="meta")[..., : key.shape[-1]]
    return [query, apart, apart]


def _on_one_row() -> list[torch.Tensor]:
    query, key, value = operands(rows=64)
    return [query, key[..., :1, :].expand_as(key), value]


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (operands(torch.float32), "they are for float16 and bfloat16"),
        (operands(dim=128, value_dim=64), UNEQUAL),
        (operands(dim=576, value_dim=256), UNEQUAL),
        (operands(dim=112), HEADS),
        (operands(dim=40), HEADS),
        (operands(dim=512), HEADS),
        (operands(dim=576), HEADS),
        (operands(rows=3), "fewer than 16 rows share keys"),
        (_aligned(132), "the rows of query, key and value do not start on 16-byte boundaries"),
        (_aligned(65536), "rows of key or value are not 1 to 65,535 elements apart"),
        (_on_one_row(), "rows of key or value are not 1 to 65,535 elements apart"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_not_taken(tensors: list[torch.Tensor], why: str) -> None:
    explained = plan(*tensors)
    assert explained.passes[0]["kernel"] in SIMDGROUP_KERNELS
    assert explained.data["tensor"] == why


@pytest.mark.parametrize("tensors", [operands(rows=4), _aligned(136), _aligned(65528)])
def test_just_taken(tensors: list[torch.Tensor]) -> None:
    """The controls of the limits above."""
    assert plan(*tensors).passes[0]["kernel"] == KERNEL


def test_rows_under_a_mask() -> None:
    """Heads do not share a tile then."""
    for rows, kernel in ((15, "fattn_prefill"), (16, KERNEL)):
        mask = torch.empty(1, 1, rows, 512, dtype=torch.bool, device="meta")
        assert plan(*operands(rows=rows), attn_mask=mask).passes[-1]["kernel"] == kernel


def test_quantised_caches_are_not_taken() -> None:
    query = torch.empty(70, 4, 128, dtype=torch.float16, device="meta")
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    tables = torch.empty(2, 8, dtype=torch.int32, device="meta")
    for stored, kernel in ((torch.float16, KERNEL), (torch.int8, "fattn_prefill")):
        pool = torch.empty(8, 16, 2, 128, dtype=stored, device="meta")
        scales = torch.empty(8, 16, 2, dtype=torch.float32, device="meta")
        both = {"key_scales": scales, "value_scales": scales} if stored == torch.int8 else {}
        explained = plan(
            *(query, pool, pool, tables, bounds[1:], bounds, 70), is_causal=True, op="paged_prefill", **both
        )  # fmt: skip
        assert explained.passes[0]["kernel"] == kernel


def test_routes() -> None:
    """torch's own prefill on matrix units has a call only if ours does not run on them."""
    on_torch = {"macos": "26.2", "torch_version": "2.15"}
    routes = [plan(*operands(), tensor=state, **on_torch).route for state in ("off", "untested", *STATES)]
    assert [route.to for route in routes] == ["torch", "torch", "fattn", "fattn"]
    waits = ["the first call runs the self-test" in route.why for route in routes]
    assert waits == [False, True, False, False]
    assert plan(*operands(torch.float16, 256), **on_torch).route.to == "fattn"


def test_an_unknown_state() -> None:
    with pytest.raises(ValueError, match="tensor 'on' is not a mode of tensor operations; use one of off"):
        plan(*operands(), tensor="on")
