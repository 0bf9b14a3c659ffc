"""Models of other people's libraries as they come, with few and random weights, and a forward pass of each.

A case is (model, forward): `forward(model, place)` returns a tensor, and `place(tensor)` puts an input where
the model is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Place = Callable[[Tensor], Tensor]
Case = tuple[nn.Module, Callable[[Any, Place], Tensor]]


def diffusers_unet() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        norm_num_groups=8, attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    image, text = torch.randn(2, 4, 16, 16), torch.randn(2, 9, 32)
    return model, lambda model, place: model(place(image), 10, place(text)).sample


def diffusers_flux() -> Case:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    image, text, pooled = torch.randn(1, 16, 8), torch.randn(1, 6, 32), torch.randn(1, 16)

    def forward(model: Any, place: Place) -> Tensor:
        return model(
            hidden_states=place(image), encoder_hidden_states=place(text), pooled_projections=place(pooled),
            timestep=place(torch.tensor([0.5])), img_ids=place(torch.zeros(16, 3)),
            txt_ids=place(torch.zeros(6, 3)),
        ).sample  # fmt: skip

    return model, forward


def diffusers_pipeline() -> Case:
    """Two steps of StableDiffusionPipeline with guidance, and its VAE: an image."""
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        norm_num_groups=8, attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(32, 64), norm_num_groups=8, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    noise, text = torch.randn(1, 4, 8, 8), torch.randn(2, 1, 9, 32)

    def forward(model: Any, place: Place) -> Tensor:
        pipeline = StableDiffusionPipeline(
            **model, text_encoder=None, tokenizer=None, scheduler=EulerDiscreteScheduler(),
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip
        pipeline.set_progress_bar_config(disable=True)
        embeds = {"prompt_embeds": place(text[0]), "negative_prompt_embeds": place(text[1])}
        return pipeline(latents=place(noise), num_inference_steps=2, output_type="pt", **embeds).images

    return nn.ModuleDict({"unet": unet, "vae": vae}), forward


def timm_vit() -> Case:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=10)
    image = torch.randn(2, 3, 64, 64)
    return model, lambda model, place: model(place(image))


def timm_eva() -> Case:
    """A model with rotary positions."""
    import timm

    model = timm.create_model("eva02_tiny_patch14_224", img_size=56, depth=3, num_classes=10)
    image = torch.randn(2, 3, 56, 56)
    return model, lambda model, place: model(place(image))


def open_clip() -> Case:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=12, vocab_size=50, width=64, heads=2, layers=2)
    model = CLIP(32, vision, text, output_dict=False)
    image, tokens = torch.randn(2, 3, 32, 32), torch.randint(1, 50, (2, 12))

    def forward(model: Any, place: Place) -> Tensor:
        return torch.cat([model.encode_image(place(image)), model.encode_text(place(tokens))])

    return model, forward


def whisper() -> Case:
    """Encoder and decoder, with the library's own cache of keys and values for the last two tokens. The model
    has a sparse buffer."""
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(
        ModelDimensions(
            n_mels=16,
            n_audio_ctx=30,
            n_audio_state=64,
            n_audio_head=2,
            n_audio_layer=2,
            n_vocab=60,
            n_text_ctx=12,
            n_text_state=64,
            n_text_head=2,
            n_text_layer=2,
        )  # fmt: skip
    )
    sound, tokens = torch.randn(1, 16, 60), torch.randint(60, (1, 7))

    def forward(model: Any, place: Place) -> Tensor:
        audio = model.encoder(place(sound))
        cache, hooks = model.install_kv_cache_hooks()
        rows = [model.decoder(place(tokens[:, :5]), audio, kv_cache=cache)]
        rows += [model.decoder(place(tokens[:, i : i + 1]), audio, kv_cache=cache) for i in (5, 6)]
        for hook in hooks:
            hook.remove()
        return torch.cat(rows, dim=1)

    return model, forward


def litgpt() -> Case:
    """nanoGPT's grandchild: a prompt, then two tokens from the cache."""
    from litgpt.config import Config
    from litgpt.model import GPT

    model = GPT(Config(n_layer=2, n_head=4, n_query_groups=2, n_embd=64, vocab_size=60, block_size=32))
    tokens = torch.randint(60, (1, 9))

    def forward(model: Any, place: Place) -> Tensor:
        parameter = next(model.parameters())
        model.set_kv_cache(batch_size=1, device=parameter.device, dtype=parameter.dtype)
        rows = [model(place(tokens[:, :7]), place(torch.arange(7)))]
        rows += [model(place(tokens[:, i : i + 1]), place(torch.tensor([i]))) for i in (7, 8)]
        model.clear_kv_cache()
        return torch.cat(rows, dim=1)

    return model, forward


def x_transformers() -> Case:
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=60, max_seq_len=32,
        attn_layers=Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, attn_flash=True, rotary_pos_emb=True),
    )  # fmt: skip
    tokens = torch.randint(60, (2, 20))
    return model, lambda model, place: model(place(tokens))


def sam2_image_encoder() -> Case:
    """Hiera: attention in windows, and with pooled queries."""
    from sam2.modeling.backbones.hieradet import Hiera

    model = Hiera(
        embed_dim=16,
        num_heads=1,
        stages=(1, 1, 2, 1),
        global_att_blocks=(3,),
        window_pos_embed_bkg_spatial_size=(7, 7),
    )
    image = torch.randn(1, 3, 64, 64)
    return model, lambda model, place: model(place(image))[-1]


def denoising_diffusion() -> Case:
    from denoising_diffusion_pytorch import Unet

    model = Unet(dim=16, dim_mults=(1, 2), flash_attn=True, attn_dim_head=16, attn_heads=2)
    image = torch.randn(1, 3, 16, 16)
    return model, lambda model, place: model(place(image), place(torch.tensor([5])))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[EOS]", "attention", "is", "all", "you", "need", "on", "a", "Mac"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="[EOS]",
        padding_side="left",
    )


def sentence_transformers() -> Case:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=16, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        words = models.Transformer(folder)
        model = SentenceTransformer(modules=[words, models.Pooling(64)], device="cpu")

    def forward(model: Any, place: Place) -> Tensor:
        return model.encode(
            ["attention is all you need", "on a Mac"], convert_to_tensor=True, show_progress_bar=False
        )

    return model, forward


def transformers_pipeline() -> Case:
    """text-generation of two prompts of different lengths: the logits of the tokens that it chooses."""
    from transformers import LlamaConfig, LlamaForCausalLM, pipeline

    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)

    def forward(model: Any, place: Place) -> Tensor:
        generate = pipeline("text-generation", model=model, tokenizer=_tokenizer(), device=model.device)
        seen: list[Tensor] = []
        hook = model.register_forward_hook(lambda *results: seen.append(results[-1].logits[:, -1]))
        generate(
            ["attention is all you need", "on a Mac"], batch_size=2, max_new_tokens=4, min_new_tokens=4,
            do_sample=False,
        )  # fmt: skip
        hook.remove()
        return torch.stack(seen)

    return model, forward


CASES = {
    case.__name__: case
    for case in (
        diffusers_unet,
        diffusers_flux,
        diffusers_pipeline,
        timm_vit,
        timm_eva,
        open_clip,
        whisper,
        litgpt,
        x_transformers,
        sam2_image_encoder,
        denoising_diffusion,
        sentence_transformers,
        transformers_pipeline,
    )
}
