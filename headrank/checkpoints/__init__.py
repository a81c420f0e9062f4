"""Files become facts and lazily read tensors. Knows file formats, no model families."""

from headrank.checkpoints.base import Checkpoint, TensorInfo
from headrank.checkpoints.opening import open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
