import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fratrie.tokenization import train_reference_bpe
from fratrie.tokenization.reference import count_pairs, count_words, merge_pair

CORPUS = [
    "This example is taken from the multitude of tokenizer examples explained on the Hugging Face courses.",
    "This is one example of tokenization.",
    "There is several tokenizer algorithms.",
    "Hopefully, you will be able to understand how they are trained and generate tokens.",
]
WORD_COUNTS = {
    **{"This": 2, "example": 2, "is": 3, "taken": 1, "from": 1, "the": 2, "multitude": 1, "of": 2},
    **{"tokenizer": 2, "examples": 1, "explained": 1, "on": 1, "Hugging": 1, "Face": 1, "courses": 1, ".": 4},
    **{"one": 1, "tokenization": 1, "There": 1, "several": 1, "algorithms": 1, "Hopefully": 1, ",": 1},
    **{"you": 1, "will": 1, "be": 1, "able": 1, "to": 1, "understand": 1, "how": 1, "they": 1, "are": 1},
    **{"trained": 1, "and": 1, "generate": 1, "tokens": 1},
}
ALPHABET = [*",.FHTabcdefghiklmnoprstuvwxyz", "Ġ"]
PAIR_COUNTS = {
    **{"Th": 3, "hi": 2, "is": 5, "Ġe": 4, "ex": 4, "xa": 3, "am": 3, "mp": 3, "pl": 4, "le": 4, "Ġi": 3},
}
MERGED = "Ġt en er is ken Ġto Ġe Ġex pl Ġo Ġtoken Ġa Th Ġexa Ġexam Ġexampl Ġexample Ġis Ġth"


@pytest.fixture(scope="module")
def reference():
    return train_reference_bpe(CORPUS, 50)


def train_with_tokenizers():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=50, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)


def test_word_and_pair_counts_of_the_four_sentences():
    counts = count_words(CORPUS)
    assert {word.lstrip("Ġ"): count for word, count in counts.items()} == WORD_COUNTS
    assert len(counts) == len(WORD_COUNTS)
    pairs = count_pairs({word: tuple(word) for word in counts}, counts)
    assert [("".join(pair), count) for pair, count in pairs.items()][:2] == [("Th", 3), ("hi", 2)]
    assert {pair: pairs[tuple(pair)] for pair in PAIR_COUNTS} == PAIR_COUNTS
    assert pairs["Ġ", "t"] == max(pairs.values()) == 10


def test_vocabulary_of_the_four_sentences(reference):
    assert list(reference.vocabulary) == ["<|endoftext|>", *ALPHABET, *MERGED.split()]
    assert len(reference.vocabulary) == 50


def test_tokens_of_a_new_sentence(reference):
    expected = ["Th", "is", "Ġis", "Ġ", "n", "o", "t", "Ġa", "Ġtoken", "."]
    assert reference.tokenize("This is not a token.") == expected


def test_steps_tell_pair_count_and_new_splits(reference):
    assert " ".join(step.token for step in reference.steps) == MERGED
    first = reference.steps[0]
    assert (first.pair, first.count) == (("Ġ", "t"), 10)
    assert first.splits["Ġtrained"] == ("Ġt", "r", "a", "i", "n", "e", "d")
    assert first.splits["Ġtokens"] == ("Ġt", "o", "k", "e", "n", "s")
    assert set(first.splits) == {word for word in count_words(CORPUS) if word.startswith("Ġt")}


def test_tokenizers_breaks_ties_by_lowest_ids_and_chooses_equally_frequent_pairs(reference):
    ours, theirs = set(reference.vocabulary), train_with_tokenizers()
    assert ours - set(theirs) == {"Ġe", "pl", "Ġexa", "Ġexam", "Ġexampl", "Ġexample", "Ġis", "Ġth"}
    assert set(theirs) - ours == {"ex", "le", "am", "he", "in", "iz", "nd", "ple"}
    word_counts, ids, counts = count_words(CORPUS), ["<|endoftext|>", *ALPHABET], []
    splits = {word: tuple(word) for word in word_counts}
    while len(ids) < 50:
        pairs = count_pairs(splits, word_counts)
        counts.append(max(pairs.values()))
        most_frequent = [pair for pair, count in pairs.items() if count == counts[-1]]
        pair = min(most_frequent, key=lambda pair: [ids.index(token) for token in pair])
        ids.append("".join(pair))
        splits = {word: merge_pair(symbols, pair) for word, symbols in splits.items()}
    assert ids == theirs
    assert counts == [step.count for step in reference.steps]


def test_training_stops_when_every_word_is_one_token():
    reference = train_reference_bpe(["papa papa maman"], 1000)
    assert reference.tokenize("papa maman") == ["papa", "Ġmaman"]
    assert len(reference.vocabulary) < 1000


def test_a_symbol_outside_the_alphabet_becomes_the_special_token(reference):
    assert reference.tokenize("Zz") == ["<|endoftext|>", "z"]


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="abc ", min_size=1), min_size=1),
    merges=st.integers(0, 40),
    text=st.text(alphabet="abc ") | st.text(),
)
def test_export_gives_the_same_tokens(texts, merges, text):
    assume("".join(texts).strip())
    alphabet = {symbol for word in count_words(texts) for symbol in word}
    reference = train_reference_bpe(texts, 1 + len(alphabet) + merges)
    exported = reference.to_tokenizers()
    assert len(set(reference.vocabulary)) == len(reference.vocabulary)
    assert exported.encode(text).tokens == reference.tokenize(text)
    assert exported.get_vocab() == {token: index for index, token in enumerate(reference.vocabulary)}


def test_export_decodes_to_the_text(reference):
    exported = reference.to_tokenizers()
    assert exported.decode(exported.encode(CORPUS[0]).ids) == CORPUS[0]


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [([], 50, "corpus is empty"), ("papa", 50, "put it in a list"), (CORPUS, 30, "the special token take 31")],
)
def test_what_cannot_be_trained_is_a_named_error(texts, size, message):
    with pytest.raises(ValueError, match=message):
        train_reference_bpe(texts, size)
