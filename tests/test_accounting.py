"""The account of a model against the model itself: its parameters, torch's counter of operations, its tensors."""

import copy
import math
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from fratrie import (
    FratrieDecoderConfig,
    FratrieEncoderConfig,
    FratrieSeq2SeqConfig,
    norm_slots,
)
from fratrie.accounting import (
    Parameters,
    activation_bytes,
    cache_bytes,
    count_parameters,
    flops_per_token,
    forward_flops,
    training_flops,
)
from fratrie.accounting.parameters import build_on_meta
from fratrie.cli.account import layer_table, main
from fratrie.modeling.attention import SoftmaxAttention
from fratrie.modeling.mixer import Mixer
from fratrie.modeling.mixers import MIXERS
from fratrie.presets import PRESETS, preset

TINY = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "experts_implementation": "batched_mm",
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_chunk_size": 8}
CONFIGS = {
    "encoder": FratrieEncoderConfig(**TINY, type_vocab_size=2),
    "grouped": FratrieDecoderConfig(**TINY, num_key_value_heads=2, head_dim=6, gated_feed_forward=True),
    "sparse": FratrieDecoderConfig(**TINY, **SPARSE, mlp_layer_types=["dense", "sparse"], num_shared_experts=1),
    "sparse gated": FratrieEncoderConfig(**TINY, **SPARSE, gated_feed_forward=True),
    "sliding": FratrieDecoderConfig(**TINY, layer_types=["sliding_attention"] * 2, sliding_window=5),
    "sparse shared": FratrieDecoderConfig(
        **TINY, **SPARSE, num_shared_experts=2, shared_expert_intermediate_size=6, shared_experts_gate=True
    ),
    "output gate": FratrieDecoderConfig(**TINY, attention_output_gate=True, query_key_norm="rms_norm_plus_one"),
    "linear": FratrieEncoderConfig(**TINY, **LINEAR),
    "linear causal": FratrieDecoderConfig(**TINY, **LINEAR, num_key_value_heads=1, position_type="none"),
    "seq2seq": FratrieSeq2SeqConfig(
        **TINY,
        experts_implementation="batched_mm",
        encoder={"hidden_size": 20, "num_key_value_heads": 1, **SPARSE},
        share_embeddings=False,
        decoder={"num_key_value_heads": 2, "num_hidden_layers": 1},
    ),
    "text classifier": FratrieEncoderConfig(
        **TINY,
        classifier_hidden_sizes=[12],
        classifier_norm="layer_norm",
        architectures=["FratrieEncoderForSequenceClassification"],
    ),
    "pooler": FratrieEncoderConfig(**TINY, pooler_activation="tanh", architectures=["FratrieEncoderModel"]),
    "token classifier": FratrieEncoderConfig(**TINY, architectures=["FratrieEncoderForTokenClassification"]),
    "relative": FratrieEncoderConfig(**TINY, position_type="relative"),
    "latent": FratrieDecoderConfig(**TINY, kv_lora_rank=10, q_lora_rank=12, qk_nope_head_dim=6, v_head_dim=5),
}
# The presets that differ in more than sizes.
STRUCTURES = ["transformer-base", "bert-base", "modernbert-base", "multilingual-e5-small", "vit-base-patch16-224"]
STRUCTURES += ["gpt2", "llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2-7b", "qwen3-8b", "qwen3-30b-a3b"]
STRUCTURES += ["mixtral-8x7b", "deepseek-v3", "bart-base", "marian", "t5-small", "t5-v1.1-small"]


def shrink(name, dropout=0.0):
    """A preset with small sizes and its own structure, and one rate of dropout."""
    config = preset(name)
    stack = getattr(config, "decoder", None) or config
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    small |= {"vocab_size": 500, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    small |= {f"{kind}_dropout": dropout for kind in ("embedding", "hidden", "attention", "activation")}
    if stack.num_key_value_heads < stack.num_attention_heads:
        small["num_key_value_heads"] = 2
    if config.model_type == "fratrie_seq2seq":
        return preset(name, **small, decoder_start_token_id=0, head_dim=16)
    small["layer_types"] = stack.layer_types[-2:]
    small["head_dim"] = stack.head_dim * stack.num_attention_heads * 16 // stack.hidden_size
    if stack.sliding_window:
        small["sliding_window"] = 6
    if stack.num_experts:
        small |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    if getattr(stack, "patch_size", None):
        small |= {"image_size": 32, "num_labels": 5}
    if stack.kv_lora_rank:
        small |= {"kv_lora_rank": 40, "q_lora_rank": 50, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8}
        small |= {"router_num_groups": 2, "router_groups_per_tok": 1, "mlp_layer_types": ["dense", "sparse"]}
    return preset(name, **small)


def inputs_of(config, batch, length, source_length=None, device="meta"):
    def ids(tokens):
        return torch.ones(batch, tokens, dtype=torch.long, device=device)

    if config.model_type == "fratrie_seq2seq":
        return {"input_ids": ids(source_length or length), "decoder_input_ids": ids(length)}
    if getattr(config, "patch_size", None):
        return {"pixel_values": torch.ones(batch, 3, config.image_size, config.image_size, device=device)}
    return {"input_ids": ids(length)}


def count_flops(config, batch, length, source_length=None, train=False):
    model = build_on_meta(config)
    with FlopCounterMode(display=False) as counter:
        output = model(**inputs_of(config, batch, length, source_length), use_cache=False)
        if train:
            sum(part.sum() for part in output.values() if part.grad_fn is not None).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [*PRESETS, *CONFIGS])
def test_parameters_add_up(name):
    config = CONFIGS.get(name) or preset(name)
    counted, model = count_parameters(config), build_on_meta(config)
    assert counted.total == model.num_parameters()
    assert sum(counted.by_role.values()) == sum(counted.by_layer.values()) == counted.total
    layers = [module for path, module in model.named_modules() if path.rpartition(".")[0].endswith("layers")]
    expected = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    assert [count for place, count in counted.by_layer.items() if place] == expected


def test_gpt3_table():
    """The table of the weights of GPT-3 that is usually given, without biases, norms and positions."""
    roles = count_parameters(preset("gpt3-175b")).by_role
    small = [roles.pop(role) for role in ("position embedding", "biases", "norms")]
    attention = ("query", "key", "value", "attention output")
    assert roles == {
        "token embedding": 617_558_016,
        "unembedding": 617_558_016,
        **dict.fromkeys(attention, 14_495_514_624),
        "up projection": 57_982_058_496,
        "down projection": 57_982_058_496,
    }
    assert sum(roles.values()) == 175_181_291_520
    assert [roles[role] // 96 // 96 for role in attention] == [1_572_864] * 4
    assert sum(roles[role] for role in attention) // 96 // 96 == 6_291_456
    assert small == [2048 * 12_288, 96 * (9 * 12_288), (96 * 4 + 2) * 12_288]


@pytest.mark.parametrize(("name", "active"), [("mixtral-8x7b", 12_879_925_248), ("qwen3-30b-a3b", 3_353_032_704)])
def test_active_parameters(name, active):
    """12.9 billion (Jiang et al. 2024) and 3.3 billion (Yang et al. 2025) in the papers."""
    assert count_parameters(preset(name)).active == active
    dense = count_parameters(preset("gpt2"))
    assert dense.active == dense.total


def test_active_parameters_are_those_that_move_a_token():
    config = FratrieDecoderConfig(**{**TINY, **SPARSE, "experts_implementation": "eager"}, position_type="none")
    with torch.device("cpu"):
        model = type(build_on_meta(config))(config)
    model(torch.tensor([[3]])).logits.sum().backward()
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    used = sum(p.grad[p.grad.flatten(1).any(1)].numel() for p in experts)
    unused = sum(p.numel() for p in experts) - used
    assert count_parameters(config).active == model.num_parameters() - unused


@pytest.mark.parametrize("name", [*PRESETS, *CONFIGS])
def test_flops_equal_torch(name):
    config = CONFIGS.get(name) or preset(name, experts_implementation="batched_mm")
    length, source = (197, None) if getattr(config, "patch_size", None) else (21, 13)
    assert forward_flops(config, 2, length, source) == count_flops(config, 2, length, source)


def set_eager(config):
    """Fused kernels form the scores once more in the backward pass."""
    for stack in (config, getattr(config, "encoder", None), getattr(config, "decoder", None)):
        if stack is not None:
            stack._attn_implementation = "eager"
    return config


# Their convolutions have a channel a group, which torch's count of a backward pass takes for one group.
CONVOLVED = {"lfm2-1.2b", "bamba-9b"}


@pytest.mark.parametrize("name", [name for name in (*PRESETS, *CONFIGS) if name not in CONVOLVED])
def test_training_flops_equal_torch(name):
    tiny = {"num_hidden_layers": 4, "experts_implementation": "batched_mm"}
    config = set_eager(copy.deepcopy(CONFIGS.get(name)) or preset(name, **tiny))
    length, source = (197, None) if getattr(config, "patch_size", None) else (21, 13)
    assert training_flops(config, 2, length, source) == count_flops(config, 2, length, source, train=True)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16])
def test_chunks_of_linear_attention(length):
    """Of 8 tokens at most, with the padding behind the last."""
    config = set_eager(copy.deepcopy(CONFIGS["linear causal"]))
    assert forward_flops(config, 2, length) == count_flops(config, 2, length)
    assert training_flops(config, 2, length) == count_flops(config, 2, length, train=True)


@settings(deadline=None, max_examples=8)
@given(batch=st.integers(1, 4), length=st.integers(1, 40))
def test_flops_grow_linearly_with_rows_and_quadratically_with_length(batch, length):
    config = CONFIGS["grouped"]
    assert forward_flops(config, batch, length) == batch * forward_flops(config, 1, length)
    growth = flops_per_token(config, length + 1) - flops_per_token(config, length)
    assert growth == pytest.approx(2 * 4 * 4 * 6)  # layers, two products of a multiply-add, heads, head size
    first = flops_per_token(config, 1)
    weights = sum(
        p.numel() for n, p in build_on_meta(config).named_parameters() if p.ndim == 2 and "embed_pos" not in n
    )
    assert first == pytest.approx(2 * weights + growth)


def cached_tensors(cache):
    if hasattr(cache, "self_attention_cache"):
        yield from cached_tensors(cache.self_attention_cache)
        yield from cached_tensors(cache.cross_attention_cache)
        return
    for layer in cache.layers:
        yield from getattr(layer, "recurrent_states", {}).values()
        if getattr(layer, "keys", None) is not None:
            yield from (layer.keys, layer.values)


CACHED = [name for name in STRUCTURES if preset(name).model_type != "fratrie_encoder"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in [*CACHED, "sliding", "linear causal", "latent"]]
    + [(name, torch.bfloat16) for name in ("grouped", "sliding", "linear causal", "seq2seq")],
)
def test_cache_bytes_equal_a_real_cache(name, dtype):
    config = CONFIGS.get(name) or shrink(name)
    model = type(build_on_meta(config))(config).to(dtype).eval()
    for length in (3, 11):
        with torch.no_grad():
            cache = model(**inputs_of(config, 2, length, 7, "cpu"), use_cache=True).cache
        tensors = list(cached_tensors(cache))
        assert cache_bytes(config, 2, length, dtype, 7) == sum(tensor.nbytes for tensor in tensors) > 0


def test_encoders_have_no_cache():
    assert cache_bytes(CONFIGS["encoder"], 2, 9) == 0


def saved_bytes(config, batch, length):
    """Bytes of the tensors that a training step in float32 keeps, weights left out."""
    torch.manual_seed(0)
    model = type(build_on_meta(config))(config).train()
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    inputs = inputs_of(config, batch, length, device="cpu")
    if "For" in type(model).__name__:
        labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        inputs["labels"] = torch.ones(batch, dtype=torch.long) if labels is None else labels
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = tensor  # the tensor stays alive, so no address comes twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


OTHERS = {
    "linear": FratrieEncoderConfig(num_hidden_layers=2, layer_types=["linear_attention"] * 2),
    "linear causal": FratrieDecoderConfig(num_hidden_layers=2, layer_types=["linear_attention"] * 2),
    "latent": FratrieDecoderConfig(num_hidden_layers=2, kv_lora_rank=40, q_lora_rank=50, qk_nope_head_dim=32),
    "sandwich alibi": FratrieDecoderConfig(num_hidden_layers=2, **norm_slots("sandwich"), position_type="alibi"),
}


def unfused_bytes(config, batch, length):
    """What torch keeps on a CPU besides the estimate: numbers of RMSNorms, masks of dropouts, matrices of scores."""
    model = type(build_on_meta(config))(config).train()
    more = []

    def hook(module, inputs, output):
        if isinstance(module, nn.RMSNorm):
            more.append(output.nbytes)
        elif isinstance(module, nn.Dropout) and module.p:
            more.append(output.nbytes - output.numel())
        elif isinstance(module, SoftmaxAttention):
            matrices = 3 if module.config.attention_dropout else 0
            more.append(4 * batch * matrices * module.config.num_attention_heads * length**2)

    for module in model.modules():
        module.register_forward_hook(hook)
    model(**inputs_of(config, batch, length, device="cpu"))
    return sum(more)


DROPPING = ["transformer-base", "bert-base", "vit-base-patch16-224", "gpt2", "bart-base", "marian"]


@pytest.mark.parametrize(
    ("name", "dropout"),
    [(name, 0.0) for name in [*STRUCTURES, *OTHERS]] + [(name, 0.1) for name in DROPPING],
)
def test_activations_are_near_the_tensors_that_torch_saves(name, dropout):
    """With what is not fused on a CPU; by itself the estimate is that of fused kernels."""
    config = OTHERS.get(name) or shrink(name, dropout)
    length = 5 if getattr(config, "patch_size", None) else 96
    measured, estimate = saved_bytes(config, 2, length), activation_bytes(config, 2, length, torch.float32)
    assert 0.99 < measured / (estimate + unfused_bytes(config, 2, length)) < 1.05
    if not dropout and not any(isinstance(module, nn.RMSNorm) for module in build_on_meta(config).modules()):
        assert 0.99 < measured / estimate < 1.05


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_dropout_adds_a_byte_for_each_number(activation):
    """On a CPU torch keeps the mask of a dropout in float32: three bytes more than fused kernels."""
    plain = {**TINY, "hidden_act": activation}
    dropping = {**plain, **{f"{kind}_dropout": 0.5 for kind in ("embedding", "hidden", "activation")}}
    decoder, cross = 16 * (1 + 2 * 2) + 24 * 2, 16 * 2  # embeddings, branches and feed-forwards of two layers
    for config_class, dropped in ((FratrieDecoderConfig, decoder), (FratrieSeq2SeqConfig, 2 * decoder + cross)):
        estimated, measured = (
            count(config_class(**dropping), 2, 10) - count(config_class(**plain), 2, 10)
            for count in (lambda *of: activation_bytes(*of, torch.float32), saved_bytes)
        )
        assert measured - estimated == 3 * 2 * 10 * dropped


def test_half_the_bytes_in_half_the_precision():
    config = CONFIGS["grouped"]
    logits = 2 * 9 * 4 * config.vocab_size
    single, half = (activation_bytes(config, 2, 9, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert single - logits == 2 * (half - logits)


def test_unknown_layers_are_refused(monkeypatch):
    class Unknown(Mixer):
        layer_types = ("chunked_attention",)

    monkeypatch.setitem(MIXERS, "unknown", Unknown)
    config = FratrieDecoderConfig(**TINY, layer_types=["chunked_attention"] * 2)
    with pytest.raises(ValueError, match="operations of a Unknown have no formula"):
        forward_flops(config, 1, 4)
    for memory in (cache_bytes, activation_bytes):
        with pytest.raises(ValueError, match=r"of a Unknown ha(s|ve) no formula"):
            memory(config, 1, 4)


def test_foreign_configurations_are_refused():
    with pytest.raises(ValueError, match="model_type='bert' is none of fratrie_encoder"):
        count_parameters(SimpleNamespace(model_type="bert"))
    with pytest.raises(ValueError, match=r"architectures=\['BertModel'\]: use one of .*FratrieEncoderModel"):
        count_parameters(FratrieEncoderConfig(**TINY, architectures=["BertModel"]))


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["accounting", *arguments])
    main()


def test_table_of_a_preset(monkeypatch, capsys):
    run_main(monkeypatch, "gpt3-175b", "--batch_size", "2")
    lines = capsys.readouterr().out.splitlines()
    assert "sum of the matrices                      175,181,291,520            99.98%" in lines
    assert "token embedding                              617,558,016             0.35%" in lines
    assert "layers 0-95                                1,812,099,072            99.28%" in lines
    assert "outside of the layers                      1,260,306,432             0.72%" in lines
    assert "2 x 2,048 tokens, bfloat16" in lines
    kept = 2 * 2 * 96 * 12_288  # bytes of a token
    cache = next(line for line in lines if line.startswith("cache of keys, values, states"))
    assert cache.split()[-4:] == [f"{2 * 2048 * kept / 2**30:.4g}", "GiB", f"{kept / 2**20:.4g}", "MiB"]
    for row, training in (("FLOPs of a forward pass", False), ("FLOPs of a training step", True)):
        all_tokens, token = next(line for line in lines if line.startswith(row)).split()[-2:]
        expected = flops_per_token(preset("gpt3-175b"), 2048, training)
        assert [float(all_tokens), float(token)] == pytest.approx([2 * 2048 * expected, expected], rel=1e-3)


def test_table_by_layer_joins_equal_neighbours():
    layers = {"": 5, "encoder.layers.0": 7, "encoder.layers.1": 8, "encoder.layers.2": 8, "decoder.layers.0": 8}
    lines = layer_table(Parameters({(place, "biases"): count for place, count in layers.items()}, active=36))
    assert [line.split() for line in lines[1:]] == [
        ["encoder", "layer", "0", "7", "19.44%"],
        ["encoder", "layers", "1-2", "8", "44.44%"],
        ["decoder", "layer", "0", "8", "22.22%"],
        ["outside", "of", "the", "layers", "5", "13.89%"],
    ]


def test_table_of_a_folder(monkeypatch, capsys, tmp_path):
    config = CONFIGS["sparse"]
    type(build_on_meta(config))(config).save_pretrained(tmp_path)
    counted = count_parameters(config)
    for place in (tmp_path, tmp_path / "config.json"):
        run_main(monkeypatch, str(place), "--length", "7", "--dtype", "float32")
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["all", "parameters", f"{counted.total:,}", "100.00%"] in lines
        active = [f"{counted.active:,}", f"{counted.active / counted.total:.2%}"]
        assert ["active", "for", "a", "token", *active] in lines
        assert ["weights", f"{4 * counted.total / 2**10:.4g}", "KiB"] in lines


def test_a_folder_of_a_presets_name_counts_with_a_configuration(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2-medium").write_text("")
    run_main(monkeypatch, "gpt2-medium")
    run_main(monkeypatch, "gpt2")
    assert "124,439,808" in capsys.readouterr().out
    CONFIGS["encoder"].save_pretrained(tmp_path / "gpt2")
    run_main(monkeypatch, "gpt2")
    assert f"{count_parameters(CONFIGS['encoder']).total:,}" in capsys.readouterr().out


def test_lengths_that_the_model_has_not(monkeypatch, capsys):
    with pytest.raises(ValueError, match="--length 513 is more than the model's max_position_embeddings=512"):
        run_main(monkeypatch, "bert-base", "--length", "513")
    with pytest.raises(ValueError, match="an image of this model is 197 tokens"):
        run_main(monkeypatch, "vit-base-patch16-224", "--length", "196")
    for length in ("0", "many"):
        with pytest.raises(SystemExit, match="2"):
            run_main(monkeypatch, "bert-base", "--length", length)
        assert f"{length} must be a whole number, at least 1" in capsys.readouterr().err
    run_main(monkeypatch, "vit-base-patch16-224")
    assert "1 x 197 tokens, bfloat16" in capsys.readouterr().out


def test_a_source_as_long_as_the_target_must_have_its_positions(monkeypatch, tmp_path):
    config = FratrieSeq2SeqConfig(**TINY, position_type="learned", encoder={"max_position_embeddings": 9})
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--length 10 is more than the model's max_position_embeddings=9"):
        run_main(monkeypatch, str(tmp_path), "--length", "10")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_unknown_names_end_without_a_traceback(monkeypatch, capsys, tmp_path):
    for name, message in (("gpt3", "did you mean"), (str(tmp_path), "config.json")):
        monkeypatch.setattr(sys, "argv", ["accounting", name])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("fratrie.cli.account", run_name="__main__")
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_attention_share_of_gpt3_is_that_of_the_formula():
    """6 N + 12 L D T operations a token in training (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B)."""
    config, length = preset("gpt3-175b"), 2048
    matrices = 175_181_291_520 - 617_558_016  # the look-up of the embedding costs nothing
    expected = 6 * matrices + 12 * 96 * 12_288 * length
    assert math.isclose(3 * flops_per_token(config, length), expected, rel_tol=1e-12)


@pytest.mark.parametrize("sizes", [(0, 4), (1, -4), (1, 4, 0)])
def test_less_than_one_row_or_token_is_refused(sizes):
    config = CONFIGS["seq2seq"]
    for count in (forward_flops, lambda c, b, n, s=None: cache_bytes(c, b, n, source_length=s),
                  lambda c, b, n, s=None: activation_bytes(c, b, n, source_length=s)):  # fmt: skip
        with pytest.raises(ValueError, match=r"(batch_size|length|source_length)=(0|-4) must be at least 1"):
            count(config, *sizes)
