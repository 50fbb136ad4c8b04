"""Latent attention against its formula written out, and what its cache holds."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from fratrie import FratrieDecoderConfig, FratrieDecoderModel, FratrieEncoderConfig, FratrieEncoderModel

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


def build(causal=True, **fields):
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderModel) if causal else (FratrieEncoderConfig, FratrieEncoderModel)
    )
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **fields})).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def rms_norm(x, weight):
    return weight * x / torch.sqrt((x * x).mean() + 1e-6)


def reference(mixer, states, causal):
    """The output for each token of a text `(T, D)`, one query, head and key at a time."""
    outputs = []
    for place, state in enumerate(states):
        query = mixer.q_up_proj.weight @ rms_norm(mixer.q_down_proj(state), mixer.q_latent_norm.weight)
        mixed = []
        for head in range(3):
            query_head = query[head * 9 : head * 9 + 9]
            scores, values = [], []
            for other in states[: place + 1] if causal else states:
                down = mixer.kv_down_proj(other)
                up = mixer.kv_up_proj.weight @ rms_norm(down[:7], mixer.kv_latent_norm.weight)
                own = up[head * 11 : head * 11 + 11]
                scores.append((query_head @ torch.cat((own[:5], down[7:]))) / 9**0.5)
                values.append(own[5:])
            weights = torch.stack(scores).softmax(0)
            mixed.append(sum(w * value for w, value in zip(weights, values, strict=True)))
        outputs.append(mixer.o_proj(torch.cat(mixed)))
    return torch.stack(outputs)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_equals_its_formula(causal):
    mixer = build(causal, q_lora_rank=8).layers[0].mixer
    states = torch.randn(1, 5, 16, dtype=torch.float64)
    mask = torch.ones(5, 5).tril().bool() if causal else torch.ones(5, 5).bool()
    with torch.no_grad():
        actual, _ = mixer(states, attention_mask=mask[None, None])
        torch.testing.assert_close(actual[0], reference(mixer, states[0], causal), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("position_type", ["none", "rotary", "relative"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_padding_and_packing_change_nothing(causal, position_type):
    model = build(causal, position_type=position_type)
    alone = [model(row[row != 0][None]).last_hidden_state[0] for row in IDS]
    for ids in (IDS, torch.stack((IDS[0], IDS[1].roll(2)))):
        states = model(ids, attention_mask=(ids != 0).long()).last_hidden_state
        for row, expected in enumerate(alone):
            torch.testing.assert_close(states[row][ids[row] != 0], expected, rtol=1e-10, atol=1e-10)
    packed = torch.cat([row[row != 0] for row in IDS])[None]
    positions = torch.cat([torch.arange(len(states)) for states in alone])[None]
    states = model(packed, position_ids=positions).last_hidden_state[0]
    torch.testing.assert_close(states, torch.cat(alone), rtol=1e-10, atol=1e-10)


def test_the_cache_holds_latents_and_gives_the_same():
    model = build(position_type="rotary")
    cache = DynamicCache(config=model.config)
    whole = model(IDS[:1]).last_hidden_state
    parts = [model(part, cache=cache).last_hidden_state for part in IDS[:1].split([3, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)
    layer = cache.layers[1]
    assert layer.keys.shape == (1, 1, 6, 7) and layer.values.shape == (1, 1, 6, 4)
