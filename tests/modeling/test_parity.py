"""The block, configured as BERT, GPT-2, Llama, Mixtral, T5 or BART and given their weights, computes what they do.

The other side is Hugging Face's own class with random weights. Its RMSNorm and its router round to float32 inside
a float64 model; norms are exchanged for torch's to compare in full, the router sets Mixtral's tolerance.
"""

import re
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fratrie import (
    FratrieDecoderForCausalLM,
    FratrieEncoderForMaskedLM,
    FratrieEncoderModel,
    FratrieSeq2SeqForConditionalGeneration,
    norm_slots,
)
from fratrie.modeling.experts import load_balancing_loss

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 0, 0, 0]])
MASK = (IDS != 0).long()
NO_BIASES = {"attention_bias": False, "attention_output_bias": False, "feed_forward_bias": False}


@dataclass
class Family:
    """A Hugging Face model and its configuration, ours, and the names of weights from theirs to ours."""

    theirs: type
    their_fields: dict
    ours: type
    our_fields: dict
    renames: list


def rename(states, renames):
    """Every weight of the other model must be named by a rule; a rule may drop it with an empty name."""
    renamed = {}
    for name, weight in states.items():
        for pattern, target in renames:
            if re.fullmatch(pattern, name):
                new = re.sub(pattern, target, name)
                break
        else:
            raise AssertionError(f"no rule for {name}")
        if new:
            renamed[new] = weight
    return renamed


LLAMA_RULES = [
    (r"model\.(embed_tokens|norm)\.weight", r"model.\1.weight"),
    (r"lm_head\.weight", r"lm_head.weight"),
    (r"model\.layers\.(\d+)\.self_attn\.(.*)", r"model.layers.\1.mixer.\2"),
    (r"model\.layers\.(\d+)\.input_layernorm\.(.*)", r"model.layers.\1.mixer_input_norm.\2"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.(.*)", r"model.layers.\1.feed_forward_input_norm.\2"),
    (r"model\.layers\.(\d+)\.mlp\.gate\.weight", r"model.layers.\1.feed_forward.router.weight"),
    (r"model\.layers\.(\d+)\.mlp\.(.*)", r"model.layers.\1.feed_forward.\2"),
]
LLAMA_FIELDS = {
    **SIZES,
    **NO_BIASES,
    **norm_slots("pre", "rms_norm"),
    "num_key_value_heads": 2,
    "position_type": "rotary",
    "hidden_act": "silu",
    "gated_feed_forward": True,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
BERT_LAYER = r"bert\.encoder\.layer\.(\d+)\."
BART_STACK = r"model\.(encoder|decoder)\."
FAMILIES = {
    "bert": Family(
        transformers.BertForMaskedLM,
        {**SIZES, "max_position_embeddings": 20, "pad_token_id": 0},
        FratrieEncoderForMaskedLM,
        {**SIZES, "max_position_embeddings": 20, "pad_token_id": 0, "type_vocab_size": 2, "norm_eps": 1e-12},
        [
            (r"bert\.embeddings\.word_embeddings\.(.*)", r"model.embed_tokens.\1"),
            (r"bert\.embeddings\.position_embeddings\.(.*)", r"model.embed_positions.\1"),
            (r"bert\.embeddings\.token_type_embeddings\.(.*)", r"model.embed_token_types.\1"),
            (r"bert\.embeddings\.LayerNorm\.(.*)", r"model.embedding_norm.\1"),
            (BERT_LAYER + r"attention\.self\.(q|k|v)[a-z]+\.(.*)", r"model.layers.\1.mixer.\2_proj.\3"),
            (BERT_LAYER + r"attention\.output\.dense\.(.*)", r"model.layers.\1.mixer.o_proj.\2"),
            (BERT_LAYER + r"attention\.output\.LayerNorm\.(.*)", r"model.layers.\1.mixer_output_norm.\2"),
            (BERT_LAYER + r"intermediate\.dense\.(.*)", r"model.layers.\1.feed_forward.up_proj.\2"),
            (BERT_LAYER + r"output\.dense\.(.*)", r"model.layers.\1.feed_forward.down_proj.\2"),
            (BERT_LAYER + r"output\.LayerNorm\.(.*)", r"model.layers.\1.feed_forward_output_norm.\2"),
            (r"cls\.predictions\.bias", r""),
            (r"cls\.predictions\.transform\.dense\.(.*)", r"head_dense.\1"),
            (r"cls\.predictions\.transform\.LayerNorm\.(.*)", r"head_norm.\1"),
            (r"cls\.predictions\.decoder\.(.*)", r"lm_head.\1"),
        ],
    ),
    "gpt2": Family(
        transformers.GPT2LMHeadModel,
        {"vocab_size": 30, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 20, "n_inner": 24}
        | {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0},
        FratrieDecoderForCausalLM,
        {**SIZES, "max_position_embeddings": 20, "hidden_act": "gelu_new", "eos_token_id": 1, "pad_token_id": 0},
        [
            (r"transformer\.wte\.(.*)", r"model.embed_tokens.\1"),
            (r"transformer\.wpe\.(.*)", r"model.embed_positions.\1"),
            (r"transformer\.ln_f\.(.*)", r"model.norm.\1"),
            (r"transformer\.h\.(\d+)\.ln_1\.(.*)", r"model.layers.\1.mixer_input_norm.\2"),
            (r"transformer\.h\.(\d+)\.ln_2\.(.*)", r"model.layers.\1.feed_forward_input_norm.\2"),
            (r"transformer\.h\.(\d+)\.attn\.c_attn\.(.*)", r"model.layers.\1.mixer.qkv.\2"),
            (r"transformer\.h\.(\d+)\.attn\.c_proj\.(.*)", r"model.layers.\1.mixer.o_proj.\2"),
            (r"transformer\.h\.(\d+)\.mlp\.c_fc\.(.*)", r"model.layers.\1.feed_forward.up_proj.\2"),
            (r"transformer\.h\.(\d+)\.mlp\.c_proj\.(.*)", r"model.layers.\1.feed_forward.down_proj.\2"),
            (r"lm_head\.weight", r"lm_head.weight"),
        ],
    ),
    "llama": Family(
        transformers.LlamaForCausalLM,
        {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0},
        FratrieDecoderForCausalLM,
        LLAMA_FIELDS,
        LLAMA_RULES,
    ),
    "mixtral": Family(
        transformers.MixtralForCausalLM,
        {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4, "pad_token_id": 0}
        | {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
        | {"experts_implementation": "eager"},
        FratrieDecoderForCausalLM,
        {**LLAMA_FIELDS, "num_experts": 4, "experts_implementation": "eager"},
        LLAMA_RULES,
    ),
    "t5": Family(
        transformers.T5EncoderModel,
        {"vocab_size": 30, "d_model": 16, "d_kv": 6, "num_heads": 4, "num_layers": 2, "d_ff": 24}
        | {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8}
        | {"relative_attention_max_distance": 10},
        FratrieEncoderModel,
        {**SIZES, **NO_BIASES, **norm_slots("pre", "rms_norm"), "head_dim": 6, "attention_scale": 1.0}
        | {"position_type": "relative", "relative_num_buckets": 8, "relative_max_distance": 10}
        | {"hidden_act": "gelu_new", "gated_feed_forward": True, "norm_eps": 1e-6},
        [
            (r"shared\.weight", r"embed_tokens.weight"),
            (r"encoder\.embed_tokens\.weight", r""),
            (r"encoder\.final_layer_norm\.weight", r"norm.weight"),
            (r"encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight",
             r"position_bias.table.weight"),
            (r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.(q|k|v|o)\.weight", r"layers.\1.mixer.\2_proj.weight"),
            (r"encoder\.block\.(\d+)\.layer\.0\.layer_norm\.weight", r"layers.\1.mixer_input_norm.weight"),
            (r"encoder\.block\.(\d+)\.layer\.1\.layer_norm\.weight", r"layers.\1.feed_forward_input_norm.weight"),
            (r"encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wi_0\.(.*)", r"layers.\1.feed_forward.gate_proj.\2"),
            (r"encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wi_1\.(.*)", r"layers.\1.feed_forward.up_proj.\2"),
            (r"encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wo\.(.*)", r"layers.\1.feed_forward.down_proj.\2"),
        ],
    ),
    "bart": Family(
        transformers.BartForConditionalGeneration,
        {"vocab_size": 30, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24}
        | {"decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0}
        | {"max_position_embeddings": 20, "eos_token_id": 1, "bos_token_id": 3, "decoder_start_token_id": 2}
        | {"forced_eos_token_id": None},
        FratrieSeq2SeqForConditionalGeneration,
        {**SIZES, "max_position_embeddings": 20, "position_type": "learned", "hidden_act": "gelu", "pad_token_id": 0}
        | {"scale_embeddings": False, "embedding_norm": "layer_norm", "eos_token_id": 1, "bos_token_id": 3}
        | {"decoder_start_token_id": 2},
        [
            (r"final_logits_bias|model\.shared\.weight", r""),
            (r"lm_head\.weight", r"lm_head.weight"),
            (BART_STACK + r"embed_(tokens|positions)\.weight", r"model.\1.embed_\2.weight"),
            (BART_STACK + r"layernorm_embedding\.(.*)", r"model.\1.embedding_norm.\2"),
            (BART_STACK + r"layers\.(\d+)\.self_attn\.out_proj\.(.*)", r"model.\1.layers.\2.mixer.o_proj.\3"),
            (BART_STACK + r"layers\.(\d+)\.self_attn\.(.*)", r"model.\1.layers.\2.mixer.\3"),
            (BART_STACK + r"layers\.(\d+)\.self_attn_layer_norm\.(.*)", r"model.\1.layers.\2.mixer_output_norm.\3"),
            (BART_STACK + r"layers\.(\d+)\.encoder_attn\.out_proj\.(.*)",
             r"model.\1.layers.\2.cross_attention.o_proj.\3"),
            (BART_STACK + r"layers\.(\d+)\.encoder_attn\.(.*)", r"model.\1.layers.\2.cross_attention.\3"),
            (BART_STACK + r"layers\.(\d+)\.encoder_attn_layer_norm\.(.*)",
             r"model.\1.layers.\2.cross_attention_output_norm.\3"),
            (BART_STACK + r"layers\.(\d+)\.fc1\.(.*)", r"model.\1.layers.\2.feed_forward.up_proj.\3"),
            (BART_STACK + r"layers\.(\d+)\.fc2\.(.*)", r"model.\1.layers.\2.feed_forward.down_proj.\3"),
            (BART_STACK + r"layers\.(\d+)\.final_layer_norm\.(.*)",
             r"model.\1.layers.\2.feed_forward_output_norm.\3"),
        ],
    ),
}  # fmt: skip


def adapt(states):
    """What a name alone does not say: GPT-2 joins and transposes its projections, BART offsets its positions."""
    for name in list(states):
        weight = states[name]
        if ".qkv." in name:
            for part, piece in zip("qkv", states.pop(name).chunk(3, dim=-1), strict=True):
                states[name.replace("qkv", f"{part}_proj")] = piece.T if piece.ndim == 2 else piece
        elif weight.ndim == 2 and (".o_proj." in name or ".feed_forward." in name):
            states[name] = weight.T
    return states


def pair(name, dtype=torch.float64, **fields):
    """The other model and ours with equal weights, none of them near zero, so that every term shows."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    theirs = family.theirs(family.theirs.config_class(**family.their_fields)).to(dtype).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.3)
    for module in list(theirs.modules()):
        for child_name, child in module.named_children():
            if type(child).__name__ in ("LlamaRMSNorm", "MixtralRMSNorm", "T5LayerNorm") and dtype == torch.float64:
                norm = nn.RMSNorm(16, eps=child.variance_epsilon, dtype=dtype)
                norm.weight = child.weight
                setattr(module, child_name, norm)
    states = rename(theirs.state_dict(), family.renames)
    if name == "gpt2":
        states = adapt(states)
    if name == "bart":
        states = {key: value[2:] if "embed_positions" in key else value for key, value in states.items()}
    ours = family.ours(family.ours.config_class(**{**family.our_fields, **fields})).to(dtype).eval()
    ours.load_state_dict(states)
    return theirs, ours


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def close(actual, expected, dtype, tolerance=None):
    tolerance = tolerance or TOLERANCES[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def router_tolerance(name, dtype):
    return 1e-6 if name == "mixtral" and dtype == torch.float64 else None


def arguments_of(name):
    arguments = {"input_ids": IDS, "attention_mask": MASK, "output_hidden_states": True}
    if name == "bert":
        arguments["token_type_ids"] = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0]])
    if name == "bart":
        arguments["decoder_input_ids"] = torch.tensor([[2, 4, 5, 6], [2, 7, 8, 9]])
    return arguments


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_equal_hidden_states_and_logits(name, dtype, implementation):
    theirs, ours = pair(name, dtype, attn_implementation=implementation)
    arguments = arguments_of(name)
    with torch.no_grad():
        expected, actual = theirs(**arguments), ours(**arguments)
    tolerance, real = router_tolerance(name, dtype), MASK.bool()
    for key in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if expected.get(key) is None:
            continue
        assert len(actual[key]) == len(expected[key]) == 3
        for ours_, theirs_ in zip(actual[key], expected[key], strict=True):
            rows = ... if key == "decoder_hidden_states" else real
            close(ours_[rows], theirs_[rows], dtype, tolerance)
    if "logits" in expected:
        rows = ... if name == "bart" else real
        close(actual.logits[rows], expected.logits[rows], dtype, tolerance)
    else:
        close(actual.last_hidden_state[real], expected.last_hidden_state[real], dtype, tolerance)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "t5"])
def test_equal_losses_and_gradients(name):
    theirs, ours = pair(name)
    arguments = {key: value for key, value in arguments_of(name).items() if key != "output_hidden_states"}
    labels = torch.where(MASK.bool(), IDS, -100)
    if name == "bart":
        labels = torch.tensor([[4, 5, 6, 1], [7, 8, 1, -100]])
    expected = theirs(**arguments, labels=labels).loss
    actual = ours(**arguments, labels=labels).loss
    # Hugging Face computes the loss of language models in float32.
    close(actual, expected.double(), torch.float64, 1e-6)
    actual.backward()
    expected.backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    their_name = {
        "bert": "bert.encoder.layer.1.intermediate.dense.weight",
        "gpt2": "transformer.h.1.mlp.c_fc.weight",
        "llama": "model.layers.1.mlp.up_proj.weight",
        "mixtral": "model.layers.1.mlp.experts.down_proj",
        "bart": "model.decoder.layers.1.encoder_attn.v_proj.weight",
    }[name]
    our_name = rename({their_name: 0}, FAMILIES[name].renames).popitem()[0]
    gradient = dict(ours.named_parameters())[our_name].grad
    their_gradient = gradients[their_name].T if name == "gpt2" else gradients[their_name]
    close(gradient, their_gradient, torch.float64, 1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bart"])
def test_equal_generation(name):
    theirs, ours = pair(name)
    ids, mask = (IDS, MASK) if name == "bart" else (IDS.flip(1), MASK.flip(1))  # decoders are padded left
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 3):
        expected = theirs.generate(ids, **options, num_beams=beams)
        assert torch.equal(ours.generate(ids, **options, num_beams=beams), expected)


def test_balancing_loss_of_mixtral_is_ours_times_the_choices():
    """One counts the choices of a token, the other their shares, which sum to one."""
    logits = torch.randn(14, 4)
    for mask in (None, MASK):
        expected = load_balancing_loss_func((logits,), 4, 2, mask)
        close(2 * load_balancing_loss((logits,), 2, mask), expected, torch.float32)


def test_renaming_misses_nothing():
    """Each family's weights fill ours without remainder: `load_state_dict` is strict; the rules are strict as well."""
    for name in FAMILIES:
        theirs, ours = pair(name)
        count = sum(parameter.numel() for parameter in theirs.parameters())
        unused = 2 * 2 * 16 if name == "bart" else 0  # two positions of each stack that no text reaches
        assert sum(parameter.numel() for parameter in ours.parameters()) == count - unused
    with pytest.raises(AssertionError, match="no rule for strange"):
        rename({"strange": 0}, LLAMA_RULES)
