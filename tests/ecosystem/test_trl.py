"""trl: supervised fine-tuning, packed and on completions alone, and preference optimisation of the decoder."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM, norm_slots
from fratrie.conversion import from_hf

pytestmark = pytest.mark.ecosystem

TEXTS = [
    "Ma mère travaille.",
    "Mon père est souvent absent, mais il téléphone.",
    "Nous sommes trois.",
    "Ma sœur aime notre chat.",
    "Mes frères jouent dehors.",
]


@pytest.fixture
def llama(decoder_tokenizer, config_fields):
    fields = config_fields(decoder_tokenizer) | {"num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**fields))


@pytest.fixture(params=["ours", "theirs"])
def model(request, llama):
    return from_hf(llama) if request.param == "ours" else llama


@pytest.fixture
def sft(decoder_tokenizer, tmp_path):
    def build(model, rows, peft_config=None, **arguments):
        arguments = {"max_steps": 3, "learning_rate": 3e-3, "per_device_train_batch_size": 2, **arguments}
        config = SFTConfig(
            str(tmp_path), use_cpu=True, bf16=False, logging_steps=1, save_strategy="no", report_to="none",
            dataset_num_proc=None, disable_tqdm=True, **arguments,
        )  # fmt: skip
        dataset = Dataset.from_list(rows)
        return SFTTrainer(
            model, config, train_dataset=dataset, processing_class=decoder_tokenizer, peft_config=peft_config
        )

    return build


def first_batch(trainer):
    return next(iter(trainer.get_train_dataloader()))


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def split_documents(batch):
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    return [batch["input_ids"][:, start:end] for start, end in pairwise(starts)]


def test_a_packed_batch_has_the_loss_of_its_documents_on_their_own(model, sft):
    """On a CPU no kernel of flash attention runs: the mask (theirs) or the packing (ours) keeps documents apart."""
    trainer = sft(model, [{"text": text} for text in TEXTS], packing=True, max_length=64)
    batch = first_batch(trainer)
    documents = split_documents(batch)
    assert len(documents) > 2
    assert "attention_mask" not in batch
    plain = copy.deepcopy(model).eval()
    plain.__dict__.pop("forward", None)  # the trainer replaces it
    alone = [type(model).forward(plain, input_ids=ids, labels=ids).loss for ids in documents]
    targets = [ids.shape[1] - 1 for ids in documents]
    expected = sum(loss * count for loss, count in zip(alone, targets, strict=True)) / sum(targets)
    model.eval()
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected, atol=1e-5, rtol=1e-5)
    run_together = torch.cat(documents, dim=1)
    leaking = type(model).forward(plain, input_ids=run_together, labels=run_together).loss
    assert abs(leaking - expected) > 1e-3


def test_packed_training_takes_the_steps_of_hugging_faces_llama(llama, sft):
    rows = [{"text": text} for text in TEXTS]
    ours, theirs = (losses(sft(model, rows, packing=True, max_length=64)) for model in (from_hf(llama), llama))
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0]


def test_only_completions_are_targets(model, sft, decoder_tokenizer):
    rows = [{"prompt": text[:9], "completion": text[9:]} for text in TEXTS]
    trainer = sft(model, rows)
    batch = first_batch(trainer)
    assert batch["attention_mask"].min() == 0
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    completions = [
        decoder_tokenizer.decode(ids[kept], skip_special_tokens=True)
        for ids, kept in zip(batch["input_ids"], batch["labels"] != -100, strict=True)
    ]
    assert set(completions) <= {row["completion"] for row in rows}
    model.eval()
    log_probs = type(model).forward(model, **inputs).logits.log_softmax(-1)[:, :-1]
    targets = batch["labels"][:, 1:]
    chosen = log_probs.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    expected = -chosen[targets != -100].mean()
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected, atol=1e-5, rtol=1e-5)
    assert losses(trainer)[-1] < expected


def test_fine_tuning_trains_adapters_on_experts(sft, decoder_tokenizer, config_fields):
    sparse = {"position_type": "rotary", "gated_feed_forward": True, "num_experts": 4, "output_router_logits": True}
    config = FratrieDecoderConfig(**config_fields(decoder_tokenizer), **norm_slots("pre", "rms_norm"), **sparse)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], target_parameters=parameters, r=4)
    rows = [{"text": text} for text in TEXTS[:2]]
    steps = losses(sft(FratrieDecoderForCausalLM(config), rows, adapters, learning_rate=2e-2, max_steps=4))
    assert steps[-1] < steps[0]


@pytest.mark.parametrize("reference", ["copy", "adapter_off", "from_folder"])
def test_preferences_start_at_even_odds_and_are_learnt(llama, reference, decoder_tokenizer, tmp_path):
    model = from_hf(llama)
    if reference == "from_folder":
        model.save_pretrained(tmp_path / "policy")
        model = str(tmp_path / "policy")
    rows = [{"prompt": text[:9], "chosen": text[9:], "rejected": text[:8:-1]} for text in TEXTS]
    config = DPOConfig(
        str(tmp_path / "run"), use_cpu=True, bf16=False, max_steps=3, learning_rate=5e-3, logging_steps=1,
        per_device_train_batch_size=2, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(model) if reference == "copy" else None,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=decoder_tokenizer,
        peft_config=LoraConfig(target_modules="all-linear", r=4) if reference == "adapter_off" else None,
    )
    steps = losses(trainer)
    assert steps[0] == pytest.approx(math.log(2), abs=1e-4)
    assert steps[-1] < steps[0] - 0.01
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert margins[-1] > 0


class RegisteredConfig(LlamaConfig):
    model_type = "registered_llama"


class RegisteredLlama(LlamaForCausalLM):
    config: RegisteredConfig


@pytest.mark.parametrize("registered", ["ours", "theirs"])
def test_trl_loads_our_classes_by_their_folder_though_not_every_registered_class(registered, llama, sft, tmp_path):
    """trl 1.16 reads `config.auto_map` of every class outside transformers, whose configurations often have none."""
    AutoConfig.register("registered_llama", RegisteredConfig, exist_ok=True)
    AutoModelForCausalLM.register(RegisteredConfig, RegisteredLlama, exist_ok=True)
    theirs = RegisteredLlama(RegisteredConfig(**llama.config.to_diff_dict()))
    model = from_hf(llama) if registered == "ours" else theirs
    model.save_pretrained(tmp_path / "model")
    rows = [{"text": text} for text in TEXTS]
    if registered == "theirs":
        with pytest.raises(AttributeError, match="auto_map"):
            sft(str(tmp_path / "model"), rows)
    else:
        trainer = sft(str(tmp_path / "model"), rows, max_steps=1)
        assert type(trainer.model) is type(model)
        assert len(losses(trainer)) == 1
        assert "auto_map" not in (tmp_path / "model" / "config.json").read_text(encoding="utf-8")
