"""Images as tokens: each square patch of an image becomes a vector (Dosovitskiy et al. 2021, section 3.1).

Shapes: B batch, C channels, P patches, D hidden.
"""

import torch
from torch import nn
from transformers import initialization as init

from .configuration import FratrieEncoderConfig


class PatchEmbedding(nn.Module):
    """Patches of an image through one linear map, behind a trained vector that gathers the whole image."""

    def __init__(self, config: FratrieEncoderConfig) -> None:
        super().__init__()
        assert config.patch_size is not None
        self.pixels_shape = (config.num_channels, config.image_size, config.image_size)
        # A convolution whose steps are as wide as its kernel is that linear map.
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size, config.patch_size)
        self.image_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))

    def initialise(self, std: float) -> None:
        """Draw the vector of the image (see `FratriePreTrainedModel`); the projection is drawn as any convolution."""
        init.trunc_normal_(self.image_token, std=std)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Map pixels `(B, C, height, width)` to tokens `(B, 1 + P, D)`.

        Raises:
            ValueError: when the images have another size or number of channels than the model's.
        """
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != self.pixels_shape:
            raise ValueError(
                f"Pixels of shape {tuple(pixel_values.shape)} do not fit images of (batch, "
                f"{', '.join(map(str, self.pixels_shape))}): resize them, as the model's image processor does."
            )
        patches_BPD = self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)
        return torch.cat((self.image_token.expand(patches_BPD.shape[0], -1, -1), patches_BPD), dim=1)
