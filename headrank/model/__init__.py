"""Our own decoder: every attention kind of arXiv 2601.11471 at any geometry, for training and for forward passes."""

from headrank.model.decoder import Decoder
from headrank.model.loading import initialize, load_decoder, new_decoder

__all__ = ["Decoder", "initialize", "load_decoder", "new_decoder"]
