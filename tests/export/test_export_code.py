"""Folders that carry their code, read where fratrie cannot be imported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from combinations import HEADS, case_of, cases, padded_inputs
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    pipeline,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import fratrie
from fratrie.data import LABELS
from fratrie.export import carries_code
from fratrie.tokenization import train_byte_level_bpe, with_sibling

TEXT = "Je m'entends bien avec ma mère."
# What each sibling is made of: experts, windows, latents, linear attention, relative positions, unequal stacks.
CASES = {"encoder": "modernbert", "decoder": "all_mixers", "seq2seq": "linear_to_sliding"}
# Mixers in files of their own, all of which are to travel.
MORE = cases(names=("hybrid", "windows", "compressed_to_states"))
HEADS_OF_IMAGES = {
    "image_classification": (fratrie.FratrieEncoderForImageClassification, AutoModelForImageClassification)
}


@pytest.fixture(scope="module")
def tokenizers():
    encoder = train_byte_level_bpe([TEXT] * 4, vocab_size=300, show_progress=False)
    return {sibling: with_sibling(encoder, sibling) for sibling in CASES}


@pytest.fixture(scope="module")
def readings(tmp_path_factory, tokenizers):
    """What one process without fratrie says to each plan, beside what was expected: `(call, answer, expected)`."""
    plans = {
        "heads": plan_heads(tmp_path_factory.mktemp("heads")),
        "pipelines": plan_pipelines(tmp_path_factory.mktemp("pipelines"), tokenizers),
        "moved": plan_moved(tmp_path_factory.mktemp("moved")),
    }
    calls = [call for plan in plans.values() for call, _ in plan]
    answers = iter(read_without_fratrie(calls, tmp_path_factory.mktemp("reader")))
    return {name: [(call, next(answers), expected) for call, expected in plan] for name, plan in plans.items()}


def read_without_fratrie(calls, folder):
    """Run the calls of `without_fratrie.py` in a new process: what each returned, and its tensors."""
    path = folder / "plan.json"
    path.write_text(json.dumps(calls))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("without_fratrie.py")
    done = subprocess.run([sys.executable, script, path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    tensors = load_file(path.with_suffix(".safetensors"))
    said = json.loads(path.with_suffix(".said.json").read_text())
    return [
        (answer, {name.split(".", 1)[1]: value for name, value in tensors.items() if name.startswith(f"{index}.")})
        for index, answer in enumerate(said)
    ]


def save_with_code(model, folder, tokenizer=None):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    fratrie.export_code(model, folder)
    return folder


def image_classifier():
    torch.manual_seed(0)
    config = fratrie.FratrieEncoderConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, patch_size=4, image_size=8,
        num_labels=3, position_type="learned", max_position_embeddings=5, classifier_pooling="first",
    )  # fmt: skip
    return fratrie.FratrieEncoderForImageClassification(config).eval()


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def plan_heads(folder):
    plan = []
    built = [
        (sibling, head, case_of(sibling, name).build(head))
        for sibling, name in CASES.items()
        for head in HEADS[sibling]
    ]
    for sibling, head, model in [*built, ("encoder", "image_classification", image_classifier())]:
        checkpoint = save_with_code(model, folder / f"{sibling}-{head}")
        inputs = {"pixel_values": torch.randn(2, 3, 8, 8)} if "image" in head else padded_inputs(sibling, "left")
        auto = {**HEADS[sibling], **HEADS_OF_IMAGES}[head][1].__name__
        generate = head == "language_model" and sibling != "encoder"
        plan.append(plan_outputs(model, checkpoint, auto, inputs, generate))
    for case in MORE:
        model, auto = case.build(), HEADS[case.sibling]["language_model"][1].__name__
        checkpoint = save_with_code(model, folder / str(case))
        inputs, generate = padded_inputs(case.sibling, "left"), case.sibling != "encoder"
        plan.append(plan_outputs(model, checkpoint, auto, inputs, generate))
    for sibling in CASES:
        autos = {auto.__name__: ours.__name__ for ours, auto in HEADS[sibling].values()}
        call = {"folder": str(folder / f"{sibling}-language_model"), "autos": list(autos)}
        plan.append((["heads", call], (autos, {})))
    return plan


def plan_outputs(model, folder, auto, inputs, generate=False):
    """A call of `outputs`, and what the model itself answers."""
    save_file(inputs, f"{folder}.inputs")
    call = {"folder": str(folder), "auto": auto, "inputs": f"{folder}.inputs", "generate": generate}
    with torch.no_grad():
        tensors = {"output": model(**inputs)[0]}
        if generate:
            prompts = {name: value for name, value in inputs.items() if not name.startswith("decoder")}
            tensors["generated"] = model.generate(**prompts, max_new_tokens=5, do_sample=False)
    weights = {f"weight.{name}": weight for name, weight in model.state_dict().items()}
    return ["outputs", call], (type(model).__name__, {**tensors, "again": tensors["output"], **weights})


def plan_pipelines(folder, tokenizers):
    sizes = {"vocab_size": 300, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "initializer_range": 0.3}
    labels = {"id2label": dict(enumerate(LABELS)), "problem_type": "multi_label_classification"}
    labels["label2id"] = {label: index for index, label in enumerate(LABELS)}
    models = {
        "family": case_of("encoder").build("sequence_classification", **sizes, **labels),
        "decoder-family": case_of("decoder").build("sequence_classification", **sizes, **labels),
        "seq2seq": case_of("seq2seq").build(**sizes),
        "decoder": case_of("decoder").build(**sizes),
        "masks": case_of("encoder").build(**sizes),
        "base": case_of("encoder").build("base", **sizes),
        "tags": case_of("encoder").build("token_classification", **sizes),
    }
    for name, model in models.items():
        sibling = model.config.model_type.removeprefix("fratrie_")
        save_with_code(model, folder / name, tokenizers[sibling])
    greedy = {"do_sample": False, "max_new_tokens": 5}
    calls = (
        ("family", "family-relations", {}),
        ("family", None, {"scores": True}),
        ("decoder-family", None, {}),
        ("family", "text-classification", {"top_k": None}),
        ("seq2seq", "text2text-generation", greedy),
        ("seq2seq", None, greedy),
        ("decoder", "text-generation", greedy),
        ("masks", "fill-mask", {}),
        ("base", "feature-extraction", {}),
        ("tags", "token-classification", {}),
    )
    plan = []
    for name, task, options in calls:
        text = TEXT.replace("bien", "<mask>") if task == "fill-mask" else TEXT
        call = ["serve", {"folder": str(folder / name), "task": task, "text": text, **options}]
        # With fratrie, a folder with code needs no trust, and names its task too.
        plan.append((call, pipeline(task, model=str(folder / name), device="cpu")(text, **options)))
    again = {"folder": str(folder / "family"), "auto": "AutoModelForSequenceClassification"}
    plan.append((["serve_saved_again", {**again, "task": "family-relations", "text": TEXT}], plan[0][1]))
    for sibling, name in (("encoder", "family"), ("decoder", "decoder"), ("seq2seq", "seq2seq")):
        plan.append((["tokens", {"folder": str(folder / name), "text": TEXT}], tokenizers[sibling](TEXT)["input_ids"]))
    return plan


def plan_moved(folder):
    """Code exported before the model is saved, then once more; the folder is loaded at another place."""
    model = case_of("encoder").build()
    checkpoint = folder / "new" / "checkpoint"
    fratrie.export_code(model, checkpoint)
    model.save_pretrained(checkpoint)
    first = read_files(checkpoint)
    fratrie.export_code(model, checkpoint)
    assert read_files(checkpoint) == first
    moved = shutil.move(checkpoint, folder / "elsewhere")
    return [plan_outputs(model, moved, "AutoModelForMaskedLM", padded_inputs("encoder"))]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["heads", "moved"])
def test_every_head_loads_without_fratrie_and_gives_the_same(readings, plan):
    for call, (answer, tensors), (name, values) in readings[plan]:
        assert answer == name
        assert tensors.keys() == values.keys()
        # Weights to the bit; products of matrices may be rounded otherwise in another process.
        rounded = {"output": 1e-5, "again": 1e-5}
        differ = [key for key, value in values.items()
                  if not torch.allclose(tensors[key], value, rtol=0, atol=rounded.get(key, 0))]  # fmt: skip
        assert not differ, (call, differ)


def same(answer, expected):
    """Whether two answers are equal, their numbers to rounding."""
    if isinstance(expected, float):
        return answer == pytest.approx(expected, abs=1e-5)
    if isinstance(expected, list):
        return len(answer) == len(expected) and all(map(same, answer, expected))
    if isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(same(answer[key], expected[key]) for key in expected)
    return answer == expected


@pytest.mark.slow
def test_pipelines_and_tokenizers_work_without_fratrie(readings):
    for call, (answer, _), expected in readings["pipelines"]:
        assert same(answer, json.loads(json.dumps(expected, default=float))), call


def test_a_folder_holds_code_only_where_it_was_exported(tmp_path):
    model = case_of("encoder").build("sequence_classification", id2label=dict(enumerate(LABELS)))
    model.save_pretrained(tmp_path / "plain")
    plain = read_files(tmp_path / "plain")
    assert not [name for name in plain if name.endswith(".py")]
    exported = save_with_code(model, tmp_path / "exported")
    files, config = read_files(exported), json.loads((exported / "config.json").read_text())
    carried = {"auto_map", "custom_pipelines"}
    assert {name: value for name, value in config.items() if name not in carried} == json.loads(plain["config.json"])
    assert carried < config.keys()
    assert {name for name in files if not name.endswith(".py")} == plain.keys()
    assert not [name for name in files if str(tmp_path).encode() in files[name]]
    # The model that was exported, and one that was loaded with fratrie, leave no word of code elsewhere …
    loaded = type(model).from_pretrained(exported)
    for index, source in enumerate((model, loaded)):
        source.save_pretrained(tmp_path / str(index))
        assert read_files(tmp_path / str(index)) == plain
    # … and keep it where it lies.
    loaded.save_pretrained(exported)
    assert read_files(exported) == files


def test_a_model_knows_whether_it_was_loaded_from_a_folder_with_code(tmp_path):
    model = case_of("encoder").build()
    model.save_pretrained(tmp_path / "plain")
    loaded = type(model).from_pretrained(tmp_path / "plain")
    assert not carries_code(model) and not carries_code(loaded)
    exported = save_with_code(model, tmp_path / "exported")
    classifier = fratrie.FratrieEncoderForSequenceClassification.from_pretrained(exported)
    assert carries_code(model) and carries_code(classifier)
    save_with_code(classifier, tmp_path / "again")  # as the scripts do with what they trained
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == classifier.config.auto_map


def test_with_fratrie_its_own_class_loads_the_folder(tmp_path, tokenizers):
    model = case_of("encoder").build(vocab_size=300)
    folder = save_with_code(model, tmp_path / "exported", tokenizers["encoder"])
    for trust in (None, False, True):
        assert type(AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=trust)) is type(model)
        assert len(AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)) == len(tokenizers["encoder"])


def test_an_export_replaces_what_an_earlier_one_wrote(tmp_path):
    def build(labels):
        return case_of("encoder").build("sequence_classification", id2label=dict(enumerate(labels)))

    others = {
        "auto_map": {"AutoTokenizer": ["mine.Slow", None], "AutoProcessor": "someone/repo--encoder.Processor"},
        "custom_pipelines": {"mine": {"impl": "mine.Mine"}},
    }
    model = build(LABELS)
    folder = save_with_code(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert list(config["custom_pipelines"]) == ["family-relations"]
    for name, entries in others.items():
        config[name] |= entries
        vars(model.config)[name] |= entries
    (folder / "config.json").write_text(json.dumps(config))
    model.config.id2label = build([f"{label}!" for label in LABELS]).config.id2label
    fratrie.export_code(model, folder)
    for said in (vars(model.config), json.loads((folder / "config.json").read_text())):
        assert said["custom_pipelines"] == others["custom_pipelines"]
        assert said["auto_map"] == config["auto_map"]

    # Where no pipeline is left, none is spoken of.
    model.config.custom_pipelines = {"family-relations": config["custom_pipelines"]["family-relations"]}
    model.save_pretrained(folder)
    assert "family-relations" in (folder / "config.json").read_text()
    fratrie.export_code(model, folder)
    assert "custom_pipelines" not in json.loads((folder / "config.json").read_text())
    assert "custom_pipelines" not in vars(model.config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds a list, not an object"),
        ("{}", "names no model_type"),
        ('{"model_type": ', "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ("\udcff", "cannot be read as JSON"),
        (None, "cannot be read as JSON"),
        ('{"model_type": "fratrie_encoder", "auto_map": ["encoder"]}', r"has auto_map = \['encoder'\], which is not"),
    ],
)
def test_a_broken_config_of_the_folder_is_named(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=message) as error:
        fratrie.export_code(case_of("encoder").build("base"), tmp_path)
    assert str(path) in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_class_that_a_checkpoint_carries_needs_no_export(tmp_path, monkeypatch):
    model = case_of("encoder").build("base")
    folder = save_with_code(model, tmp_path / "carried")
    # As for Hugging Face itself, but in a place of its own.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    carried = get_class_from_dynamic_module("encoder.FratrieEncoderModel", str(folder))
    with pytest.raises(ValueError, match="already carries its code: `save_pretrained` saves that code again"):
        fratrie.export_code(carried(carried.config_class(**model.config.to_diff_dict())), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_cannot_be_exported_is_said(tmp_path):
    bert = BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    with pytest.raises(ValueError, match="BertModel is none of the models of fratrie"):
        fratrie.export_code(bert, tmp_path)

    class Derived(fratrie.FratrieEncoderModel):
        """A class whose code is not the package's."""

    encoder = case_of("encoder").build("base")
    with pytest.raises(ValueError, match="Derived is none of"):
        fratrie.export_code(Derived(encoder.config), tmp_path)

    class FratrieEncoderModel(fratrie.FratrieEncoderModel):
        """Another one, of the same name."""

    with pytest.raises(ValueError, match="FratrieEncoderModel is none of"):
        fratrie.export_code(FratrieEncoderModel(encoder.config), tmp_path)
    sharded = case_of("encoder").build("base")
    sharded.__class__ = type("FSDPFratrieEncoderModel", (FSDPModule, type(sharded)), {})  # as torch's fully_shard does
    fratrie.export_code(sharded, tmp_path / "sharded")
    assert sharded.config.auto_map["AutoModel"] == "encoder.FratrieEncoderModel"
    shutil.rmtree(tmp_path / "sharded")
    bert.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a 'bert' model, not the 'fratrie_encoder' that"):
        fratrie.export_code(encoder, tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is a file"):
        fratrie.export_code(encoder, tmp_path / "config.json")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}
