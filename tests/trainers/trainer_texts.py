"""Texts of unequal length, and the sizes of tiny models that read them."""

TEXTS = [
    "Oui.",
    "Ma mère chante.",
    "Je m'entends bien avec mon père, mais il travaille beaucoup et je ne le vois pas souvent.",
    "J'ai deux frères.",
    "Ma sœur et moi on joue ensemble tous les soirs.",
    "Non, pas vraiment.",
    "Mes parents sont séparés depuis cinq ans et je vis chez ma mère avec mon petit frère.",
    "Il est gentil.",
]


def sizes(tokenizer):
    """Fields of a configuration whose model reads the texts of this tokenizer."""
    return {
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
