"""`--export_code`: folders of the scripts that carry the code of their model, or none."""

import json

import pytest
from transformers import DistilBertConfig, DistilBertForMaskedLM

TRAINING = ["--disable_progress", "--report_to", "none", "--max_steps", 2]
SIZES = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"


def arguments(script, samples, out):
    tokenizer = samples / "tokenizer"
    if script == "convert.py":
        return ["--from", samples / "bert", "--out", out]
    new = ["--config_overrides", SIZES, "--tokenizer", tokenizer, "--output_dir", out, *TRAINING]
    if script == "finetune.py":
        return ["--train_file", samples / "train.jsonl", "--model_type", "encoder", *new]
    return ["--objective", "clm", "--files", samples / "train.jsonl", "--block_size", 32, *new]


def code_of(out):
    """Names of the code files, and what the config says of them."""
    config = json.loads((out / "config.json").read_text())
    return {path.name for path in out.glob("*.py")}, config.get("auto_map")


@pytest.mark.parametrize("script", ["finetune.py", "pretrain.py", "convert.py"])
def test_a_folder_carries_code_by_the_flag_only(run_script, samples, tmp_path, script):
    for flag in ([], ["--export_code"]):
        out = tmp_path / f"out{len(flag)}"
        code, _, stderr = run_script(script, *arguments(script, samples, out), *flag)
        assert code == 0, stderr
    assert code_of(tmp_path / "out0") == (set(), None)
    files, auto_map = code_of(tmp_path / "out1")
    own = "decoder.py" if script == "pretrain.py" else "encoder.py"
    assert {own, "configuration.py", "stack.py"} < files
    assert auto_map["AutoModel"].startswith(own.removesuffix("py"))
    assert {f"{reference.split('.')[0]}.py" for reference in auto_map.values()} <= files


def test_a_model_without_code_of_ours_is_refused_before_it_is_trained(run_script, samples, tmp_path):
    config = DistilBertConfig(vocab_size=300, dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=64)
    DistilBertForMaskedLM(config).save_pretrained(tmp_path / "model")
    options = ["--train_file", samples / "train.jsonl", "--tokenizer", samples / "tokenizer", *TRAINING]
    out = ["--output_dir", tmp_path / "out", "--export_code"]
    code, _, stderr = run_script("finetune.py", "--model", tmp_path / "model", *options, *out)
    assert code == 2
    assert "DistilBertForSequenceClassification is none of the models of fratrie" in stderr
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_way_back_has_no_code_to_export(run_script, samples, tmp_path):
    code, _, stderr = run_script("convert.py", "--from", samples, "--out", tmp_path, "--to_hf", "--export_code")
    assert code == 2
    assert "what --to_hf writes needs none" in stderr


def test_code_is_put_beside_a_checkpoint_of_ours(run_script, samples, tmp_path):
    for source, out, flag in (
        (samples / "bert", tmp_path / "a", []),
        (tmp_path / "a", tmp_path / "b", ["--export_code"]),
    ):
        code, _, stderr = run_script("convert.py", "--from", source, "--out", out, *flag)
        assert code == 0, stderr
    assert "encoder.py" in code_of(tmp_path / "b")[0]
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
