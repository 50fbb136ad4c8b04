"""ViT (Dosovitskiy et al. 2021): the patches of an image as tokens of an encoder."""

from transformers import PreTrainedConfig

from fratrie.modeling.configuration import FratrieEncoderConfig, norm_slots
from fratrie.modeling.encoder import FratrieEncoderForImageClassification, FratrieEncoderModel

from .recipe import Field, Head, Recipe, Weight


def _side(theirs: PreTrainedConfig, name: str) -> int:
    """The side of a square, which theirs may name twice."""
    sides = getattr(theirs, name)
    sides = [sides] if isinstance(sides, int) else list(sides)
    if len(set(sides)) != 1:
        raise ValueError(f"vit: {name}={sides} is not a square.")
    return sides[0]


def _positions(theirs: PreTrainedConfig) -> int:
    return (_side(theirs, "image_size") // _side(theirs, "patch_size")) ** 2 + 1


def _pooler(theirs: PreTrainedConfig) -> str:
    if theirs.pooler_output_size != theirs.hidden_size:
        raise ValueError(f"vit: our pooler keeps hidden_size={theirs.hidden_size}, not pooler_output_size="
                         f"{theirs.pooler_output_size}.")  # fmt: skip
    return theirs.pooler_act


VIT = Recipe(
    model_type="vit",
    config=FratrieEncoderConfig,
    fields=(
        Field("hidden_size"),
        Field("num_hidden_layers"),
        Field("num_attention_heads"),
        Field("intermediate_size"),
        Field("hidden_act"),
        Field("hidden_dropout_prob", ("hidden_dropout", "embedding_dropout")),
        Field("attention_probs_dropout_prob", "attention_dropout"),
        Field("initializer_range"),
        Field("layer_norm_eps", "norm_eps"),
        Field("image_size"),
        Field("patch_size"),
        Field("num_channels"),
        Field("qkv_bias", "attention_bias"),
    ),
    always={**norm_slots("pre"), "classifier_pooling": "first"},
    read={
        "image_size": lambda theirs: _side(theirs, "image_size"),
        "patch_size": lambda theirs: _side(theirs, "patch_size"),
        "max_position_embeddings": _positions,
    },
    weights=(
        Weight("embeddings.cls_token", "embed_tokens.image_token"),
        Weight("embeddings.position_embeddings", "embed_positions.weight", leading=True),
        Weight("embeddings.patch_embeddings.projection", "embed_tokens.projection"),
        Weight("layers.*.layernorm_before", "layers.*.mixer_input_norm"),
        Weight("layers.*.attention.q_proj", "layers.*.mixer.q_proj"),
        Weight("layers.*.attention.k_proj", "layers.*.mixer.k_proj"),
        Weight("layers.*.attention.v_proj", "layers.*.mixer.v_proj"),
        Weight("layers.*.attention.o_proj", "layers.*.mixer.o_proj"),
        Weight("layers.*.layernorm_after", "layers.*.feed_forward_input_norm"),
        Weight("layers.*.mlp.fc1", "layers.*.feed_forward.up_proj"),
        Weight("layers.*.mlp.fc2", "layers.*.feed_forward.down_proj"),
        Weight("layernorm", "norm"),
    ),
    heads=(
        Head("ViTModel", FratrieEncoderModel, weights=(Weight("pooler.dense", "pooler.dense"),), pooler=_pooler),
        Head("ViTForImageClassification", FratrieEncoderForImageClassification, "vit.",
             (Weight("classifier", "classifier.out_proj"),)),
    ),
    inert=("encoder_stride", "pooler_output_size", "pooler_act"),
)  # fmt: skip
