"""What the tests of the readers see of a dataset: the names of its labels."""

from datasets import ClassLabel


def names(dataset):
    """One name a row, or a list of names where several labels may be given."""
    feature = dataset.features["labels"]
    if isinstance(feature, ClassLabel):
        return feature.int2str(list(dataset["labels"]))
    return [feature.feature.int2str(labels) for labels in dataset["labels"]]
