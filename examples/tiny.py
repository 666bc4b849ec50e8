"""Tiny pipelines with random weights, built from configuration alone: to try a script out without the hub."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

WIDTH = 32
"""Width of all text embeddings here."""


def autoencoder(channels: int = 4) -> AutoencoderKL:
    """An autoencoder that halves the resolution, to latents of `channels` channels."""
    return AutoencoderKL(
        block_out_channels=[8, 16],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        shift_factor=0.0,
    )


def unet_condition(**extra: Any) -> UNet2DConditionModel:
    """A U-Net on 8×8 latents with cross-attention to text embeddings."""
    settings = {
        "sample_size": 8,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": WIDTH,
    }
    return UNet2DConditionModel(**{**settings, **extra})


def unet_unconditional(**extra: Any) -> UNet2DModel:
    """A U-Net on 8×8 pixels or latents."""
    return UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **extra,
    )


def ddpm(seed: int = 0) -> DDPMPipeline:
    """Unconditional, 3×8×8 pixels."""
    torch.manual_seed(seed)
    return quiet(DDPMPipeline(unet_unconditional(), DDPMScheduler()))


def text() -> dict[str, Any]:
    """A tokenizer that spells words out in small letters, and an encoder of its 16 tokens, widths 32."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    with TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
        (Path(folder) / "merges.txt").write_text("#version: 0.2\n")
        tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=16)
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return {"tokenizer": tokenizer, "text_encoder": CLIPTextModel(config)}


def stable_diffusion(seed: int = 0, *, prompts: bool = False) -> StableDiffusionPipeline:
    """Latents 4×8×8; takes prompts, or `prompt_embeds` and `negative_prompt_embeds`, `(B, L, 32)`."""
    torch.manual_seed(seed)
    encoder = text() if prompts else {"tokenizer": None, "text_encoder": None}
    scheduler = PNDMScheduler(1000, 0.00085, 0.012, "scaled_linear", skip_prk_steps=True, steps_offset=1)
    return quiet(
        StableDiffusionPipeline(
            vae=autoencoder(),
            **encoder,
            unet=unet_condition(),
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    )


def stable_diffusion_xl(seed: int = 0) -> StableDiffusionXLPipeline:
    """Latents 4×8×8; takes `prompt_embeds`, `pooled_prompt_embeds` and their negatives, widths 32."""
    torch.manual_seed(seed)
    unet = unet_condition(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )
    scheduler = EulerDiscreteScheduler(1000, 0.00085, 0.012, "scaled_linear", steps_offset=1)
    return quiet(
        StableDiffusionXLPipeline(
            vae=autoencoder(),
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            unet=unet,
            scheduler=scheduler,
            add_watermarker=False,
        )
    )


def dit(seed: int = 0) -> DiTPipeline:
    """Class-conditional, latents 4×8×8, with predicted variances; takes `class_labels`."""
    torch.manual_seed(seed)
    transformer = DiTTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )
    return quiet(DiTPipeline(transformer, autoencoder(), DDIMScheduler()))


def flux(seed: int = 0) -> FluxPipeline:
    """Flow matching on 2×2 patches of latents 4×8×8; takes `prompt_embeds` and `pooled_prompt_embeds`, widths 32."""
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )
    return quiet(
        FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=autoencoder(),
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=transformer,
        )
    )


def quiet(pipe: Any) -> Any:
    """The pipeline ready for use: networks in evaluation mode (a constructor leaves dropout on), no progress bar."""
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def embeddings(prompts: int = 2, length: int = 4, *, pooled: bool = False, negative: bool = True) -> dict[str, Any]:
    """Random text embeddings, as arguments of a pipeline's call."""
    generator = torch.Generator().manual_seed(5)
    signs = ("", "negative_") if negative else ("",)
    found = {f"{sign}prompt_embeds": torch.randn(prompts, length, WIDTH, generator=generator) for sign in signs}
    if pooled:
        for sign in signs:
            found[f"{sign}pooled_prompt_embeds"] = torch.randn(prompts, WIDTH, generator=generator)
    return found
