"""Words cut into letters: counted as a naive reading of the pieces does, told of texts of another domain alone."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fratrie import FratrieEncoderConfig, FratrieEncoderModel
from fratrie.conversion.pruning import prune_vocabulary
from fratrie.tokenization.fragments import SHARE, Fragments, fragments, tell_fragments

FAMILY = ["Ma grande sœur adore notre maison", "Mon petit frère préfère courir", "Notre mère chante toujours"]
LIKE_IT = ["Notre grande maison", "Mon petit frère chante toujours", "Ma mère préfère Oran", "Ma grande sœur jardine"]
HEALTH = ["Le remboursement de ma prothèse", "Les urgences débordent toujours", "La pharmacienne vérifie"]
SIZES = {"hidden_size": 4, "num_attention_heads": 1, "intermediate_size": 4, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A tokenizer that knows all these words and all letters, pruned for the first texts and saved."""
    words = sorted({f"▁{word}" for text in [*FAMILY, *LIKE_IT, *HEALTH] for word in text.split()})
    letters = sorted({*"".join(words), *"abcdefghijklmnopqrstuvwxyzé'-"})
    pieces = [("<unk>", 0.0), ("<pad>", 0.0), *((word, -3.0) for word in words), *((each, -9.0) for each in letters)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")
    model = FratrieEncoderModel(FratrieEncoderConfig(**SIZES, vocab_size=len(tokenizer), pad_token_id=1))
    _, found = prune_vocabulary(model, tokenizer, FAMILY)
    folder = tmp_path_factory.mktemp("pruned")
    found.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_texts_of_another_domain_are_told_and_those_of_the_same_are_not(pruned, caplog):
    assert pruned.init_kwargs[SHARE] == 0.0
    tell_fragments(pruned, FAMILY, "train.csv")
    tell_fragments(pruned, LIKE_IT, "test.csv")  # of which one word is new
    assert fragments(pruned, LIKE_IT).words == ["jardine"] and not caplog.records
    tell_fragments(pruned, [*HEALTH, HEALTH[1]], "new.csv")
    assert "80 % of the longer words of new.csv are cut" in caplog.text and "(0.0 % in" in caplog.text  # 8 of 10
    assert "such as 'remboursement' and 'prothèse'" in caplog.text and "whole vocabulary" in caplog.text


def test_a_tokenizer_that_was_not_pruned_is_no_matter(pruned, caplog):
    whole = AutoTokenizer.from_pretrained(pruned.name_or_path)
    del whole.init_kwargs[SHARE]
    tell_fragments(whole, HEALTH, "new.csv")
    assert not caplog.records


@given(st.lists(st.text("aeé'- xœ\n1", max_size=30) | st.sampled_from(HEALTH), min_size=1, max_size=4))
def test_words_are_counted_as_a_naive_reading_of_the_pieces_does(pruned, texts):
    cut, total = [], 0
    for text in texts:
        offsets = pruned(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for word in re.finditer(r"[^\W\d_]{5,}", text):
            inside = {span for span in offsets if max(span[0], word.start()) < min(span[1], word.end())}
            total += 1
            cut += [word[0]] * (len(word[0]) / len(inside) < 2)
    assert fragments(pruned, texts) == Fragments(cut, total)


def test_many_texts_are_sampled_evenly(pruned):
    texts = [HEALTH[0], *["Ma mère"] * 1999] * 2
    assert fragments(pruned, texts).words == fragments(pruned, [HEALTH[0]] * 2).words


def test_unknown_words_count_and_scripts_without_capitals_do_not(pruned):
    assert fragments(pruned, ["говорит 我们学校食堂 говорит"]) == Fragments(["говорит"] * 2, 2)
