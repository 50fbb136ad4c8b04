"""Our models beside Hugging Face's in half precision: how many greedy texts of random tiny models are the same.

`python benchmarks/half_precision.py` prints a line a family: of so many models, each with other random weights and
another text, how many write the same tokens in bfloat16 and in float16, and, in brackets, how many first logits are
equal to the bit. Families that do not write are counted by the labels that they give to all tokens, or to the image.
The models are loaded as published ones are: from weights in float32 into the dtype asked for, which keeps in float32
what a family keeps so.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoConfig, HfArgumentParser, PreTrainedModel

from fratrie.conversion import from_hf

_DECODER = {
    **{"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 128, "vocab_size": 500, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
_ENCODER = {name: value for name, value in _DECODER.items() if name != "num_key_value_heads"}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"moe_intermediate_size": 64, "first_k_dense_replace": 1},
}
_SEQ2SEQ = {
    **{"vocab_size": 500, "d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 128},
    **{"decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0},
    **{"eos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": 2, "max_position_embeddings": 64},
}
_T5 = {
    **{"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4},
    **{"pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 2},
}
# A family, the class to build, and the fields of its configuration.
MODELS = (
    ("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500, "eos_token_id": None,
                                 "bos_token_id": 1, "pad_token_id": 0}),
    ("llama", "LlamaForCausalLM", _DECODER),
    ("mistral", "MistralForCausalLM", {**_DECODER, "sliding_window": 8}),
    ("qwen2", "Qwen2ForCausalLM", _DECODER),
    ("qwen3", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 16}),
    ("mixtral", "MixtralForCausalLM", {**_DECODER, "num_local_experts": 8}),
    ("qwen3_moe", "Qwen3MoeForCausalLM", {**_DECODER, **_EXPERTS, "head_dim": 16}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {**_DECODER, **_LATENT}),
    ("bart", "BartForConditionalGeneration", _SEQ2SEQ),
    ("marian", "MarianMTModel", {**_SEQ2SEQ, "decoder_vocab_size": 500}),
    ("t5", "T5ForConditionalGeneration", _T5),
    ("t5 1.1", "T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("bert", "BertForMaskedLM", _ENCODER),
    ("roberta", "RobertaForMaskedLM", {**_ENCODER, "pad_token_id": 1}),
    ("camembert", "CamembertForMaskedLM", {**_ENCODER, "pad_token_id": 1}),
    ("xlm-roberta", "XLMRobertaForMaskedLM", {**_ENCODER, "pad_token_id": 1}),
    ("modernbert", "ModernBertForMaskedLM", {**_ENCODER, "local_attention": 8}),
    ("vit", "ViTForImageClassification", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                                          "intermediate_size": 128, "image_size": 32, "patch_size": 8,
                                          "num_labels": 20}),
)  # fmt: skip


@dataclass
class Options:
    """What to measure."""

    models: int = field(default=40, metadata={"help": "Random models a family and dtype."})
    tokens: int = field(default=20, metadata={"help": "Tokens to write."})
    families: list[str] = field(default_factory=list, metadata={"help": "Families, by default all."})


def main() -> None:
    """Print the table."""
    (options,) = HfArgumentParser(Options, description=__doc__).parse_args_into_dataclasses()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    dtypes = (torch.bfloat16, torch.float16)
    print(f"{'':12} " + " ".join(f"{str(dtype).removeprefix('torch.'):>18}" for dtype in dtypes))
    for family, class_name, fields in MODELS:
        if options.families and family not in options.families:
            continue
        cells = []
        for dtype in dtypes:
            pairs = [
                compare(family, class_name, fields, dtype, seed, options.tokens) for seed in range(options.models)
            ]
            texts, logits = (sum(counts) for counts in zip(*pairs, strict=True))
            cells.append(f"{texts} of {options.models} ({logits})")
        print(f"{family:12} " + " ".join(f"{cell:>18}" for cell in cells), flush=True)


def compare(
    family: str, class_name: str, fields: dict[str, Any], dtype: torch.dtype, seed: int, tokens: int
) -> tuple[bool, bool]:
    """Whether both models write the same text, or give the same labels; and whether their first logits are equal."""
    torch.manual_seed(seed)
    theirs = load(family, class_name, fields, dtype)
    ours = from_hf(theirs)
    ids = torch.randint(3, 500, (1, 8))
    images = theirs.main_input_name == "pixel_values"
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32).to(dtype)} if images else {"input_ids": ids}
    first = {**inputs, "decoder_input_ids": ids[:, :1]} if theirs.config.is_encoder_decoder else inputs
    with torch.no_grad():
        expected, actual = theirs(**first).logits, ours(**first).logits
    equal = torch.equal(actual, expected)
    if not theirs.can_generate():
        return torch.equal(actual.argmax(-1), expected.argmax(-1)), equal
    options: Any = {"max_new_tokens": tokens, "do_sample": False}
    return torch.equal(theirs.generate(**inputs, **options), ours.generate(**inputs, **options)), equal


def load(family: str, class_name: str, fields: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A random model of theirs, with weights so far from zero that its texts vary."""
    model_class: Any = getattr(transformers, class_name)
    config = AutoConfig.for_model(family.split()[0], **fields)
    weights = model_class(config).state_dict()
    for name, weight in weights.items():
        if weight.is_floating_point() and "embed_positions" not in name:
            is_norm = weight.ndim == 1 and name.endswith("weight")
            weight.normal_(1.0 if is_norm else 0.0, 0.1)
    return model_class.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()


if __name__ == "__main__":
    main()
