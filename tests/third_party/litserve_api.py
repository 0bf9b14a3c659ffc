"""A LitServe server of a transformers model, over `fattn` and one PagedCache for all batches.

python -m tests.third_party.litserve_api CHECKPOINT PORT
"""

from __future__ import annotations

import sys
from typing import Any

import litserve
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from torch_fattn.integrations.transformers import NAME, PagedCache, register

NEW_TOKENS = 8
BLOCKS = 64


class Generator(litserve.LitAPI):  # type: ignore[misc]
    def __init__(self, checkpoint: str, **options: Any) -> None:
        super().__init__(**options)
        self.checkpoint = checkpoint

    def setup(self, device: str) -> None:
        register()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(self.checkpoint, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint, attn_implementation=NAME)
        self.model = model.eval().to("mps")
        self.cache = PagedCache(model.config, BLOCKS, block_size=8)

    def decode_request(self, request: dict[str, str]) -> str:
        return request["prompt"]

    def predict(self, prompts: list[str]) -> list[dict[str, Any]]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to("mps")
        with torch.no_grad():
            tokens = self.model.generate(
                inputs.input_ids,
                attention_mask=inputs.attention_mask,
                past_key_values=self.cache,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        self.cache.reset()
        (blocks,) = self.cache.caches
        new = self.tokenizer.batch_decode(tokens[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        return [{"text": text, "batch": len(prompts), "free_blocks": blocks.free_blocks} for text in new]

    def batch(self, inputs: list[str]) -> list[str]:
        return inputs

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    api = Generator(sys.argv[1], max_batch_size=8, batch_timeout=0.05)
    server = litserve.LitServer(api, accelerator="cpu", devices=1)
    server.run(port=int(sys.argv[2]), generate_client_file=False)
