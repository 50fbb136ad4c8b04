"""Saved folders served in processes that know nothing but the folder."""

import json
import os
import subprocess
import sys

import pytest
import torch
from processes import run_forked
from transformers import BertConfig, BertForSequenceClassification, pipeline

from fratrie.data import LABELS

SENTENCE = "Je m'entends bien avec ma mère."


@pytest.fixture
def run_fresh(tmp_path):
    """Runs code in a new offline process without fratrie; what it assigns to `result` comes back."""

    def run(code, *arguments):
        script = f"import json, sys\n{code}\nprint('\\n' + json.dumps(result))"
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
def test_saved_folders_in_a_fresh_process(
    family_model,
    encoder_tokenizer,
    seq2seq_model,
    seq2seq_tokenizer,
    decoder_model,
    decoder_tokenizer,
    tmp_path,
):
    parts = {
        "family-relations": (family_model, encoder_tokenizer, {"scores": True}),
        "text-classification": (family_model, encoder_tokenizer, {"top_k": None}),
        "text2text-generation": (seq2seq_model, seq2seq_tokenizer, {"max_new_tokens": 6}),
        "text-generation": (decoder_model, decoder_tokenizer, {"do_sample": False, "max_new_tokens": 6}),
    }
    expected = {}
    for task, (model, tokenizer, arguments) in parts.items():
        pipe = pipeline(task, model=model, tokenizer=tokenizer)
        pipe.save_pretrained(tmp_path / task)
        saved = {path.name for path in (tmp_path / task).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= saved
        assert not [name for name in saved if name.endswith(".py")]
        assert "custom_pipelines" not in json.loads((tmp_path / task / "config.json").read_text())
        expected[task] = pipe(SENTENCE, **arguments)
    code = (
        "import fratrie, json, sys\n"
        "from transformers import pipeline\n"
        "folder, calls, text = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]\n"
        "print(json.dumps({t: pipeline(t, model=f'{folder}/{t}')(text, **k) for t, k in calls.items()}))"
    )
    calls = {task: arguments for task, (_, _, arguments) in parts.items()}
    done = run_forked("-c", code, tmp_path, json.dumps(calls), SENTENCE)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    scores = results["family-relations"].pop("scores")
    assert scores == pytest.approx(expected["family-relations"].pop("scores"), abs=1e-6)
    for entry in expected["text-classification"] + results["text-classification"]:
        entry["score"] = round(entry["score"], 4)
    assert results == expected


@pytest.mark.slow
def test_a_folder_with_its_pipeline_names_its_task(
    family_model, encoder_tokenizer, seq2seq_model, seq2seq_tokenizer, tmp_path, run_fresh
):
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(encoder_tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        id2label=dict(enumerate(LABELS)),
    )
    bert = BertForSequenceClassification(config).eval()
    parts = {
        "bert": ("family-relations", bert, encoder_tokenizer),
        "family": ("family-relations", family_model, encoder_tokenizer),
        "seq2seq": ("text2text-generation", seq2seq_model, seq2seq_tokenizer),
    }
    expected = {}
    for name, (task, model, tokenizer) in parts.items():
        pipe = pipeline(task, model=model, tokenizer=tokenizer)
        pipe.save_pretrained(tmp_path / name, with_code=True)
        assert (tmp_path / name / "text_pipeline.py").is_file()
        expected[name] = pipe(SENTENCE)
        assert not hasattr(model.config, "custom_pipelines")
    code = (
        "from transformers import pipeline\n"
        "folder, text = sys.argv[1:3]\n"
        "def serve(name): return pipeline(model=f'{folder}/{name}', trust_remote_code=True)\n"
        "bert = serve('bert')\n"
        "assert 'fratrie' not in sys.modules\n"
        "bert.save_pretrained(f'{folder}/again', with_code=True)\n"
        "serve('bert').save_pretrained(f'{folder}/plain')\n"
        "result = {'bert': bert(text), 'again': serve('again')(text)}\n"
        "import fratrie\n"
        "result.update({name: serve(name)(text) for name in ('family', 'seq2seq')})\n"
    )
    results = run_fresh(code, tmp_path, SENTENCE)
    assert results.pop("again") == expected["bert"]
    assert results == expected
    assert "custom_pipelines" not in json.loads((tmp_path / "plain" / "config.json").read_text())
