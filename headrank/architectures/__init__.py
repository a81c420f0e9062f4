"""What the tensors of a checkpoint mean. Opens none of its files."""

from headrank.architectures.describing import describe
from headrank.architectures.layout import Architecture, AttentionLayer, Chain, Norm, Projection, Scale, Slice, Step

__all__ = ["Architecture", "AttentionLayer", "Chain", "Norm", "Projection", "Scale", "Slice", "Step", "describe"]
