"""Adaptive spans: under the contract of mixers, against their formula, and what their loss and their gradient do."""

from typing import Any, ClassVar

import pytest
import torch
from mixer_contract import VOCAB, MixerContract, alone, close, texts
from plain_heads import heads_of, joined
from transformers import AutoModelForCausalLM, Trainer

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderForCausalLM,
    FratrieEncoderConfig,
    FratrieEncoderForMaskedLM,
    FratrieSeq2SeqConfig,
    FratrieSeq2SeqForConditionalGeneration,
)
from fratrie.modeling.adaptive_span import Spans, needed_window
from fratrie.training.frozen_states import frozen_depth
from fratrie.training.schedules import build_optimizer

SHARES = (0.9, 0.6, 0.3, 0.1)
LIMIT, RAMP = 2, 1.5
FARTHEST = 3  # tokens, below 0.9 · 2 + 1.5


def set_spans(model, *shares):
    for module in model.modules():
        if isinstance(module, Spans):
            module.bias.data.copy_(torch.tensor(shares))
    return model


class SpanContract(MixerContract):
    mixer = "adaptive_span"
    implementations: ClassVar[list[str]] = ["eager", "sdpa"]
    sides = ("left",)  # a distance is one of places, and right padding would lie between text and text
    spans: ClassVar[dict[str, Any]] = {"adaptive_span_limit": LIMIT, "adaptive_span_ramp": RAMP}

    def build_with_head(self, causal, fields, dtype=torch.float64):
        return set_spans(super().build_with_head(causal, fields, dtype), *SHARES)

    def sees(self, distance, causal):
        return abs(distance) <= FARTHEST

    def plain(self, mixer, hidden, causal, angles, real):
        """m e^s ÷ Σ m e^s, the masks multiplied (Sukhbaatar et al. 2019, equations 2 and 3)."""
        query, key, value = heads_of(mixer, hidden, angles)
        place = torch.arange(len(hidden))
        distance = place[:, None] - place
        spans = LIMIT * mixer.spans.bias[:, None, None]
        mask = ((RAMP + spans - distance.abs()) / RAMP).clamp(0, 1) * torch.tensor(real)
        mask = mask * (distance >= 0) if causal else mask
        weights = mask * (query @ key.transpose(1, 2) * mixer.scaling).exp()
        return joined(mixer, weights / weights.sum(-1, keepdim=True).clamp_min(1e-300) @ value)

    def rows_without_keys(self, mixer, hidden):
        return mixer.o_proj.bias.expand_as(hidden)

    def test_degenerate_case(self, causal):
        """Spans as long as the text are full attention."""
        model = set_spans(self.build(causal, adaptive_span_limit=11), 1, 1, 1, 1)
        full = type(model)(self.config(causal, mixer_types=None, layer_types=None, sliding_window=None,
                                       **dict.fromkeys(self.spans)))  # fmt: skip
        assert full.config.mixer_types == ["softmax"] * 2
        full.double().eval().load_state_dict(model.state_dict(), strict=False)
        ids = torch.stack(texts(11, 11))
        close(model(ids).last_hidden_state, full(ids).last_hidden_state)


class TestFull(SpanContract):
    layer_type = "full_attention"
    fields: ClassVar[dict[str, Any]] = SpanContract.spans
    variants: ClassVar[list[dict[str, Any]]] = [{"num_key_value_heads": 2, "position_type": "rotary"}]

    def test_compiles_into_one_graph_for_all_lengths(self):
        super().test_compiles_into_one_graph_for_all_lengths(causal=True)


class TestSliding(SpanContract):
    """The window cuts nothing off, but forgets what no head looks at."""

    layer_type = "sliding_attention"
    implementations: ClassVar[list[str]] = ["sdpa"]
    test_compiles_into_one_graph_for_all_lengths = None  # the graph of full attention, but for its mask

    @classmethod
    def directions(cls):
        return [True]  # what has a cache

    fields: ClassVar[dict[str, Any]] = {**SpanContract.spans, "sliding_window": FARTHEST + 1}

    def test_degenerate_case(self, causal):
        """Where it is as wide as the ramp ends, it changes nothing."""
        model = self.build(causal)
        full = type(model)(self.config(causal, layer_types=None, sliding_window=None)).double().eval()
        full.load_state_dict(model.state_dict())
        ids = torch.stack(texts(11, 11))
        close(model(ids).last_hidden_state, full(ids).last_hidden_state)

    def test_long_texts_have_spans_too(self, causal):
        """Other sliding layers compute them in blocks, which add nothing to the scores."""
        model = self.build(causal, position_type="learned", max_position_embeddings=300)
        (document,) = texts(290)
        states = alone(model, document, use_cache=False)
        model.set_attn_implementation("eager")
        close(states, alone(model, document, use_cache=False))


SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 24, "position_type": "none"}  # fmt: skip
SPANS = {"mixer_types": ["adaptive_span"] * 2}


@pytest.mark.parametrize("causal", [True, False])
def test_whole_spans_without_a_ramp_are_a_sliding_window(causal):
    torch.manual_seed(0)
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderForCausalLM)
        if causal
        else (FratrieEncoderConfig, FratrieEncoderForMaskedLM)
    )
    model = model_class(config_class(**SIZES, **SPANS, adaptive_span_limit=4, adaptive_span_ramp=1e-6)).double().eval()
    set_spans(model, *[0.5] * 4)
    # Two tokens back, with the token itself a window of three where causal; two to each side where not.
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3 if causal else 2}
    sliding = model_class(config_class(**SIZES, **window)).double().eval()
    sliding.load_state_dict(model.state_dict(), strict=False)
    ids = torch.stack(texts(9, 9))
    close(model(ids).logits, sliding(ids).logits)
    assert needed_window(model) == window["sliding_window"]


def test_a_trained_model_is_loaded_with_the_window_that_it_needs(tmp_path):
    torch.manual_seed(0)
    config = FratrieDecoderConfig(**SIZES, **SPANS, adaptive_span_limit=8, adaptive_span_ramp=2)
    model = set_spans(FratrieDecoderForCausalLM(config), 0.1, 0.3, 0.2, 0.0).eval()
    model.save_pretrained(tmp_path)
    window = needed_window(model)
    assert window == 5  # 0.3 · 8 + 2 = 4.4: the token itself and four before it
    short = FratrieDecoderForCausalLM.from_pretrained(
        tmp_path, layer_types=["sliding_attention"] * 2, mixer_types=["adaptive_span"] * 2, sliding_window=window
    ).eval()
    ids = torch.stack(texts(12, 12))
    outputs = short(ids)
    close(outputs.logits, model(ids).logits, 1e-5)
    assert {layer.keys.shape[2] for layer in outputs.cache.layers} == {window - 1}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(short.generate(ids, **options), model.generate(ids, **options))
    with pytest.raises(ValueError, match="has no mixer 'adaptive_span'"):
        needed_window(torch.nn.Linear(2, 2))


def test_the_gradient_of_a_span_equals_finite_differences():
    spans = Spans(FratrieDecoderConfig(**SIZES, **SPANS, adaptive_span_limit=6, adaptive_span_ramp=3.5)).double()
    spans.bias.data.copy_(torch.tensor(SHARES))
    scores, distance = torch.randn(4, 5, 5).double(), (torch.arange(5)[:, None] - torch.arange(5)).abs()

    def weights(bias):
        return (torch.func.functional_call(spans, {"bias": bias}, distance)[0] + scores).softmax(-1)

    assert torch.autograd.gradcheck(weights, spans.bias.detach().requires_grad_())


@pytest.mark.parametrize("share, gradient", [(0.01, 1.0), (0.99, -1.0)])
def test_a_step_over_an_end_goes_no_further_and_comes_back(share, gradient):
    """Of whichever optimizer: the next pass of a training takes it back to the end, from where it moves at once."""
    spans = Spans(FratrieDecoderConfig(**SIZES, **SPANS)).train()
    spans.bias.data.fill_(share)
    optimizer, seen = torch.optim.SGD(spans.parameters(), lr=0.1), []
    for sign in (1, 1, 1, -1, -1):
        optimizer.zero_grad()
        shares = spans.shares()
        seen.append(shares[0].item())
        (shares * sign * gradient).sum().backward()
        optimizer.step()
    end = 0.0 if share < 0.5 else 1.0
    assert seen == pytest.approx([share, end, end, end, abs(end - 0.1)])
    assert spans.eval().shares().max() <= 1


def test_the_gradient_at_an_end_is_that_of_the_whole_batch_however_it_is_cut():
    config = FratrieDecoderConfig(**SIZES, **SPANS, adaptive_span_limit=8, adaptive_span_ramp=2)
    model = set_spans(FratrieDecoderForCausalLM(config), 0.0, -0.2, 1.0, 1.3).double().train()
    ids = torch.stack(texts(9, 9, 9, 9))

    def gradients(parts):
        model.zero_grad()
        for part in ids.split(parts):
            model(part, labels=part, num_items_in_batch=4 * 8).loss.backward()
        return torch.cat([weight.grad for name, weight in model.named_parameters() if ".spans." in name])

    close(gradients(1), gradients(4))
    assert gradients(4).count_nonzero() >= 4


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_the_spans_are_a_part_of_the_training_loss_alone(kind):
    classes = {
        "decoder": (FratrieDecoderConfig, FratrieDecoderForCausalLM, {}),
        "encoder": (FratrieEncoderConfig, FratrieEncoderForMaskedLM, {}),
        "seq2seq": (FratrieSeq2SeqConfig, FratrieSeq2SeqForConditionalGeneration, {"pad_token_id": 0}),
    }
    config_class, model_class, more = classes[kind]
    ids, losses = torch.stack(texts(6, 6)), {}
    for coef in (0.0, 0.1):
        torch.manual_seed(0)
        fields = {"adaptive_span_limit": 8, "adaptive_span_loss_coef": coef}
        model = set_spans(model_class(config_class(**SIZES, **SPANS, **fields, **more)), *SHARES)
        losses[coef] = loss_of(model.train(), ids), loss_of(model.eval(), ids)
    layers = sum(isinstance(module, Spans) for module in model.modules())
    assert layers == (4 if kind == "seq2seq" else 2)
    extra = layers * 0.1 * 8 * sum(SHARES) / 4
    assert (losses[0.1][0] - losses[0.0][0]).item() == pytest.approx(extra, rel=1e-4)
    assert losses[0.1][1] == losses[0.0][1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_keep_the_gradient_of_their_loss(reentrant):
    config = FratrieDecoderConfig(**SIZES, **SPANS, adaptive_span_limit=8, adaptive_span_loss_coef=0.5)
    model = set_spans(FratrieDecoderForCausalLM(config), *SHARES).train()
    ids, gradients = torch.stack(texts(6, 6)), []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        loss_of(model, ids).backward()
        gradients.append(model.model.layers[0].mixer.spans.bias.grad.clone())
    close(*gradients, 1e-5)


def test_micro_batches_share_the_loss_of_the_spans():
    config = FratrieDecoderConfig(**SIZES, **SPANS, adaptive_span_limit=8, adaptive_span_loss_coef=0.5)
    model, ids = set_spans(FratrieDecoderForCausalLM(config), *SHARES).train(), torch.stack(texts(6, 6, 6))
    number = 3 * 5
    parts = [model(part, labels=part, num_items_in_batch=number).loss for part in (ids[:1], ids[1:])]
    close(sum(parts), model(ids, labels=ids, num_items_in_batch=number).loss, 1e-5)


def test_a_loss_of_spans_shortens_those_that_are_not_needed():
    torch.manual_seed(0)
    config = FratrieDecoderConfig(**SIZES, **SPANS, adaptive_span_limit=16, adaptive_span_ramp=2,
                                  adaptive_span_loss_coef=0.02)  # fmt: skip
    model = set_spans(FratrieDecoderForCausalLM(config), *[0.5] * 4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for _ in range(60):
        ids = torch.randint(1, VOCAB, (4, 1)).expand(-1, 12)  # each token repeats the one before it
        optimizer.zero_grad()
        loss_of(model, ids.contiguous()).backward()
        optimizer.step()
    shares = torch.cat([layer.mixer.spans.shares() for layer in model.model.layers])
    assert shares.min() >= 0 and shares.max() < 0.1
    # The momentum carries a span over the end, but its loss does not drive it on.
    assert all(layer.mixer.spans.bias.min() > -0.4 for layer in model.model.layers)


def test_no_optimizer_decays_spans():
    model = FratrieDecoderForCausalLM(FratrieDecoderConfig(**SIZES, **SPANS))
    spans = [weight for name, weight in model.named_parameters() if ".spans." in name]
    assert len(spans) == 2
    for group in build_optimizer(model, 0.1, 0.1).param_groups:
        assert group["weight_decay"] == 0 or not any(weight is span for weight in group["params"] for span in spans)
    decayed = Trainer.get_decay_parameter_names(None, model)
    assert decayed and not any(".spans." in name for name in decayed)


def test_frozen_layers_with_a_loss_are_not_computed_beforehand():
    model = FratrieDecoderForCausalLM(FratrieDecoderConfig(**SIZES, mixer_types=["adaptive_span", "softmax"]))
    model.requires_grad_(False).model.layers[1].requires_grad_(True)
    assert frozen_depth(model) == 0
    model.config.mixer_types = ["softmax", "softmax"]
    assert frozen_depth(model) == 1


def test_flash_attention_is_refused_by_name():
    config = FratrieDecoderConfig(**SIZES, **SPANS)
    with pytest.raises(ValueError, match=r"adaptive_span.* add to the attention scores, which flash attention cannot"):
        AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2")


@pytest.mark.parametrize("fields, message", [
    ({"adaptive_span_limit": 0}, "adaptive_span_limit=0 must be above 0"),
    ({"adaptive_span_ramp": 0}, "adaptive_span_ramp=0 must be above 0"),
    ({"adaptive_span_loss_coef": -1}, "adaptive_span_loss_coef=-1 must not be negative"),
])  # fmt: skip
def test_spans_that_cannot_be_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        FratrieDecoderConfig(**SIZES, **SPANS, **fields)
