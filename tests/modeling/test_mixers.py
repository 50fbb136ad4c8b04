"""The mixers of the registry under the contract that all of them keep."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from mixer_contract import MixerContract, turn

from fratrie import (
    FratrieDecoderConfig,
    FratrieDecoderModel,
    FratrieEncoderConfig,
    FratrieEncoderModel,
    FratrieSeq2SeqConfig,
    preset,
)
from fratrie.modeling import bigbird, linear_attention, reformer
from fratrie.modeling.mixers import MIXERS

WINDOW = 3
HEADS_AND_POSITIONS = [
    {"num_key_value_heads": 4, "position_type": "none"},
    {"num_key_value_heads": 2, "position_type": "rotary"},
]


class AttentionContract(MixerContract):
    """Mixers of queries, keys and values: one query of one head is mixed by `mix`."""

    variants = HEADS_AND_POSITIONS

    def mix(self, query, keys, values, scale):
        raise NotImplementedError

    def project(self, mixer, state, head, angle):
        """Query, key and value of a head from one state."""
        size = mixer.head_dim
        of_keys = head // mixer.num_key_value_groups

        def one(layer, index):
            rows = slice(index * size, (index + 1) * size)
            return layer.weight[rows] @ state + layer.bias[rows]

        query, key, value = one(mixer.q_proj, head), one(mixer.k_proj, of_keys), one(mixer.v_proj, of_keys)
        return (query, key, value) if angle is None else (turn(query, angle), turn(key, angle), value)

    def plain(self, mixer, hidden, causal, angles, real):
        outputs, heads = [], range(mixer.config.num_attention_heads)
        parts = [
            [self.project(mixer, state, head, None if angles is None else angles[place]) for head in heads]
            for place, state in enumerate(hidden)
        ]
        for query_place in range(len(hidden)):
            seen = [
                place
                for place in range(len(hidden))
                if real[place] and self.sees(place - query_place, causal) and not (causal and place > query_place)
            ]
            mixed = []
            for head in heads:
                query, _, value = parts[query_place][head]
                keys, values = ([parts[place][head][index] for place in seen] for index in (1, 2))
                mixed.append(self.mix(query, keys, values, mixer.scaling) if seen else torch.zeros_like(value))
            outputs.append(mixer.o_proj.weight @ torch.cat(mixed) + mixer.o_proj.bias)
        return torch.stack(outputs)

    def rows_without_keys(self, mixer, hidden):
        return mixer.o_proj.bias.expand_as(hidden)


class SoftmaxContract(AttentionContract):
    mixer = "softmax"
    implementations: ClassVar[list[str]] = ["eager", "sdpa"]

    def mix(self, query, keys, values, scale):
        scores = torch.stack([query @ key for key in keys]) * scale
        exponentials = (scores - scores.max().detach()).exp()
        return sum(weight * value for weight, value in zip(exponentials / exponentials.sum(), values, strict=True))


class TestFull(SoftmaxContract):
    layer_type = "full_attention"
    degenerate = ({"attention_scale": 0.5}, {})  # head size 4: 4 ** -0.5


class TestSliding(SoftmaxContract):
    layer_type = "sliding_attention"
    fields: ClassVar[dict[str, Any]] = {"sliding_window": WINDOW}
    sides = ("left",)  # Hugging Face's cache of a window keeps the last places, right padding before real tokens
    degenerate = ({"sliding_window": 50}, {"layer_types": ["full_attention"] * 2, "sliding_window": None})

    def sees(self, distance, causal):
        """Causal: the last WINDOW tokens, the query among them; bidirectional: WINDOW to each side."""
        return distance > -WINDOW if causal else abs(distance) <= WINDOW


class TestLatent(SoftmaxContract):
    mixer = "latent"
    layer_type = "full_attention"
    fields: ClassVar[dict[str, Any]] = {"kv_lora_rank": 7, "qk_nope_head_dim": 5, "v_head_dim": 6}
    variants: ClassVar[list[dict[str, Any]]] = [
        {},
        {"position_type": "rotary", "q_lora_rank": 8},
    ]
    degenerate = ({"attention_scale": 1 / 3}, {})  # a head of 5 + 4 numbers: 9 ** -0.5

    def project(self, mixer, state, head, angle):
        """Query, key and value of a head from one state, by way of the latents (DeepSeek-AI 2024, section 2.1)."""

        def rms_norm(x, weight):
            return weight * x / torch.sqrt((x * x).mean() + 1e-6)

        if hasattr(mixer, "q_proj"):
            query = mixer.q_proj(state)
        else:
            query = mixer.q_up_proj.weight @ rms_norm(mixer.q_down_proj(state), mixer.q_latent_norm.weight)
        query, down = query[head * 9 : head * 9 + 9], mixer.kv_down_proj(state)
        up = mixer.kv_up_proj.weight @ rms_norm(down[:7], mixer.kv_latent_norm.weight)
        up = up[head * 11 : head * 11 + 11]
        turned_query, turned_key = query[5:], down[7:]
        if angle is not None:
            turned_query, turned_key = turn(turned_query, angle), turn(turned_key, angle)
        return torch.cat((query[:5], turned_query)), torch.cat((up[:5], turned_key)), up[5:]


class TestLinear(AttentionContract):
    mixer = "linear"
    layer_type = "linear_attention"
    fields: ClassVar[dict[str, Any]] = {"linear_chunk_size": 3}
    degenerate = ({"linear_chunk_size": 50}, {"linear_chunk_size": 2})

    def mix(self, query, keys, values, scale):
        """φ(q)·φ(k) instead of the exponential; there is no scale."""

        def phi(x):
            return torch.where(x > 0, x + 1, x.clamp_max(0).exp())

        weights = [phi(query) @ phi(key) for key in keys]
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def test_every_mixer_is_under_the_contract():
    """In whichever file of this folder."""
    texts = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for name, mixer in MIXERS.items():
        assert f'mixer = "{name}"' in texts, name
        assert all(f'layer_type = "{layer_type}"' in texts for layer_type in mixer.layer_types), name


# --- names of mixers and layer types ---------------------------------------------------------------------------------

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "fields, layer_types, mixer_types",
    [
        ({}, ["full_attention"] * 2, ["softmax"] * 2),
        ({"layer_types": ["linear_attention", "full_attention"]}, None, ["linear", "softmax"]),
        ({"mixer_types": ["linear", "softmax"]}, ["linear_attention", "full_attention"], None),
        ({"kv_lora_rank": 4, "layer_types": ["full_attention", "linear_attention"]}, None, ["latent", "linear"]),
        ({"kv_lora_rank": 4, "mixer_types": ["softmax", "latent"]}, ["full_attention"] * 2, None),
    ],
    ids=["neither", "layer types", "mixers", "latents", "latents in some full layers"],
)
def test_whoever_gives_one_list_gets_the_other(fields, layer_types, mixer_types):
    config = FratrieDecoderConfig(**SIZES, **fields)
    assert config.layer_types == (layer_types or fields["layer_types"])
    assert config.mixer_types == (mixer_types or fields["mixer_types"])
    assert type(config)(**config.to_dict()).mixer_types == config.mixer_types


def test_a_configuration_says_its_mixers_where_the_layer_types_do_not():
    assert "mixer_types" not in FratrieDecoderConfig(**SIZES, layer_types=["linear_attention"] * 2).to_dict()
    fields = {"kv_lora_rank": 4, "mixer_types": ["softmax", "latent"]}
    assert FratrieDecoderConfig(**SIZES, **fields).to_dict()["mixer_types"] == ["softmax", "latent"]


def test_a_list_that_is_set_later_changes_the_other(tmp_path):
    config = FratrieDecoderConfig(**SIZES)
    config.layer_types = ["linear_attention", "full_attention"]
    assert config.mixer_types == ["linear", "softmax"]
    config.mixer_types = ["softmax", "linear"]
    assert config.layer_types == ["full_attention", "linear_attention"]
    config.sliding_window, config.layer_types = 3, ["sliding_attention"] * 2
    config.mixer_types = ["softmax", "linear"]
    assert config.layer_types == ["sliding_attention", "linear_attention"], "what suits the mixer stays"
    config.save_pretrained(tmp_path)
    config = FratrieDecoderConfig.from_pretrained(tmp_path, mixer_types=["linear"] * 2, sliding_window=None)
    assert config.layer_types == ["linear_attention"] * 2
    assert FratrieDecoderConfig.from_pretrained(tmp_path, num_hidden_layers=1).mixer_types == ["softmax"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mixer_types": ["softmax", "mamba"]}, r"mixer_types\[1\]='mamba' is unknown: use .*softmax"),
        (
            {"mixer_types": ["softmax"]},
            "layer_types or mixer_types has 1 entries for num_hidden_layers=2",
        ),
        (
            {"layer_types": ["full_attention"] * 2, "mixer_types": ["softmax", "linear"]},
            r"mixer_types\[1\]='linear' runs under linear_attention, not under layer_types\[1\]='full_attention'",
        ),
        ({"mixer_types": ["latent"] * 2}, "kv_lora_rank=None: set it"),
        (
            {"mixer_types": ["softmax"] * 2, "kv_lora_rank": 4},
            "kv_lora_rank=4 has no use without a 'full_attention' layer .* whose mixer is 'latent'",
        ),
    ],
)
def test_what_contradicts_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        FratrieDecoderConfig(**SIZES, **fields)


@pytest.mark.parametrize("causal", [True, False])
def test_a_mixer_of_one_direction_is_refused_in_the_other(causal, monkeypatch):
    name = "runs_causal" if causal else "runs_bidirectional"
    monkeypatch.setattr(MIXERS["linear"], name, False)
    config_class = FratrieDecoderConfig if causal else FratrieEncoderConfig
    with pytest.raises(ValueError, match=r"mixer_types\[0\]='linear' cannot be part of a \w+ stack"):
        config_class(**SIZES, mixer_types=["linear"] * 2)


def test_a_field_that_is_set_later_enables_its_mixer():
    config = FratrieDecoderConfig(**SIZES)
    config.kv_lora_rank = 4
    assert config.mixer_types == ["latent"] * 2 and FratrieDecoderModel(config).layers[0].mixer.latent_size == 4
    config.kv_lora_rank = None
    assert config.mixer_types == ["softmax"] * 2 and config.v_head_dim is None
    FratrieDecoderModel(config)


def test_what_is_chosen_stays_where_a_field_changes_nothing(tmp_path):
    chosen = ["softmax", "latent"]
    config = FratrieDecoderConfig(**SIZES, kv_lora_rank=4, mixer_types=chosen)
    config.kv_lora_rank = 8
    config.layer_types = list(config.layer_types)
    assert config.mixer_types == chosen
    config.save_pretrained(tmp_path)
    assert FratrieDecoderConfig.from_pretrained(tmp_path, kv_lora_rank=6).mixer_types == chosen
    cut = FratrieDecoderConfig.from_pretrained(tmp_path, num_hidden_layers=1)
    assert cut.mixer_types == ["softmax"] and cut.kv_lora_rank is None


def test_an_attribute_of_any_type_can_be_set():
    """Tools keep what they like on a configuration."""
    config = FratrieDecoderConfig(**SIZES)
    config.numbers = torch.ones(2)
    config.numbers = torch.zeros(2)
    assert not config.numbers.any() and config.mixer_types == ["softmax"] * 2


def test_a_refused_list_leaves_the_configuration_as_it_was():
    config = FratrieDecoderConfig(**SIZES)
    for name, value in (("mixer_types", ["mamba"] * 2), ("layer_types", ["moe"] * 2)):
        before = config.to_dict()
        with pytest.raises(ValueError, match="is unknown: use"):
            setattr(config, name, value)
        assert config.to_dict() == before
    config.mixer_types = None
    assert config.mixer_types == ["softmax"] * 2
    config.layer_types = None
    assert config.layer_types == ["full_attention"] * 2


def test_the_lists_of_an_encoder_decoder_and_of_a_preset_give_way_as_well(tmp_path):
    config = FratrieSeq2SeqConfig(
        **SIZES, mixer_types=["linear", "softmax"], decoder={"layer_types": ["full_attention"] * 2}, pad_token_id=0
    )
    assert config.encoder.mixer_types == ["linear", "softmax"] and config.decoder.mixer_types == ["softmax"] * 2
    config.save_pretrained(tmp_path)
    changes = {"mixer_types": ["linear"] * 2, "attention_dropout": 0.3, "num_hidden_layers": 2}
    changed = FratrieSeq2SeqConfig.from_pretrained(tmp_path, **changes)
    for stack in changed.stacks:
        assert stack.layer_types == ["linear_attention"] * 2 and stack.attention_dropout == 0.3
    config.attention_dropout = 0.2
    assert [stack.attention_dropout for stack in config.stacks] == [0.2, 0.2]
    modernbert = preset("modernbert-base", num_hidden_layers=2, mixer_types=["linear"] * 2, sliding_window=None,
                        rope_parameters=None)  # fmt: skip
    assert modernbert.layer_types == ["linear_attention"] * 2


def test_any_mixer_that_gives_weights_has_them_returned(monkeypatch):
    class Weighing(MIXERS["linear"]):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states, *args, **kwargs)[0], torch.ones(1, 4, 3, 3)

    monkeypatch.setitem(MIXERS, "weighing", Weighing)
    config = FratrieDecoderConfig(**SIZES, mixer_types=["weighing", "softmax"], attn_implementation="eager")
    attentions = FratrieDecoderModel(config)(torch.ones(1, 3, dtype=torch.long), output_attentions=True).attentions
    assert [weights.shape for weights in attentions] == [(1, 4, 3, 3)] * 2


@pytest.mark.parametrize(
    ("name", "causal", "module"),
    [
        ("linear", True, linear_attention),
        ("linear", False, linear_attention),
        ("performer", True, linear_attention),
        ("ssd", True, linear_attention),
        ("kimi_delta", True, linear_attention),
        ("bigbird", True, bigbird),
        ("bigbird", False, bigbird),
        ("reformer", False, reformer),
    ],
)
def test_rows_in_parts_are_as_rows_in_one(name, causal, module, monkeypatch):
    torch.manual_seed(0)
    config_class, model_class = (
        (FratrieDecoderConfig, FratrieDecoderModel) if causal else (FratrieEncoderConfig, FratrieEncoderModel)
    )
    fields = {"bigbird_block_size": 2, "bigbird_random_blocks": 1, "reformer_window": 3, "linear_chunk_size": 3}
    mixing = {"mixer_types": [name], "num_hidden_layers": 1, "position_type": "none"}
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2}
    model = (
        model_class(
            config_class(
                **sizes,
                **mixing,
                **{key: value for key, value in fields.items() if key.startswith((name, "linear_chunk"))},
            )
        )
        .double()
        .eval()
    )
    ids = torch.randint(30, (2, 25))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    whole = model(ids, attention_mask=mask).last_hidden_state
    monkeypatch.setattr(module, "_PART", 6)
    torch.testing.assert_close(model(ids, attention_mask=mask).last_hidden_state, whole, rtol=1e-10, atol=1e-10)
