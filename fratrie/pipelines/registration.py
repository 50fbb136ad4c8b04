"""Registration of the pipelines with Hugging Face, so that `pipeline(task, model=folder)` finds them."""

from transformers.pipelines import PIPELINE_REGISTRY, REMOVED_TASKS

from .family_relations import FamilyRelationsPipeline
from .text2text_generation import Text2TextGenerationPipeline

# The registry looks a dotted name up when a pipeline of the task is made. It has no way to replace the class alone: to
# register a task again warns, and forgets its default model.
_IN_BULK = {
    "text-classification": f"{__package__}.sentence_tasks.TextClassificationPipeline",
    "token-classification": f"{__package__}.sentence_tasks.TokenClassificationPipeline",
    "feature-extraction": f"{__package__}.sentence_tasks.FeatureExtractionPipeline",
}


def register_pipelines() -> None:
    """Register the tasks `family-relations` and `text2text-generation`, and our classes for Hugging Face's tasks."""
    for implementation in (FamilyRelationsPipeline, Text2TextGenerationPipeline):
        task = implementation.task_name
        PIPELINE_REGISTRY.register_pipeline(task, implementation, implementation.auto_model, type="text")
        # Hugging Face refuses the names of its removed tasks before it looks into its registry.
        REMOVED_TASKS.pop(task, None)
    for task, name in _IN_BULK.items():
        PIPELINE_REGISTRY.supported_tasks[task]["impl"] = name
