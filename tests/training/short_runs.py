"""Short training runs of a tiny BERT, for the tests of the loop and of resuming."""

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset, IterableDataset
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from fratrie.training.loop import TrainingOptions, create_accelerator, train

VOCAB, ROWS = 40, 22


def token_rows(number=ROWS):
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(5, VOCAB, (3 + index % 6,), generator=generator).tolist()}
        for index in range(number)
    ]


def padded(rows):
    length = max(len(row["input_ids"]) for row in rows)
    return torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])


def masked(ids, chosen):
    chosen = chosen & ids.ne(0)
    return {
        "input_ids": ids.masked_fill(chosen, 4),
        "attention_mask": ids.ne(0).long(),
        "labels": ids.masked_fill(~chosen, -100),
    }


def random_masks(rows):
    """Draws from the global generator, as Hugging Face's collator does."""
    ids = padded(rows)
    return masked(ids, torch.rand(ids.shape) < 0.3)


def fixed_masks(rows):
    """The same masks however the rows are batched; some rows have none."""
    ids = padded(rows)
    return masked(ids, (ids + torch.arange(ids.shape[1])) % 7 == 0)


def multi_label(rows):
    ids = padded(rows)
    labels = torch.stack([ids.eq(6).any(1), ids.eq(7).any(1), ids.eq(8).any(1)], 1)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels.float()}


def tiny_bert(model_class=BertForMaskedLM, dropout=0.1, **config):
    torch.manual_seed(0)
    return model_class(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=16,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **config,
        )
    )


def options(folder, **changes):
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 0,
        "report_to": "none",
        "disable_progress": True,
    }
    return TrainingOptions(**{**given, **changes})


def run(folder, model=None, rows=None, collator=random_masks, evaluate=None, save=True, **changes):
    AcceleratorState._reset_state(True)
    chosen = options(folder, **changes)
    model = model or tiny_bert()
    rows = Dataset.from_list(token_rows()) if rows is None else rows
    return model, train(model, chosen, create_accelerator(chosen), rows, collator, evaluate=evaluate, save=save)


def losses(result):
    return [record["loss"] for record in result.history if "loss" in record]


def assert_equal_weights(first, second, **tolerance):
    other = second.state_dict()
    for name, value in first.state_dict().items():
        if tolerance:
            torch.testing.assert_close(value, other[name], **tolerance)
        else:
            assert torch.equal(value, other[name]), name


def bert_without_dropout():
    return tiny_bert(dropout=0.0)


def multi_label_bert():
    model_class, problem = BertForSequenceClassification, "multi_label_classification"
    return tiny_bert(model_class, dropout=0.0, num_labels=3, problem_type=problem)


class Killed(Exception):
    pass


def killed_at(step):
    """An evaluation that ends the process' life after `step`, before its checkpoint."""

    def evaluate(model, accelerator):
        evaluate.calls += 1
        if evaluate.calls == step:
            raise Killed
        return {"draw": float(torch.rand(()))}

    evaluate.calls = 0
    return evaluate


def tiny_bert_of_other_seed():
    model = tiny_bert()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    return model


def scripted(values):
    """An evaluation that gives these metrics one after another."""
    left = iter(values)

    def evaluate(model, accelerator):
        assert not model.training and not torch.is_grad_enabled()
        return {"f1": next(left), "other": 0.0}

    return evaluate


def every_step():
    return {"eval_strategy": "steps", "eval_steps": 1}


def stream(number=30, shards=2):
    def generate(shards):
        for shard in shards:
            for index, row in enumerate(token_rows(number)):
                if index % 2 == shard % 2:
                    yield row

    return IterableDataset.from_generator(generate, gen_kwargs={"shards": list(range(shards))})
