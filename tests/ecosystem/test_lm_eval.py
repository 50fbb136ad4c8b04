"""lm-eval: our decoder on local tasks, with log-likelihoods and generations equal to those made by hand."""

import json

import lm_eval
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fratrie import FratrieDecoderConfig, FratrieDecoderForCausalLM, norm_slots

pytestmark = pytest.mark.ecosystem

QUESTIONS = [
    {"question": "Qui est ma mère ?", "choices": [" la femme de mon père", " un chat", " dix"], "answer": 0},
    {"question": "Combien de frères ?", "choices": [" rouge", " deux frères", " oui"], "answer": 1},
    {"question": "Mon père travaille-t-il ou est-il là ?", "choices": [" il joue", " souvent", " là"], "answer": 2},
    {"question": "Et le chat ?", "choices": [" adore", " il", " l"], "answer": 0},
]
TASKS = {
    "family_choice": """
task: family_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "family_answer": """
task: family_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}


@pytest.fixture
def tasks(tmp_path):
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in QUESTIONS), encoding="utf-8")
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(task.format(data=data), encoding="utf-8")
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.fixture(params=["rotary", "learned"])
def model(request, decoder_tokenizer, config_fields):
    config = FratrieDecoderConfig(
        **config_fields(decoder_tokenizer), position_type=request.param, **norm_slots("pre", "rms_norm")
    )
    return FratrieDecoderForCausalLM(config).eval()


def evaluate(model, tokenizer, tasks, name):
    results = lm_eval.simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4),
        tasks=[name],
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return results["results"][name], samples


@torch.no_grad()
def log_likelihood(model, tokenizer, question, answer):
    context, whole = tokenizer(question)["input_ids"], tokenizer(question + answer)["input_ids"]
    assert whole[: len(context)] == context
    log_probs = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
    places = range(len(context) - 1, len(whole) - 1)
    return sum(log_probs[place, whole[place + 1]].item() for place in places)


def test_choices_are_scored_as_by_hand_though_batches_are_padded_without_a_mask(model, decoder_tokenizer, tasks):
    scores, samples = evaluate(model, decoder_tokenizer, tasks, "family_choice")
    right = 0
    for row, sample in zip(QUESTIONS, samples, strict=True):
        expected = [log_likelihood(model, decoder_tokenizer, row["question"], choice) for choice in row["choices"]]
        measured = [response[0] for response in sample["filtered_resps"]]
        assert [float(value) for value in measured] == pytest.approx(expected, abs=1e-4)
        right += int(max(range(3), key=expected.__getitem__) == row["answer"])
    assert scores["acc,none"] == right / len(QUESTIONS)


def test_answers_are_generated_as_by_hand(model, decoder_tokenizer, tasks):
    _, samples = evaluate(model, decoder_tokenizer, tasks, "family_answer")
    for row, sample in zip(QUESTIONS, samples, strict=True):
        prompt = decoder_tokenizer(row["question"], return_tensors="pt")["input_ids"]
        ids = prompt
        for _ in range(6):
            with torch.no_grad():
                token = model(input_ids=ids).logits[:, -1:].argmax(-1)
            if token.item() == decoder_tokenizer.eos_token_id:
                break
            ids = torch.cat([ids, token], dim=1)
        expected = decoder_tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        assert sample["resps"][0][0] == expected.split("\n\n")[0]
