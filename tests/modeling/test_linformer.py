"""Linformer: under the contract of mixers, against full attention where its maps are the identity, its refusals."""

from typing import Any, ClassVar

import pytest
import torch
from layouts import rows_of_stack
from mixer_contract import VOCAB, MixerContract, close, pad, texts
from plain_heads import heads_of, joined

from fratrie import FratrieDecoderConfig, FratrieEncoderConfig, FratrieEncoderForMaskedLM, FratrieSeq2SeqConfig

RANK = 5
LINFORMER = {"mixer_types": ["linformer"] * 2}


class TestLinformer(MixerContract):
    mixer = "linformer"
    layer_type = "full_attention"
    fields: ClassVar[dict[str, Any]] = {"linformer_rank": RANK}
    variants: ClassVar[list[dict[str, Any]]] = [{"linformer_sharing": "none", "num_key_value_heads": 2}]

    def plain(self, mixer, hidden, causal, angles, real):
        """softmax(Q (E K)ᵀ) (F V), padding cut out beforehand (Wang et al. 2020, equation 7)."""
        kept = [place for place, is_real in enumerate(real) if is_real]
        query, key, value = heads_of(mixer, hidden, angles)
        key, value = key[:, kept], value[:, kept]
        map_of_keys = mixer.key_map.weight[..., : len(kept)]
        map_of_values = map_of_keys if mixer.value_map is None else mixer.value_map.weight[..., : len(kept)]
        groups = len(query) // len(map_of_keys) if len(map_of_keys) > 1 else 1
        rows, mixed = (
            one.repeat_interleave(groups, dim=0) @ x for one, x in ((map_of_keys, key), (map_of_values, value))
        )
        return joined(mixer, (query @ rows.transpose(1, 2) * mixer.scaling).softmax(-1) @ mixed)

    def rows_without_keys(self, mixer, hidden):
        return mixer.o_proj.bias.expand_as(hidden)

    def test_degenerate_case(self, causal):
        """The identity on as many positions as there are tokens is full attention."""
        model, full = identity_and_full(self)
        ids = torch.stack(texts(11, 11))
        close(model(ids).last_hidden_state, full(ids).last_hidden_state)


def identity_and_full(contract):
    sizes = {"max_position_embeddings": 11, "linformer_rank": 11}
    model = contract.build(False, **sizes)
    full = type(model)(contract.config(False, mixer_types=None, linformer_rank=None)).double().eval()
    for layer in model.layers:
        for one in (layer.mixer.key_map, layer.mixer.value_map):
            one.weight.data.copy_(torch.eye(11))
    full.load_state_dict(model.state_dict(), strict=False)
    return model, full


def test_the_identity_on_more_positions_has_a_zero_key_for_each_that_is_empty():
    """Equal to full attention only where every position holds a token."""
    model, full = identity_and_full(TestLinformer())
    mixer, hidden = model.layers[0].mixer, torch.randn(1, 7, 16, dtype=torch.float64)
    query, key, value = heads_of(mixer, hidden[0], None)
    exponentials = (query @ key.transpose(1, 2) * mixer.scaling).exp()
    mixed = exponentials @ value / (exponentials.sum(-1, keepdim=True) + 4)  # exp(0) for each of four
    close(mixer(hidden, rows_of_stack(model, hidden))[0][0], joined(mixer, mixed))
    ids = torch.stack(texts(7))
    assert not torch.allclose(model(ids).last_hidden_state, full(ids).last_hidden_state)


def build(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 24, "max_position_embeddings": 12, "initializer_range": 0.3}  # fmt: skip
    return FratrieEncoderForMaskedLM(FratrieEncoderConfig(**{**sizes, **LINFORMER, **fields})).eval()


@pytest.mark.parametrize(
    "sharing, maps", [("none", 2 * 2 * 4), ("headwise", 2 * 2), ("key_value", 2), ("layerwise", 1)]
)
def test_maps_are_shared_as_far_as_is_said(sharing, maps, tmp_path):
    """By how many there are, saved once; and padding hides nothing from them."""
    model = build(linformer_sharing=sharing, unpad_inputs=False)
    softmax = sum(weight.numel() for weight in build(mixer_types=["softmax"] * 2).parameters())
    assert sum(weight.numel() for weight in model.parameters()) - softmax == maps * 3 * 12  # a quarter of 12 positions
    documents = texts(5, 8)
    ids, mask = pad(documents, "left")
    logits = model(ids, attention_mask=mask).logits
    for row, document in enumerate(documents):
        close(logits[row][mask[row].bool()], model(document[None]).logits[0], 1e-5)
    model.save_pretrained(tmp_path)
    back = FratrieEncoderForMaskedLM.from_pretrained(tmp_path).eval()
    assert torch.equal(back(ids).logits, model(ids).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_map_of_all_layers_learns_from_each(reentrant):
    """Checkpointed or not."""
    model, (ids,), gradients = build(linformer_sharing="layerwise").train(), [torch.stack(texts(6, 6))], []
    (weight,) = model.model.shared.parameters()
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append(weight.grad.clone())
    close(*gradients, 1e-5)
    model.model.layers[1].mixer.o_proj.requires_grad_(False).weight.zero_()  # the second layer is mute
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert weight.grad.any() and not torch.allclose(weight.grad, gradients[0])
    assert model.tp_plan["model.shared.Linformer"] == "shared_by_heads"


def test_longer_texts_than_there_are_positions_are_refused_by_name():
    model = build(position_type="none")
    model(torch.stack(texts(12)))
    with pytest.raises(ValueError, match="Rows of 13 tokens are longer than max_position_embeddings=12"):
        model(torch.stack(texts(13)))


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("config_class, fields, message", [
    (FratrieDecoderConfig, {}, r"mixer_types\[0\]='linformer' cannot be part of a causal stack"),
    (FratrieSeq2SeqConfig, {"pad_token_id": 0}, r"'linformer' cannot be part of a causal stack"),
    (FratrieEncoderConfig, {"position_type": "rotary"}, r"'linformer', which mixes keys .* position_type='rotary'"),
    (FratrieEncoderConfig, {"position_type": "alibi"}, "takes no position bias"),
    (FratrieEncoderConfig, {"linformer_rank": 0}, "linformer_rank=0 must be at least 1"),
])  # fmt: skip
def test_what_it_cannot_be_is_refused_by_name(config_class, fields, message):
    with pytest.raises(ValueError, match=message):
        config_class(**SIZES, **LINFORMER, **fields)


def test_the_encoder_alone_of_an_encoder_decoder_can_have_it():
    config = FratrieSeq2SeqConfig(**SIZES, pad_token_id=0, encoder=LINFORMER)
    assert [stack.mixer_types[0] for stack in config.stacks] == ["linformer", "softmax"]
