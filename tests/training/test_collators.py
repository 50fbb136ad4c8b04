import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fratrie.tokenization import train_byte_level_bpe
from fratrie.training.collators import MaskingCollator, PackedCausalCollator, SpanCorruptionCollator
from fratrie.training.corpora import SentenceRows, pack_documents

SENTINELS, EOS, PAD = [90, 91, 92, 93, 94, 95], 2, 1
TOKENS = st.lists(st.integers(3, 80), min_size=1, max_size=60)


def denoiser(**changes):
    return SpanCorruptionCollator(SENTINELS, EOS, PAD, **changes)


def restored(source, target):
    """The text that an input and its target tell of."""
    assert source[-1] == target[-1] == EOS
    spans = {}
    for token in target[:-1]:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    closing = next(reversed(spans))
    assert spans.pop(closing) == [], "the target ends with a sentinel that hides nothing"
    assert list(spans) == SENTINELS[: len(spans)] and closing == SENTINELS[len(spans)]
    assert all(spans.values())
    return [token for place in source[:-1] for token in spans.get(place, [place])]


@given(TOKENS, st.floats(0.05, 0.95), st.floats(1, 8), st.integers(0, 99))
def test_input_and_target_restore_the_text(ids, density, span_length, seed):
    torch.manual_seed(seed)
    collator = denoiser(noise_density=density, mean_span_length=span_length)
    source, target = collator.corrupt(ids)
    assert restored(source, target) == ids
    assert len(source) <= len(ids) + 2 and len(target) <= len(ids) + 3


@given(st.integers(20, 60), st.integers(0, 99))
def test_hides_the_asked_share_in_spans_of_the_asked_length(length, seed):
    torch.manual_seed(seed)
    _, target = denoiser(noise_density=0.3, mean_span_length=4).corrupt([7] * length)
    hidden = target.count(7)
    assert hidden == round(length * 0.3)
    assert sum(token in SENTINELS for token in target) - 1 == round(hidden / 4)


def test_spans_never_outnumber_the_sentinels():
    source, target = denoiser(noise_density=0.5, mean_span_length=1).corrupt([7] * 200)
    assert restored(source, target) == [7] * 200


def test_spans_fall_anywhere():
    torch.manual_seed(0)
    hidden = torch.zeros(12)
    for _ in range(300):
        source, _ = denoiser(noise_density=0.25, mean_span_length=3).corrupt(list(range(10, 22)))
        hidden += torch.tensor([token not in source for token in range(10, 22)])
    assert hidden.sum() == 900
    assert hidden.min() > 15 and hidden[2:-2].min() > 60


@given(st.lists(TOKENS, min_size=1, max_size=5))
def test_denoising_batch_is_padded(rows):
    batch = denoiser()([{"input_ids": ids} for ids in rows])
    for ids, source, mask, labels in zip(
        rows, batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True
    ):
        assert source[mask.eq(0)].eq(PAD).all() and not source[mask.eq(1)].eq(PAD).any()
        assert restored(source[mask.eq(1)].tolist(), labels[labels.ne(-100)].tolist()) == ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sentinel_ids": [90]}, "1 sentinels"),
        ({"noise_density": 1.0}, "noise_density=1.0"),
        ({"mean_span_length": 0.5}, "mean_span_length=0.5"),
    ],
)
def test_denoiser_refuses(changes, named):
    with pytest.raises(ValueError, match=named):
        SpanCorruptionCollator(**{"sentinel_ids": SENTINELS, "eos_token_id": EOS, "pad_token_id": PAD, **changes})


@given(st.lists(TOKENS, min_size=1, max_size=8))
def test_packed_rows_keep_documents_apart(documents):
    rows = [
        {
            "input_ids": [token for document in row for token in document],
            "position_ids": [place for document in row for place in range(len(document))],
        }
        for row in pack_documents(documents, 24)
    ]
    batch = PackedCausalCollator(PAD, 24)(rows)
    assert set(batch) == {"input_ids", "position_ids", "labels"}, "a mask would let documents see one another"
    ids, positions, labels = batch["input_ids"], batch["position_ids"], batch["labels"]
    assert ids.shape == positions.shape == labels.shape == (len(rows), 24)
    firsts = positions.eq(0)
    assert labels[firsts].eq(-100).all()
    real = torch.stack([torch.arange(24) < len(row["input_ids"]) for row in rows])
    assert labels[real & ~firsts].equal(ids[real & ~firsts])
    assert labels[~real].eq(-100).all() and ids[~real].eq(PAD).all()
    for row, length in zip(positions, real.sum(1).tolist(), strict=True):
        assert length == 24 or row[length] == 0, "the filling begins anew, so that no document sees it"


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["ma sœur est gentille", "mon père est parti", "nous jouons ensemble, ma sœur et moi"] * 3
    return train_byte_level_bpe(texts, vocab_size=300, show_progress=False)


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_masking_hides_and_tells(tokenizer, texts, whole_words, seed):
    columns = SentenceRows(tokenizer, 24, word_offsets=whole_words)({"text": texts})
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    originals = [list(row["input_ids"]) for row in rows]
    torch.manual_seed(seed)
    replaced = (1.0, 0.0) if whole_words else (0.8, 0.1)
    batch = MaskingCollator(tokenizer, True, whole_words, 0.5, *replaced)(rows)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    for ids, source, labels in zip(originals, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        for place, (token, label) in enumerate(zip(source, labels, strict=True)):
            original = ids[place] if place < len(ids) else tokenizer.pad_token_id
            assert label in (-100, original)
            assert label != -100 or token == original
            if label in tokenizer.all_special_ids:
                raise AssertionError("a special token was masked")


def test_whole_words_are_masked_together(tokenizer):
    text = "ma sœur est gentille"
    columns = SentenceRows(tokenizer, 24, word_offsets=True)({"text": [text, "mon"]})
    (row, other) = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    words = [text[:start].count(" ") for start, _ in row["offset_mapping"]][1:-1]
    assert len(words) > len(set(words)), "a word of several tokens is needed here"
    torch.manual_seed(0)
    for _ in range(20):
        hidden = MaskingCollator(tokenizer, True, True, 0.5, 1.0, 0.0)([row, other])["labels"][0].ne(-100)[1:-1]
        for word in set(words):
            assert len({bool(hidden[place]) for place, of in enumerate(words) if of == word}) == 1
