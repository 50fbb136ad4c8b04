"""Registration of the pipelines with Hugging Face, so that `pipeline(task, model=folder)` finds them."""

from transformers.pipelines import PIPELINE_REGISTRY, REMOVED_TASKS

from .family_relations import FamilyRelationsPipeline
from .text2text_generation import Text2TextGenerationPipeline


def register_pipelines() -> None:
    """Register the tasks `family-relations` and `text2text-generation`."""
    for implementation in (FamilyRelationsPipeline, Text2TextGenerationPipeline):
        task = implementation.task_name
        PIPELINE_REGISTRY.register_pipeline(task, implementation, implementation.auto_model, type="text")
        # Hugging Face refuses the names of its removed tasks before it looks into its registry.
        REMOVED_TASKS.pop(task, None)
