"""Images as tokens: the embedding equals cut-out patches through a linear map, and takes no other images."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fratrie import FratrieEncoderConfig, FratrieEncoderForImageClassification, FratrieEncoderModel
from fratrie.modeling.patches import PatchEmbedding

TINY = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "initializer_range": 0.4,
    "patch_size": 4,
    "image_size": 12,
    "num_channels": 3,
}


def embedding(**fields):
    torch.manual_seed(0)
    patches = PatchEmbedding(FratrieEncoderConfig(**{**TINY, **fields})).double()
    torch.nn.init.normal_(patches.image_token)
    return patches


def embed_naively(patches, image):
    """Cut the patches out row by row; numbers of a patch in the order channel, row, column."""
    size = patches.projection.kernel_size[0]
    weight = patches.projection.weight.flatten(1)
    tokens = [patches.image_token[0, 0]]
    for top in range(0, image.shape[1], size):
        for left in range(0, image.shape[2], size):
            numbers = image[:, top : top + size, left : left + size].flatten()
            tokens.append(weight @ numbers + patches.projection.bias)
    return torch.stack(tokens)


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 4), side=st.integers(1, 4), channels=st.integers(1, 4), batch=st.integers(1, 3))
def test_equals_cut_out_patches_through_a_linear_map(size, side, channels, batch):
    patches = embedding(patch_size=size, image_size=size * side, num_channels=channels)
    pixels = torch.randn(batch, channels, size * side, size * side).double()
    tokens = patches(pixels)
    assert tokens.shape == (batch, 1 + side**2, 16)
    for image, row in zip(pixels, tokens, strict=True):
        torch.testing.assert_close(row, embed_naively(patches, image), rtol=1e-10, atol=1e-10)


def test_equals_torchs_own_unfolding_with_gradients():
    patches = embedding()
    pixels = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    columns = torch.nn.functional.unfold(pixels, 4, stride=4).transpose(1, 2)
    expected = torch.nn.functional.linear(columns, patches.projection.weight.flatten(1), patches.projection.bias)
    tokens = patches(pixels)
    torch.testing.assert_close(tokens[:, 1:], expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(tokens)
    (tokens * weights).sum().backward()
    torch.testing.assert_close(patches.image_token.grad[0, 0], weights[:, 0].sum(0))
    torch.testing.assert_close(patches.projection.bias.grad, weights[:, 1:].sum((0, 1)))


@pytest.mark.parametrize(
    "shape", [(2, 3, 8, 8), (2, 3, 12, 16), (2, 3, 24, 6), (2, 1, 12, 12), (3, 12, 12), (1, 2, 3, 12, 12), (2, 9)]
)
def test_other_images_are_refused_with_their_shape(shape):
    message = rf"Pixels of shape \({', '.join(map(str, shape))}\) .*\(batch, 3, 12, 12\).*image processor"
    with pytest.raises(ValueError, match=message):
        embedding()(torch.zeros(shape))
    with pytest.raises(ValueError, match=message):
        FratrieEncoderForImageClassification(FratrieEncoderConfig(**TINY))(pixel_values=torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_pixels_of_another_precision_are_cast_to_the_models(dtype):
    patches = embedding().to(dtype)
    pixels = torch.randn(2, 3, 12, 12)
    tokens = patches(pixels)
    assert tokens.dtype == dtype and torch.equal(tokens, patches(pixels.to(dtype)))


def test_a_model_embeds_patches_then_adds_positions():
    torch.manual_seed(0)
    model = FratrieEncoderModel(FratrieEncoderConfig(**TINY, embedding_norm=None)).double().eval()
    pixels = torch.randn(2, 3, 12, 12).double()
    states = model(pixel_values=pixels, output_hidden_states=True).hidden_states[0]
    positions = model.embed_positions.weight[:10]
    expected = torch.stack([embed_naively(model.embed_tokens, image) + positions for image in pixels])
    torch.testing.assert_close(states, expected, rtol=1e-10, atol=1e-10)


def test_the_image_token_is_initialised_where_a_checkpoint_has_none(tmp_path, monkeypatch):
    empty_like = torch.empty_like

    def poisoned(*args, **kwargs):
        tensor = empty_like(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.device.type != "meta" else tensor

    fields = {**TINY, "hidden_size": 512, "initializer_range": 0.02}
    model = FratrieEncoderModel(FratrieEncoderConfig(**fields))
    state = {name: x for name, x in model.state_dict().items() if "image_token" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    monkeypatch.setattr(torch, "empty_like", poisoned)
    loaded, info = FratrieEncoderModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"embed_tokens.image_token"}
    for token in (loaded.embed_tokens.image_token, model.embed_tokens.image_token):
        assert 0.017 < token.std() < 0.023 and token.abs().max() < 0.2
