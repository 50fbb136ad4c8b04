"""What `import fratrie` does: registers everything, reads little, and needs no network."""

import json
import os
import subprocess
import sys

import pytest
import transformers
from combinations import CONFIGS, HEADS, SIBLINGS, Case, case_of, cases

import fratrie

HEAVY = (
    "datasets", "sklearn", "matplotlib", "evaluate", "tensorboard", "pandas", "pyarrow", "scipy",
    "accelerate.commands",
    "transformers.trainer", "transformers.models.bert.modeling_bert", "torch._inductor",
)  # fmt: skip

SCRIPT = """
import json, sys, transformers, transformers.modeling_utils, transformers.generation
before = set(sys.modules)
import fratrie
added = sorted(set(sys.modules) - before)
from transformers import AutoConfig
names = ("fratrie_encoder", "fratrie_decoder", "fratrie_seq2seq")
print(json.dumps({
    "added": added,
    "configs": [type(AutoConfig.for_model(name)).__name__ for name in names],
    "all": sorted(fratrie.__all__),
    "missing": [name for name in fratrie.__all__ if not hasattr(fratrie, name)],
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """What a fresh process without network sees of the package."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    result = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", SCRIPT],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAVY)
def test_the_import_reads_no_heavy_package(imported, name: str):
    assert not [module for module in imported["added"] if module == name or module.startswith(f"{name}.")]


@pytest.mark.slow
def test_the_import_reads_little_besides_its_own_modules(imported):
    """Beyond transformers' own modeling parts: counted in top-level packages, since a timed test would be a dice."""
    others = {module.split(".")[0] for module in imported["added"]} - {"fratrie", "transformers", "torch"}
    assert len(others) < 15, others


@pytest.mark.slow
def test_the_import_registers_the_configurations(imported):
    assert imported["configs"] == ["FratrieEncoderConfig", "FratrieDecoderConfig", "FratrieSeq2SeqConfig"]


@pytest.mark.slow
def test_every_public_name_exists_and_is_documented(imported):
    assert not imported["missing"]
    assert imported["all"] == sorted(set(fratrie.__all__))
    for name in fratrie.__all__:
        assert getattr(fratrie, name).__doc__.strip(), name


@pytest.mark.parametrize(("sibling", "head"), [(sibling, head) for sibling in SIBLINGS for head in HEADS[sibling]])
def test_every_model_is_registered_with_its_auto_class(sibling: str, head: str):
    model_class, auto = HEADS[sibling][head]
    model = auto.from_config(case_of(sibling).config())
    assert type(model) is model_class
    assert model.config_class is CONFIGS[sibling]
    assert model_class.__name__ in fratrie.__all__


def test_registering_twice_is_harmless():
    import importlib

    importlib.reload(fratrie)
    assert transformers.AutoConfig.for_model("fratrie_encoder").model_type == "fratrie_encoder"


@pytest.mark.parametrize("case", cases(names=("default",)), ids=str)
def test_pipelines_know_which_tasks_the_models_serve(case: Case):
    """What `pipeline` checks a model against is the name of its class."""
    from transformers.models.auto import modeling_auto

    mappings = {
        "language_model": {
            "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
            "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
            "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        }[case.sibling],
        "sequence_classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "token_classification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        "base": modeling_auto.MODEL_MAPPING,
    }
    for head, (model_class, _) in HEADS[case.sibling].items():
        assert mappings[head][CONFIGS[case.sibling]] is model_class
