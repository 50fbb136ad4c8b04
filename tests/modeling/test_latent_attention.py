"""Latent attention beyond the contract of mixers: what its cache holds, and its kernel."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import DynamicCache

from fratrie import FratrieDecoderConfig, FratrieDecoderModel

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "head_dim": 4,
    "intermediate_size": 24,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "v_head_dim": 6,
    "position_type": "none",
    "pad_token_id": 0,
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])


def build(**fields):
    torch.manual_seed(0)
    model = FratrieDecoderModel(FratrieDecoderConfig(**{**SIZES, **fields})).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def test_the_cache_holds_latents_and_gives_the_same():
    model = build(position_type="rotary")
    cache = DynamicCache(config=model.config)
    whole = model(IDS[:1]).last_hidden_state
    parts = [model(part, cache=cache).last_hidden_state for part in IDS[:1].split([3, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)
    layer = cache.layers[1]
    assert layer.keys.shape == (1, 1, 6, 7) and layer.values.shape == (1, 1, 6, 4)


@pytest.mark.parametrize("value_size", [6, 12])
def test_heads_of_unlike_size_have_the_fused_kernel(value_size):
    model = build(v_head_dim=value_size)  # keys have 9
    model.set_attn_implementation("eager")
    expected = model(IDS).last_hidden_state
    model.set_attn_implementation("sdpa")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # no other one will do
        torch.testing.assert_close(model(IDS).last_hidden_state, expected, rtol=1e-10, atol=1e-10)
