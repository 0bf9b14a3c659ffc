"""attention() and varlen_attention() in torch's transforms: checkpoints, torch.compile, compiled autograd,
torch.func and autocast."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.compiled_autograd import _enable
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torch_fattn
from tests.conftest import counted_launches
from tests.operators.test_attention import (
    NAMES,
    SLOPES,
    Operands,
    gradients,
    kept_by,
    leaves,
    operands,
    packed,
    token_major,
    with_lse,
)
from torch_fattn import attention, varlen_attention

# One of four heads sees no key.
BLOCKS = {"block_mask": torch.tensor([True, False, True, True]).view(1, 4, 1, 1), "block_size": (32, 64)}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool, device: str) -> None:
    given = operands(device, is_causal=True)

    def in_checkpoint(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        call = lambda *o: attention(*o, **options, return_lse=True)  # noqa: E731
        return checkpoint(call, query, key, value, use_reentrant=use_reentrant)

    mine, plain = (gradients(f, given) for f in (in_checkpoint, with_lse(attention)))
    assert all(torch.equal(mine[n], plain[n]) for n in NAMES[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keeps", [False, True])
def test_selective_checkpoint(keeps: bool, dtype: torch.dtype, device: str) -> None:
    """It may keep the results of the forward, so that the kernel runs once."""
    given = operands(device, dtype, is_causal=True)
    forwards = [torch.ops.fattn.attention.default, torch.ops.fattn.attention.with_remainder]
    contexts = partial(create_selective_checkpoint_contexts, forwards if keeps else [])

    def in_checkpoint(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        call = partial(attention, **options, return_lse=True)
        return checkpoint(call, query, key, value, use_reentrant=False, context_fn=contexts)

    plain = gradients(with_lse(attention), given)
    with counted_launches() as launches:
        mine = gradients(in_checkpoint, given)
    assert all(torch.equal(mine[n], plain[n]) for n in plain)
    assert device == "cpu" or launches["fattn_prefill"] == (1 if keeps else 2)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", ["attention", "varlen_attention"])
def test_compile(op: str, dynamic: bool, device: str) -> None:
    assert_compiled_alike(op, dynamic, "aot_eager", device)


@pytest.mark.host_only
@pytest.mark.parametrize("op", ["attention", "varlen_attention"])
def test_compile_by_inductor(op: str) -> None:
    """On mps it writes Metal of its own."""
    assert_compiled_alike(op, True, "inductor", "cpu")


def assert_compiled_alike(op: str, dynamic: bool, backend: str, device: str) -> None:
    given = token_major(operands(device, is_causal=True, **BLOCKS)) if op == "attention" else packed(device)
    function = getattr(torch_fattn, op)

    def scaled(query: Tensor, **others: Any) -> Any:
        return function(query * 1.5, **others, return_lse=True)

    torch.compiler.reset()
    compiled = torch.compile(scaled, backend=backend, fullgraph=True, dynamic=dynamic)
    is_dense = op == "attention"
    mine, plain = (gradients(f, given, with_lse=is_dense) for f in (compiled, scaled))
    assert all(torch.equal(mine[n], plain[n]) for n in mine)


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"is_causal": True, "window_left": 4},
    "sinks and slopes": {"sinks": torch.ones(4), "alibi_slopes": SLOPES},
}


def backward_of(op: str, given: Operands, compiler: Any = None, frozen: str = "") -> dict[str, Tensor | None]:
    """The gradients of a call, from a backward in compiled autograd if there is a compiler."""
    leaf = leaves(given)
    if frozen:
        leaf[frozen].requires_grad_(False)
    results = getattr(torch_fattn, op)(**leaf, return_lse=True)
    total = sum(each.square().sum() for each in results if each.isfinite().all())
    with contextlib.nullcontext() if compiler is None else _enable(compiler):
        total.backward()
    return {n: leaf[n].grad for n in NAMES if n in leaf}


class Graphs:
    """A compiler of compiled autograd's that keeps what it is given."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.found: list[Any] = []

    def __call__(self, graph: Any) -> Any:
        self.found.append(graph)
        return torch.compile(graph, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
@pytest.mark.parametrize("op", ["attention", "varlen_attention"])
def test_compiled_autograd(op: str, options: dict[str, Any], device: str) -> None:
    """The second call has the graph of the first, and one without a gradient of keys its own."""
    blocks = {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "block_size": (32, 64)}
    given = packed(device) if op == "varlen_attention" else operands(device, **blocks)
    given |= {n: v.to(device) if isinstance(v, Tensor) else v for n, v in options.items()}
    graphs = Graphs()
    for frozen, count in (("", 1), ("", 1), ("key", 2)):
        eager, mine = backward_of(op, given, frozen=frozen), backward_of(op, given, graphs, frozen)
        for name, gradient in eager.items():
            assert (gradient is None) == (name == frozen), name
            assert gradient is None or torch.equal(gradient, mine[name]), name
        assert len(graphs.found) == count


def test_numbers_are_constants_of_compiled_autograd(device: str) -> None:
    graphs = Graphs()
    for softcap, count in ((2.0, 1), (3.0, 2), (2.0, 2)):
        given = operands(device, softcap=softcap)
        eager, mine = backward_of("attention", given), backward_of("attention", given, graphs)
        assert torch.equal(eager["query"], mine["query"]) and len(graphs.found) == count


def test_compiled_autograd_of_one_result(device: str) -> None:
    """The other one has no gradient, which is not a tensor of the graph."""
    torch.compiler.reset()
    for result in (0, 1):
        found = []
        for compiled in (False, True):
            leaf = leaves(operands(device, torch.bfloat16, is_causal=True))
            total = attention(**leaf, return_lse=True)[result].float().square().sum()
            with _enable(torch.compile(backend="aot_eager")) if compiled else contextlib.nullcontext():
                total.backward()
            found.append([leaf[n].grad for n in NAMES[:3]])
        assert all(map(torch.equal, *found)) and found[0][0].any()


@pytest.mark.host_only
@pytest.mark.parametrize("op", ["attention", "varlen_attention"])
def test_opcheck(op: str) -> None:
    """With gradients, of which opcheck knows those of the CPU."""
    given = leaves(packed("cpu") if op == "varlen_attention" else operands("cpu", is_causal=True, **BLOCKS))
    overload = getattr(torch.ops.fattn, op).default
    positional = tuple(given.pop(a.name, None) for a in overload._schema.arguments if not a.kwarg_only)
    assert set(torch.library.opcheck(overload, positional, given).values()) == {"SUCCESS"}


def square(**given: Any) -> Tensor:
    return attention(**given).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_func_grad(dtype: torch.dtype, device: str) -> None:
    """Also inside of a graph, to which the other operands belong."""
    given = operands(device, dtype, is_causal=True, sinks=torch.ones(4))
    names = [n for n in given if n in NAMES]
    others = {n: v for n, v in given.items() if n not in NAMES}
    mine = torch.func.grad(lambda of: square(**of, **others))({n: given[n] for n in names})
    leaf = leaves(given)
    square(**leaf).backward()
    assert all(torch.equal(mine[n], leaf[n].grad) for n in names)
    outer = leaves(given)
    query = outer.pop("query").detach()
    mine["query"], total = torch.func.grad_and_value(lambda q: square(query=q, **outer))(query)
    total.backward()
    assert torch.equal(mine["query"], leaf["query"].grad)
    assert all(torch.equal(outer[n].grad, leaf[n].grad) for n in names[1:])


VMAPS: dict[str, dict[str, Any]] = {
    "batch": {},
    "sinks": {"sinks": (3, 4)},
    "one sinks": {"sinks": (4,)},
    "slopes": {"alibi_slopes": (3, 4)},
    "slopes of sequences": {"alibi_slopes": (3, 2, 4)},
    "one slopes": {"alibi_slopes": (4,)},
    "slopes and sinks": {"alibi_slopes": (2, 4), "sinks": (4,)},
    "one key": {"key": (2, 2, 9, 16)},
    "mask": {"attn_mask": (3, 7, 9)},
    "mask of sequences": {"attn_mask": (3, 2, 1, 7, 9), "sinks": (4,)},
    "one mask": {"attn_mask": (2, 4, 7, 9), "sinks": (3, 4)},
    "one mask of rows": {"attn_mask": (7, 9)},
    "lengths": {"seq_lens": (3, 2)},
    "lengths with sinks": {"seq_lens": (3, 2), "sinks": (4,)},
    "one lengths": {"seq_lens": (2,), "sinks": (3, 4)},
    "blocks": {"block_mask": (3, 2, 4, 1, 1)},
    "one block mask": {"block_mask": (1, 4, 1, 1)},
}


@pytest.mark.parametrize("sizes", VMAPS.values(), ids=VMAPS)
def test_vmap(sizes: dict[str, tuple[int, ...]], device: str) -> None:
    """Each call has its own gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"query": (3, 2, 4, 7, 16), "key": (3, 2, 2, 9, 16)}
    shapes |= {"value": (3, 2, 2, 9, 8)} | sizes
    given: Operands = {n: torch.randn(s, generator=generator).to(device) for n, s in shapes.items()}
    if "attn_mask" in given:
        given["attn_mask"] = given["attn_mask"] > -0.5
    if "block_mask" in given:
        given |= {"block_mask": given["block_mask"] > -0.5, "block_size": (32, 64)}
    if "seq_lens" in given:
        given["seq_lens"] = (given["seq_lens"].abs() * 6).int()
    dims = {n: 0 if n in shapes and shapes[n][0] == 3 else None for n in given}

    def of(i: int) -> Operands:
        return {n: v if dims[n] is None else v[i] for n, v in given.items()}

    def gradient(given: Operands) -> dict[str, Tensor]:
        others = {n: v for n, v in given.items() if n not in NAMES}
        return torch.func.grad(lambda of: square(**of, **others))({n: given[n] for n in given if n in NAMES})

    out = torch.func.vmap(lambda g: attention(**g), in_dims=(dims,))(given)
    found = torch.func.vmap(gradient, in_dims=(dims,))(given)
    for i in range(3):
        assert torch.allclose(out[i].cpu(), attention(**of(i)).cpu(), atol=1e-5)
        for name, one in gradient(of(i)).items():
            assert torch.allclose(found[name][i].cpu(), one.cpu(), atol=2e-4), name


def test_vmap_of_other_dimensions_and_in_itself(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 5, 3, 4, 7, 16, generator=generator).to(device)
    twice = torch.func.vmap(torch.func.vmap(lambda q: attention(q, q, q), in_dims=1, out_dims=2))(query)
    for i in range(2):
        for j in range(3):
            one = query[i, :, j]
            assert torch.allclose(twice[i, :, :, j].cpu(), attention(one, one, one).cpu(), atol=1e-5)


def test_vmap_of_packed_sequences(device: str) -> None:
    given = {n: v.half() if n in NAMES else v for n, v in packed(device).items()}
    many = torch.stack([given["query"], given["query"].flip(0)])
    others = {n: v for n, v in given.items() if n != "query"}

    def gradient(query: Tensor) -> Tensor:
        return torch.func.grad(lambda q: varlen_attention(q, **others).square().sum())(query)

    found = torch.func.vmap(gradient)(many)
    for i in range(2):
        assert torch.allclose(found[i].cpu(), gradient(many[i]).cpu(), atol=1e-5)
    lens = torch.stack([given["cu_seqlens_q"]] * 2)
    out = torch.func.vmap(lambda cu: varlen_attention(**{**given, "cu_seqlens_q": cu}))(lens)
    assert torch.equal(out, torch.stack([varlen_attention(**given)] * 2))


def test_autocast(device: str) -> None:
    """The cast operands are kept, and gradients have the dtypes of the leaves."""
    given = leaves(operands(device))
    with torch.autocast(device, torch.bfloat16):
        kept = kept_by(lambda: attention(**given))
        out = attention(**given)
    assert out.dtype == torch.bfloat16 and [t.dtype for t in kept[:3]] == [torch.bfloat16] * 3
    out.float().sum().backward()
    assert given["query"].grad.dtype == torch.float32 and given["query"].grad.any()
