"""Tiny Hugging Face models of every family, over a spread of their configurations, and ours made from them."""

import copy
import inspect
from dataclasses import dataclass, field

import torch
from torch.overrides import TorchFunctionMode

from fratrie.conversion import from_hf
from fratrie.conversion.models import RECIPES, STACK_RECIPES, find_recipe

ENCODER = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
MODERN = {**ENCODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
GPT2 = {
    "vocab_size": 31,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DEEPSEEK = {
    **DECODER,
    "num_key_value_heads": None,
    "kv_lora_rank": 10,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
LFM2 = {**DECODER, "full_attn_idxs": [1], "block_multiple_of": 8}
LFM2_MOE = {
    **DECODER,
    **EXPERTS,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
}
BAMBA = {
    **DECODER,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 4,
}
QWEN3_NEXT = {
    **DECODER,
    **EXPERTS,
    "head_dim": 8,
    "shared_expert_intermediate_size": 10,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 3,
}
SEQ2SEQ = {
    "vocab_size": 31,
    "d_model": 16,
    "encoder_layers": 3,  # Hugging Face's own decoders alone fail with fewer than in the decoder
    "decoder_layers": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": 31,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 3,  # Hugging Face's own generation fails with fewer than in the decoder
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}
LED = {
    **{name: value for name, value in SEQ2SEQ.items() if name != "max_position_embeddings"},
    "max_encoder_position_embeddings": 40,
    "max_decoder_position_embeddings": 24,
}
GPT_NEO = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_layers": 3,
    "num_heads": 4,
    "max_position_embeddings": 40,
    "window_size": 3,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}

SPREAD = {
    "bert": [
        {**ENCODER, "pad_token_id": 0},
        {**ENCODER, "pad_token_id": 0, "hidden_act": "relu", "tie_word_embeddings": False, "type_vocab_size": 3},
    ],
    "roberta": [ENCODER, {**ENCODER, "pad_token_id": 4, "hidden_act": "silu", "layer_norm_eps": 0.1}],
    "xlm-roberta": [ENCODER, {**ENCODER, "num_attention_heads": 1, "tie_word_embeddings": False}],
    "camembert": [ENCODER, {**ENCODER, "type_vocab_size": 1, "num_hidden_layers": 1}],
    # Short texts, which see all of themselves; test_big_bird.py is about longer ones.
    "big_bird": [
        {**ENCODER, "pad_token_id": 0, "block_size": 2, "num_random_blocks": 1},
        {**ENCODER, "pad_token_id": 0, "attention_type": "original_full", "rescale_embeddings": True}
        | {"use_bias": False, "hidden_act": "relu", "tie_word_embeddings": False},
    ],
    "modernbert": [
        {**MODERN, "local_attention": 4},
        {**MODERN, "local_attention": 7, "layer_types": ["sliding_attention"] * 3, "classifier_pooling": "mean"}
        | {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "decoder_bias": False}
        | {"classifier_bias": True, "classifier_activation": "relu", "tie_word_embeddings": False},
        {**MODERN, "layer_types": ["full_attention", "full_attention", "sliding_attention"], "local_attention": 2}
        | {"rope_parameters": {"full_attention": ROPES["linear"], "sliding_attention": ROPES["yarn"]}},
    ],
    "gpt2": [
        GPT2,
        {**GPT2, "n_inner": 20, "scale_attn_weights": False, "activation_function": "relu"},
        {**GPT2, "tie_word_embeddings": False, "layer_norm_epsilon": 0.1, "n_head": 2},
        {**GPT2, "add_cross_attention": True},
    ],
    "llama": [
        DECODER,
        {**DECODER, "head_dim": 6, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {**DECODER, "num_key_value_heads": 1, "hidden_act": "gelu", "rms_norm_eps": 0.1},
        *({**DECODER, "rope_parameters": rope} for rope in ROPES.values()),
    ],
    "mistral": [{**DECODER, "sliding_window": 3}, {**DECODER, "sliding_window": None, "head_dim": 8}],
    "qwen2": [DECODER, {**DECODER, **SLIDING, "tie_word_embeddings": True}, {**DECODER, "rope_theta": 700.0}],
    "qwen3": [{**DECODER, "head_dim": 6}, {**DECODER, **SLIDING, "head_dim": 8, "attention_bias": True}],
    "mixtral": [
        {**DECODER, "num_local_experts": 4},
        {**DECODER, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 3, "head_dim": 8},
    ],
    "qwen3_moe": [
        {**DECODER, **EXPERTS},
        {**DECODER, **EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": True, "head_dim": 8},
        {**DECODER, **EXPERTS, "mlp_only_layers": [0, 2], "sliding_window": 3, "use_sliding_window": True},
    ],
    "deepseek_v3": [
        DEEPSEEK,
        {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2, "rope_interleave": False}
        | {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "num_hidden_layers": 4},
        {**DEEPSEEK, "first_k_dense_replace": 3},
        {**DEEPSEEK, "rope_parameters": {**ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.7}},
    ],
    "lfm2": [
        LFM2,
        {**LFM2, "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False, "norm_eps": 0.1}
        | {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {**LFM2, "layer_types": ["conv", "conv", "full_attention"], "block_ffn_dim_multiplier": 1.5}
        | {"conv_L_cache": 1, "block_multiple_of": 10},
        {**LFM2, "full_attn_idxs": None, "rope_parameters": ROPES["yarn"]},
    ],
    "lfm2_moe": [
        LFM2_MOE,
        {**LFM2_MOE, "conv_bias": True, "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False}
        | {"routed_scaling_factor": 2.5, "tie_word_embeddings": False, "norm_eps": 0.1},
        {**LFM2_MOE, "layer_types": ["full_attention"] * 3, "num_dense_layers": 5, "rope_parameters": ROPES["yarn"]},
    ],
    "bamba": [
        BAMBA,
        {**BAMBA, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}
        | {"mamba_expand": 3, "mamba_n_groups": 1, "mamba_d_conv": 2, "tie_word_embeddings": True}
        | {"attn_layer_indices": [0, 2], "rms_norm_eps": 0.1, "rope_theta": 300.0},
    ],
    "qwen3_next": [
        QWEN3_NEXT,
        {**QWEN3_NEXT, "mlp_only_layers": [0], "norm_topk_prob": False, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "rms_norm_eps": 0.1}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "partial_rotary_factor": 0.5},
        {**QWEN3_NEXT, "layer_types": ["full_attention"] * 3, "rope_parameters": dict(ROPES["yarn"])}
        | {"decoder_sparse_step": 4},
    ],
    "marian": [
        {**SEQ2SEQ},
        {**SEQ2SEQ, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 29, "scale_embedding": True},
        {**SEQ2SEQ, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
        | {"activation_function": "relu", "encoder_attention_heads": 1},
    ],
    "bart": [SEQ2SEQ, {**SEQ2SEQ, "scale_embedding": True, "activation_function": "relu"}],
    "t5": [
        T5,
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {**T5, "feed_forward_proj": "gated-silu", "layer_norm_epsilon": 0.1, "num_heads": 2},
        {**T5, "feed_forward_proj": "gelu_new", "tie_word_embeddings": False, "num_decoder_layers": None},
    ],
    "longformer": [
        {**ENCODER, "attention_window": 4},
        {**ENCODER, "attention_window": [6, 6, 6], "pad_token_id": 4, "tie_word_embeddings": False}
        | {"hidden_act": "silu", "type_vocab_size": 1},
    ],
    "led": [
        {**LED, "attention_window": 4},
        {**LED, "attention_window": 6, "activation_function": "relu", "decoder_attention_heads": 4},
    ],
    "longt5": [{**T5, "local_radius": 2}, {**T5, "local_radius": 3, "feed_forward_proj": "gated-gelu"}],
    "gpt_neo": [
        GPT_NEO,
        {**GPT_NEO, "attention_types": [[["global"], 3]], "intermediate_size": 20, "tie_word_embeddings": False},
    ],
    "vit": [VIT, {**VIT, "qkv_bias": False, "num_channels": 1, "hidden_act": "gelu_new", "layer_norm_eps": 0.1}],
}


@dataclass(frozen=True)
class Case:
    """A class of a family, with the fields of its configuration."""

    model_type: str
    theirs: str
    fields: dict = field(hash=False)
    name: str

    @property
    def recipe(self):
        return find_recipe(self.model_type, self.theirs)[0]

    @property
    def head(self):
        return find_recipe(self.model_type, self.theirs)[1]

    @property
    def attends_encoder(self):
        """A decoder alone that gets the states of an encoder."""
        return self.theirs in ("BartForCausalLM", "MarianForCausalLM") or "add_cross_attention" in self.fields

    @property
    def reads_left_padding(self):
        """Whether theirs leaves it out: LFM2 and Bamba convolve the biases of a map as if they were tokens."""
        return "conv_bias" not in self.fields and "mamba_proj_bias" not in self.fields

    @property
    def generates(self):
        return any(word in self.theirs for word in ("CausalLM", "LMHead", "ForConditionalGeneration", "MTModel"))


CASES = [
    Case(model_type, head.theirs, fields, f"{head.theirs}-{number}")
    for model_type, spread in SPREAD.items()
    for number, fields in enumerate(spread)
    for recipes in (RECIPES, STACK_RECIPES)
    if model_type in recipes
    for head in recipes[model_type].heads
    # whose output layer is not of the size of its embedding
    if not (head.theirs == "MarianForCausalLM" and "decoder_vocab_size" in fields)
]


class Wide(TorchFunctionMode):
    """Casts to float32 inside Hugging Face's norms, routers and rotations go to float64: no rounding in between."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def precise(case):
    """Marian's table of sinusoids is float32 on both sides, which a wider cast would not leave."""
    return Wide() if case.model_type != "marian" else torch.enable_grad()


def their_model(case, dtype=torch.float64, implementation="sdpa", seed=0, **fields):
    """A Hugging Face model with weights far from zero, so that every term shows."""
    torch.manual_seed(seed)
    fields = copy.deepcopy({**case.fields, **fields})  # Qwen3-Next writes into the rotary parameters that it is given
    if "Classification" in case.theirs:
        fields.setdefault("num_labels", 3)
    model_class = case.head.their_class
    config = case.recipe.their_config(**fields)
    implementation = implementation if model_class._supports_sdpa else "eager"  # which some alone have
    model = model_class._from_config(config, attn_implementation=implementation).to(dtype).eval()
    if any("expert" in name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    computed = case.recipe.computed_weights(case.head)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *_trained_buffers(model)):
            if name not in computed:
                tensor.normal_(0, 0.3)
    return model


def _trained_buffers(model):
    return [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if any(part in name for part in ("logits_bias", "correction", "expert_bias"))
    ]


def our_model(theirs):
    ours = from_hf(theirs)
    ours.set_attn_implementation(theirs.config._attn_implementation if type(theirs)._supports_sdpa else "sdpa")
    if any("expert" in name for name, _ in ours.named_modules()):
        ours.set_experts_implementation("eager")
    return ours


def inputs(case, theirs, side="right"):
    """Inputs of their model and of ours, which count positions over real tokens where they may be told so."""
    if theirs.main_input_name == "pixel_values":
        size = theirs.config.image_size
        pixels = torch.randn(2, theirs.config.num_channels, size, size).to(theirs.dtype)
        return {"pixel_values": pixels}, {"pixel_values": pixels}
    pad = theirs.config.pad_token_id
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, *[pad] * 4]])
    if side == "left":
        ids[1] = ids[1].roll(4)
    mask = (ids != pad).long()
    both = {"input_ids": ids, "attention_mask": mask}
    if theirs.config.is_encoder_decoder and not case.theirs.endswith("EncoderModel"):
        both["decoder_input_ids"] = torch.tensor([[2, 4, 5, 6], [2, 7, 8, 9]])
    if case.attends_encoder:
        both["encoder_hidden_states"] = torch.randn(2, 5, theirs.config.hidden_size).to(theirs.dtype)
        both["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    if getattr(theirs.config, "type_vocab_size", 1) > 1:
        both["token_type_ids"] = (ids % 2) * mask
    theirs_too = dict(both)
    takes_positions = "position_ids" in inspect.signature(theirs.forward).parameters
    if case.model_type in ("longformer", "led") and not (side == "right" and "SequenceClassification" in case.theirs):
        theirs_too["global_attention_mask"] = both["global_attention_mask"] = (ids % 5 == 0) * mask
    if takes_positions and theirs.config.model_type not in ("roberta", "xlm-roberta", "camembert", "longformer"):
        theirs_too["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return theirs_too, both


def real_tokens(case, arguments, states):
    """The places of encoder or decoder states to compare: padding has no meaning."""
    mask = arguments.get("attention_mask")
    return mask.bool() if mask is not None and states.shape[:2] == mask.shape else ...


def their_loaded_model(case, dtype, **choices):
    """Their model as a published checkpoint comes: weights in float32, loaded in another dtype.

    What the family keeps in float32 then is so, which a cast of the whole model would round.
    """
    wide = their_model(case, dtype=torch.float32, **choices)
    theirs = type(wide).from_pretrained(
        None, config=wide.config, state_dict=wide.state_dict(), dtype=dtype,
        attn_implementation=wide.config._attn_implementation,
    ).eval()  # fmt: skip
    if any("expert" in name for name, _ in theirs.named_modules()):
        theirs.set_experts_implementation("eager")
    return theirs
