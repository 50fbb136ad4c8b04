"""What the text pipelines share: the forms of input, truncation with a warning, saving with or without code."""

import logging
from collections.abc import Iterable, Mapping, Sized
from functools import cached_property
from itertools import islice
from os import PathLike
from typing import Any, ClassVar

from torch.utils.data import Dataset
from transformers.pipelines.base import Pipeline

from .text_length import longest_text

logger = logging.getLogger(__name__)


class TextPipeline(Pipeline):
    """A pipeline over texts; the tasks derive from it. The model is put into evaluation mode.

    Args:
        *args, **kwargs: those of Hugging Face's `Pipeline` (model, tokenizer, device, batch_size, num_workers, …) and
            the parameters of the task.
    """

    task_name: ClassVar[str]
    auto_model: ClassVar[type]
    model: Any
    tokenizer: Any

    _load_tokenizer: Any = True
    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_video_processor: Any = False
    _load_feature_extractor: Any = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.eval()

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the task on one text or many.

        Args:
            inputs: a text, or a mapping with a `"text"` (a row of a dataset); or any number of them: a list, a
                column or a whole dataset, a generator.
            *args: none; Hugging Face ignores them with a warning.
            **kwargs: `batch_size`, `num_workers`, and the parameters of the task.

        Returns:
            The result of one text; a list of results for inputs of known length; otherwise, and for a dataset of
            torch, an iterator that reads the inputs as it goes.

        Raises:
            ValueError: an input is not a text, or has no token; a table instead of a column; batches with a tokenizer
                that has no padding token.
        """
        if isinstance(inputs, (str, Mapping, bytes, bytearray, memoryview)):  # bytes, too, are one input, if no text
            return super().__call__(inputs, *args, **kwargs)
        _refuse_table(inputs)
        if isinstance(inputs, Sized) and not len(inputs):
            return []
        if isinstance(inputs, (list, Dataset)):
            return super().__call__(inputs, *args, **kwargs)
        if not isinstance(inputs, Iterable):
            raise ValueError(f"The input is {inputs!r}: give a text, or a list, dataset or generator of texts.")
        # Hugging Face runs through lists, generators and datasets of torch only, and takes the rest for one input.
        results = super().__call__((item for item in inputs), *args, **kwargs)
        return list(results) if isinstance(inputs, Sized) else results

    @cached_property
    def max_tokens(self) -> int | None:
        """The most tokens of an input: what tokenizer and model allow, `None` for any number."""
        limits = [self.tokenizer.model_max_length] if self.tokenizer.model_max_length < 10**9 else []
        if longest := longest_text(self.model):
            limits.append(longest)
        return min(limits, default=None)

    def encode(self, text: str, truncation: bool = True) -> Mapping[str, Any]:
        """Tokens of one text as tensors `(1, T)`, cut at `max_tokens` with a warning.

        Raises:
            ValueError: there is no token, or one that the model has no embedding for.
        """
        return self.fit(self.tokenizer(text, return_tensors="pt", verbose=False), text, truncation)

    def fit(self, encoding: Mapping[str, Any], text: str, truncation: bool = True) -> Mapping[str, Any]:
        """The whole tokens `(1, T)` of a text as `encode` gives them.

        Raises:
            ValueError: as `encode`.
        """
        length, limit = encoding["input_ids"].shape[-1], self.max_tokens
        if not length:
            raise ValueError(
                f"The text {_excerpt(text)} has no token: leave it out, or use a tokenizer that adds special tokens."
            )
        size = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        if size and (highest := int(encoding["input_ids"].max())) >= size:
            raise ValueError(
                f"The tokenizer gives the token {highest}, but the model has embeddings for {size}: they do not "
                "belong together."
            )
        if not truncation or limit is None or length <= limit:
            return encoding
        logger.warning("A text of %d tokens is cut to the %d that are read: %s", length, limit, _excerpt(text))
        return self.tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")

    def save_pretrained(self, save_directory: str | PathLike[str], with_code: bool = False, **kwargs: Any) -> None:
        """Save model and tokenizer, to be loaded by `pipeline(task, model=save_directory)` after `import fratrie`.

        Args:
            save_directory: a folder, made where there is none.
            with_code: also save the code of this pipeline and note it in the config. Such a folder names its own
                task, `pipeline(model=save_directory, trust_remote_code=True)`, and needs no fratrie for its
                pipeline, but Hugging Face loads it with `trust_remote_code=True` only. (`fratrie.export_code` adds the
                code of a model of fratrie, with its pipeline.)
            **kwargs: for the `save_pretrained` of model and tokenizer.
        """
        # The config speaks of code only where it is written beside that code.
        vars(self.model.config).pop("custom_pipelines", None)
        if not with_code:
            self.model.save_pretrained(save_directory, **kwargs)
            self.tokenizer.save_pretrained(save_directory, **kwargs)
            return
        implementation = {"impl": type(self), "pt": (self.auto_model,), "type": "text"}
        self._registered_impl = {self.task_name: implementation}
        super().save_pretrained(save_directory, **kwargs)
        vars(self.model.config).pop("custom_pipelines", None)


def text_of(item: Any) -> str:
    """The text of an input: the input itself, or its `"text"`.

    Raises:
        ValueError: it holds no text, or one with half a character (a lone surrogate), which no tokenizer reads.
    """
    text = item.get("text") if isinstance(item, Mapping) else item
    if isinstance(text, str):
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ValueError(f"The text {_excerpt(text)} holds half a character (a lone surrogate): read it as UTF-8.")
        return text
    if isinstance(item, Mapping):
        raise ValueError(
            f"The input has the fields {sorted(map(str, item))}, but no text in a field 'text': give a row "
            "with one, or a column of texts by itself."
        )
    raise ValueError(f"The input is {item!r}, expected a text.")


def _refuse_table(inputs: Any) -> None:
    # A data frame is no `Mapping`, but runs through the names of its columns; a series, which has keys too, does not.
    keys = getattr(inputs, "keys", None)
    if not (callable(keys) and isinstance(inputs, Iterable)) or getattr(inputs, "ndim", None) == 1:
        return
    names = list(keys())
    if list(islice(inputs, len(names) + 1)) == names:
        raise ValueError(
            f"The input is a {type(inputs).__name__} with the columns {', '.join(map(str, names[:12])) or 'none'}: "
            "pass the column of texts, such as table['text']."
        )


def _excerpt(text: str, width: int = 60) -> str:
    return repr(text if len(text) <= width else text[: width - 1] + "…")
