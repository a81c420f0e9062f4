"""Aligning turns: what they may do, what they find, and that each is the best for two heads."""

import pytest
import torch
from torch import Tensor

from headrank.alignment import Turns, aligning_turns, best_overlaps, column_products
from headrank.config import ModelConfig
from headrank.model.attention import _rotate, rotary_table
from tests.planted import phase_turn, random_rotation

D = 10
PAIRS = Turns(first=tuple(range(D // 2)), second=tuple(range(D // 2, D)))
MIXED = Turns(first=(1, 2), second=(5, 7), free=(0, 3, 8, 9))  # columns 4 and 6 stay


def random_heads(n: int, seed: int) -> Tensor:
    return torch.randn(n, 13, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("turns", [Turns.anything(D), PAIRS, MIXED, Turns()], ids=["any", "pairs", "mixed", "none"])
def test_turns_are_orthogonal_leave_the_first_head_and_never_make_the_mean_worse(turns: Turns) -> None:
    heads = random_heads(5, 0)
    A = aligning_turns(column_products(heads), turns)
    identity = torch.eye(D, dtype=torch.float64)
    torch.testing.assert_close(A.transpose(1, 2) @ A, identity.expand(5, D, D), atol=1e-12, rtol=0)
    torch.testing.assert_close(A[0], identity, atol=1e-12, rtol=0)
    assert (heads @ A).mean(0).norm() >= heads.mean(0).norm()


def test_turns_within_rotary_pairs_commute_with_the_models_rotary_embedding() -> None:
    config = ModelConfig(kind="mha", n_layer=1, n_head=1, d_head=D, d_model=11, d_mlp=3, vocab_size=5, context=17)
    rotary = rotary_table(config, 17, device=torch.device("cpu"), dtype=torch.float64)
    x = torch.randn(17, 1, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    A = aligning_turns(column_products(random_heads(3, 2)), PAIRS)[2]
    torch.testing.assert_close(_rotate(x @ A, rotary), _rotate(x, rotary) @ A)
    any_turn = aligning_turns(column_products(random_heads(3, 2)), Turns.anything(D))[2]
    assert not torch.allclose(_rotate(x @ any_turn, rotary), _rotate(x, rotary) @ any_turn)


@pytest.mark.parametrize(("turns", "turn"), [(Turns.anything(D), random_rotation), (PAIRS, phase_turn)], ids=["any", "pairs"])
def test_copies_in_turned_bases_are_brought_together(turns: Turns, turn: object) -> None:
    generator = torch.Generator().manual_seed(7)
    head = random_heads(1, 3)[0]
    heads = torch.stack([head @ turn(D, generator) for _ in range(4)])  # type: ignore[operator]
    aligned = heads @ aligning_turns(column_products(heads), turns)
    torch.testing.assert_close(aligned, heads[0].expand_as(aligned), atol=1e-9, rtol=0)


@pytest.mark.parametrize("turns", [Turns.anything(D), PAIRS, MIXED, Turns()], ids=["any", "pairs", "mixed", "none"])
def test_two_heads_reach_their_best_overlap(turns: Turns) -> None:
    products = column_products(random_heads(2, 4))
    A = aligning_turns(products, turns)
    reached = torch.einsum("ab,ab->", products[0, :, 1], A[1].T)  # tr(X_0^T X_1 A_1)
    assert float(reached) == pytest.approx(float(best_overlaps(products, turns)[0, 1]), rel=1e-9)


def test_more_freedom_overlaps_more() -> None:
    products = column_products(random_heads(3, 5))
    none, pairs, anything = (best_overlaps(products, turns)[0, 1] for turns in (Turns(), PAIRS, Turns.anything(D)))
    assert none < pairs < anything


def test_a_dead_head_is_left_as_it_is() -> None:
    heads = random_heads(3, 6)
    heads[1] = 0
    for turns in (PAIRS, Turns.anything(D)):
        A = aligning_turns(column_products(heads), turns)
        assert torch.isfinite(A).all()
        alone = aligning_turns(column_products(heads[[0, 2]]), turns)
        torch.testing.assert_close((heads @ A).sum(0).norm(), (heads[[0, 2]] @ alone).sum(0).norm())
