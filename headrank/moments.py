"""Linear CKA between heads, streamed: second moments of the heads' vectors over tokens are all that it needs."""

from collections.abc import Mapping

import torch
from torch import Tensor

RUN = 2048  # tokens of one float32 product; short sums are exact enough, their totals are float64


class HeadMoments:
    """First and second moments of vectors [B, T, n, D], a vector a token and head, in memory that tokens do not fill."""

    def __init__(self, n: int, D: int, device: torch.device) -> None:
        self.n, self.D = n, D
        self.second = torch.zeros(n * D, n * D, dtype=torch.float64, device=device)
        self.first = torch.zeros(n * D, dtype=torch.float64, device=device)
        self.count = 0.0
        self.shift: Tensor | None = None

    def add(self, x: Tensor, *, keep: Tensor | None = None) -> None:
        """Adds one batch. x: [B, T, n, D]; keep: [B, T], False for tokens that are not to count."""
        rows = (x.flatten(0, 1) if keep is None else x[keep]).flatten(1).float()  # [tokens, n D]
        if not len(rows):
            return
        if self.shift is None:
            self.shift = rows.mean(0, dtype=torch.float64).float()  # about the first batch's mean: large constant parts would cost digits
        rows = rows - self.shift
        self.count += len(rows)
        self.first += rows.sum(0, dtype=torch.float64)
        for run in rows.split(RUN):
            self.second += run.T @ run

    def state(self) -> dict[str, Tensor]:
        """What restore() takes, in another process."""
        sums = {"second": self.second, "first": self.first, "count": torch.tensor(self.count, dtype=torch.float64)}
        return sums if self.shift is None else sums | {"shift": self.shift}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what state() gave, to the same bits."""
        self.second.copy_(state["second"])
        self.first.copy_(state["first"])
        self.count = float(state["count"])
        self.shift = state["shift"].to(self.second.device) if "shift" in state else None

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds what another accumulator of the same heads counted, from its state(): its moments are taken about the mean of this one."""
        if "shift" not in state:
            return
        if self.shift is None:
            self.restore(state)
            return
        its = {name: tensor.to(self.second.device) for name, tensor in state.items()}
        first, count, apart = its["first"], float(its["count"]), its["shift"].double() - self.shift.double()
        crossed = torch.outer(first, apart)
        self.second += its["second"] + crossed + crossed.T + count * torch.outer(apart, apart)
        self.first += first + count * apart
        self.count += count

    def covariance(self) -> Tensor:
        """Sum over tokens of (x_i - mean)(x_j - mean)^T for all pairs of heads, [n, D, n, D] float64."""
        centred = self.second - torch.outer(self.first, self.first) / max(self.count, 1.0)
        return centred.view(self.n, self.D, self.n, self.D)


def linear_cka_gram(covariance: Tensor, *, n_head: int, W_O: Tensor | None = None) -> Tensor:
    """||X_i^T X_j||_F^2 for all pairs of heads, [H, H] float64: its cosines are linear CKA (Kornblith et al. 2019, arXiv 1905.00414).

    X_h: [tokens, width], head h's centred vectors, known by their covariance [n, D, n, D]; where n < H, consecutive heads share.
    W_O: [H, D, d_model], where X_h = Z_h W_O^h and the covariance is that of Z: ||X_i^T X_j||_F = ||R_i C_ij R_j^T||_F with
    W_O^h = R_h^T Q_h, Q_h of orthonormal rows, so that nothing of d_model's size is formed.
    Invariant to rotating and scaling each head's vectors and to shifting them all; not to stretching some directions alone.
    """
    if W_O is not None:
        R = torch.linalg.qr(W_O.double().transpose(1, 2), mode="r")[1]  # [H, min(D, d_model), D]
        covariance = torch.einsum("ixa,iajb,jyb->ixjy", R, covariance, R)
    gram = covariance.square().sum((1, 3))
    gram = (gram + gram.T) / 2
    share = n_head // len(gram)
    return gram.repeat_interleave(share, 0).repeat_interleave(share, 1)
