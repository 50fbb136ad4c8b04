"""Pipelines for Hugging Face's registry: `family-relations` and `text2text-generation`.

The files that define them import nothing of fratrie but each other, so a checkpoint can carry them.
"""

from .family_relations import FamilyRelationsPipeline
from .registration import register_pipelines
from .text2text_generation import Text2TextGenerationPipeline

__all__ = ["FamilyRelationsPipeline", "Text2TextGenerationPipeline", "register_pipelines"]
