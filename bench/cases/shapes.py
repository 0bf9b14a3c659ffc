"""Named sets of calls: what `--shapes` chooses from. Several are the layers of a real model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .calls import Call


def _decodes(base: Call, *lengths: int, batches: tuple[int, ...] = (1,)) -> Iterator[Call]:
    for batch in batches:
        for length in lengths:
            yield replace(base, batch=batch, kv_len=length)


def _prefills(base: Call, *lengths: int) -> Iterator[Call]:
    for length in lengths:
        yield replace(base, q_len=length, kv_len=length)


def _model(
    name: str, q_heads: int, kv_heads: int, head_dim: int, decode: tuple[int, ...], prefill: tuple[int, ...]
) -> list[Call]:
    step = Call("decode", q_heads, kv_heads, head_dim, 1, 0, model=name)
    paged = replace(step, op="paged_decode", block_size=16)
    prompt = replace(step, op="prefill", causal=True)
    return [*_decodes(step, *decode), *_decodes(paged, *decode[:1]), *_prefills(prompt, *prefill)]


def _standard() -> list[Call]:
    """The default: decode of a 32/8 model, and prefill of 32 heads."""
    step = Call("decode", 32, 8, 128, 1, 0, model="Llama-3-8B")
    calls = list(_decodes(step, 4096, 32768, 131072, batches=(1, 16)))
    for head_dim in (64, 128):
        for causal in (True, False):
            prompt = Call("prefill", 32, 32, head_dim, 0, 0, causal=causal, model="H32")
            calls += _prefills(prompt, 2048, 8192)
    return calls


def _decode() -> list[Call]:
    """Decodes of the record: short and long caches, groups, head sizes, pages, a quantised cache, and one
    long sequence among short ones."""
    step = Call("decode", 32, 8, 128, 1, 131072, model="32/8")
    long, short = 65536, 512
    return [
        *_decodes(step, 256, 1024, 4096, 32768, 131072),
        *_decodes(step, 8192, batches=(16,)),
        replace(step, op="paged_decode", block_size=16),
        *(replace(step, kv_heads=32 // group, model=f"group of {group}") for group in (1, 8, 16)),
        *(replace(step, head_dim=head_dim) for head_dim in (64, 96, 256)),
        replace(step, kv_format="int8"),
        replace(step, batch=16, kv_len=long, lengths=(long, *[short] * 15), model="uneven"),
    ]


def _prefill() -> list[Call]:
    """Prefills of the record: head sizes, lengths, 16-bit dtypes, causal and full."""
    prompt = Call("prefill", 32, 32, 128, 0, 0, causal=True, model="H32")
    lengths = [
        call
        for dtype in ("float16", "bfloat16")
        for head_dim in (64, 96, 128)
        for causal in (True, False)
        for call in _prefills(replace(prompt, dtype=dtype, head_dim=head_dim, causal=causal), 2048, 8192)
    ]
    short = [call for dim in (64, 128) for call in _prefills(replace(prompt, head_dim=dim), 512)]
    others = (40, 72, 80, 112, 256, 512)
    one = [c for dim in others for c in _prefills(replace(prompt, head_dim=dim), 2048)]
    wide = [
        call
        for dtype in ("float16", "bfloat16")
        for head_dim, heads in ((256, 16), (512, 8))
        for causal in (True, False)
        for call in _prefills(Call("prefill", heads, heads, head_dim, 0, 0, 1, dtype, causal), 2048, 8192)
    ]
    return lengths + short + one + _with(wide, model="wide heads")


def _latent(decode: tuple[int, ...], prefill: tuple[int, ...]) -> list[Call]:
    """The absorbed form of multi-head latent attention: 128 query heads share one latent vector and a rotary
    key per token."""
    return _with(_model("DeepSeek-V3", 128, 1, 576, decode, prefill), latent_dim=512)


def _tensor() -> list[Call]:
    """Calls on tensor operations: prefills of head sizes and lengths that MLX's and torch's kernels have too,
    backwards, drafts of a speculative decode, and latent heads."""
    prompt = Call("prefill", 32, 32, 128, 0, 0, model="H32")
    drafts = Call("decode", 32, 8, 128, 0, 8192, model="drafts")
    prompts = [
        call
        for op, lengths in (("prefill", (2048, 8192)), ("prefill_backward", (4096,)))
        for dtype in ("float16", "bfloat16")
        for head_dim in (64, 128)
        for causal in (True, False)
        for call in _prefills(replace(prompt, op=op, dtype=dtype, head_dim=head_dim, causal=causal), *lengths)
    ]
    return [
        *prompts,
        *(replace(drafts, head_dim=dim, q_len=rows) for dim in (64, 128) for rows in (6, 8, 16)),
        *_latent((4096, 32768), (2048,)),
    ]


def _chunked() -> list[Call]:
    """Few rows over many keys: drafts of a speculative decode, chunks of a prompt, and few heads."""
    chunk = Call("prefill", 32, 8, 128, 0, 0, causal=True, model="32/8")
    return [
        *(
            replace(chunk, q_len=rows, kv_len=n)
            for n in (8192, 32768)
            for rows in (9, 12, 16, 24, 32, 48, 64)
        ),
        replace(chunk, q_len=256, kv_len=16384),
        replace(chunk, q_heads=4, kv_heads=4, q_len=512, kv_len=32768, model="few heads"),
    ]


def _unshared() -> list[Call]:
    """Decodes of one or two rows per key-value head; in float32 those where a peer came closest."""
    return [
        Call("decode", 16 * group, 16, head_dim, 1, length, batch, dtype, model=f"group of {group}")
        for dtype in ("float16", "bfloat16", "float32")
        for head_dim in (64, 96, 128, 256)
        for group in (1, 2)
        for batch, length in ((1, 256), (4, 1024), (8, 4096), (16, 32768))
        if dtype != "float32" or batch == 4
    ]


def _training() -> list[Call]:
    """Forward and backward of a training step, by head size, length and 16-bit dtype."""
    heads = {64: 16, 80: 12, 96: 10, 128: 8}  # about 1,024 columns: one dispatch up to 16k
    return [
        replace(call, op=op)
        for dtype in ("float16", "bfloat16")
        for head_dim, count in heads.items()
        for causal in (True, False)
        for call in _prefills(
            Call("prefill", count, count, head_dim, 0, 0, 1, dtype, causal, model="training"),
            *(512, 2048, 4096, 8192, 16384),
        )
        for op in ("prefill", "prefill_backward")
    ]


def _blocks() -> list[Call]:
    """Long self-attention, dense and with block masks."""
    prompt = Call("prefill", 1, 1, 128, 0, 0)
    return [
        replace(call, head_dim=dim, density=density)
        for dim in (64, 128)
        for call in (*_prefills(replace(prompt, q_heads=8, kv_heads=8), 16384), *_prefills(prompt, 65536))
        for density in (0.0, 0.1, 0.3, 0.5)
    ]


def _rotary() -> list[Call]:
    """A step of one to 16k tokens, written to a dense and to a paged cache."""
    return [
        Call("rotary_write", 32, 8, 128, tokens, tokens, block_size=block_size, norms=norms)
        for norms in (False, True)
        for block_size in (0, 16)
        for tokens in (1, 32, 512, 4096, 16384)
    ]


def _linear() -> list[Call]:
    """The gated delta rule alone, and a decode step of its layer. Qwen3-Next and Qwen3.5 have one to four
    value heads for each of 16 key heads, Kimi-Linear has a decay per channel."""
    rule = Call("gated_delta_rule", 32, 16, 128, 0, 0, dtype="bfloat16")
    one, three, four = (replace(rule, q_heads=heads) for heads in (16, 48, 64))
    others = (replace(rule, q_heads=heads, kv_heads=heads) for heads in (24, 32))
    kimi = replace(rule, kv_heads=32, channel_decay=True)
    lengths = {rule: (64, 512, 2048, 8192), replace(rule, batch=8): (64, 512, 2048)}
    lengths |= {one: (512, 2048, 8192), four: (512, 2048), **dict.fromkeys((three, kimi, *others), (2048,))}
    steps = {rule: (1, 4), replace(rule, batch=8): (1, 4), **dict.fromkeys((one, three, four, kimi), (1,))}
    lengths |= {replace(call, op="gated_delta_step"): tokens for call, tokens in steps.items()}
    return [call for base, tokens in lengths.items() for call in _prefills(base, *tokens)]


def _with(calls: list[Call], **changes: Any) -> list[Call]:
    return [replace(call, **changes) for call in calls]


GEMMA_3 = _model("Gemma-3-4B", 8, 4, 256, (4096,), (2048,))
GPT_OSS = _model("GPT-OSS-20B", 64, 8, 64, (4096, 32768), (2048,))

SHAPES: dict[str, list[Call]] = {
    "standard": _standard(),
    "decode": _decode(),
    "prefill": _prefill(),
    "chunked": _chunked(),
    "tensor": _tensor(),
    "batches": list(_decodes(Call("decode", 32, 8, 128, 1, 0), 1024, 2048, 4096, 8192, batches=(16, 32, 64))),
    "unshared": _unshared(),
    "training": _training(),
    "blocks": _blocks(),
    "rotary": _rotary(),
    "linear": _linear(),
    "llama-3-8b": _model("Llama-3-8B", 32, 8, 128, (4096, 32768, 131072), (2048, 8192)),
    "qwen3-0.6b": _model("Qwen3-0.6B", 16, 8, 128, (4096, 32768), (2048,)),
    # Five of six layers see a window of 1,024 keys.
    "gemma-3": _with(GEMMA_3, window_left=1023, model="Gemma-3-4B local") + GEMMA_3,
    # Every head has a sink; every other layer sees a window of 128 keys.
    "gpt-oss": _with(GPT_OSS, sinks=True)
    + _with(GPT_OSS[:1], sinks=True, window_left=127, model="GPT-OSS-20B local"),
    "gemma-4-like": _model("Gemma-4-like", 16, 2, 512, (4096,), (2048,)),
    "deepseek": _latent((4096, 32768), ()),
    "whisper": list(_prefills(Call("prefill", 20, 20, 64, 0, 0, model="Whisper-large encoder"), 1500)),
    "flux": list(_prefills(Call("prefill", 24, 24, 128, 0, 0, model="FLUX-like"), 4608)),
}
