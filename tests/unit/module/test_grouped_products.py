"""Grouped GEMMs against the loop that is their reference, on the CPU, which has kernels for both."""

import peft
import pytest
import torch

from twinkle.module.adapter import LoraConfig, LoraPair
from twinkle.module.grouped_products import GroupedProducts
from twinkle.module.packed_products import ExpertRows, LoopedProducts, PackedProducts, SegmentPair
from twinkle.module.row_product import RowProduct

INPUTS, OUTPUTS = 48, 64
NUM_ROWS = 37


def make_pair(rank: int, seed: int, dtype: torch.dtype) -> LoraPair:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, INPUTS, generator=generator).to(dtype)
    return LoraPair(a, torch.randn(OUTPUTS, rank, generator=generator).to(dtype))


def zeros_like(pair: LoraPair) -> LoraPair:
    return LoraPair(torch.zeros_like(pair.a, dtype=torch.float32), torch.zeros_like(pair.b, dtype=torch.float32))


class Case:
    """A few tenants: mixed ranks, two data of one tenant side by side, rows of the base alone, one without gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(9)
        self.x = torch.randn(NUM_ROWS, INPUTS, generator=generator).to(dtype)
        self.y = torch.randn(NUM_ROWS, OUTPUTS, generator=generator).to(dtype)
        self.dy = torch.randn(NUM_ROWS, OUTPUTS, generator=generator).to(dtype)
        self.dx = torch.randn(NUM_ROWS, INPUTS, generator=generator).to(dtype)
        weights = [make_pair(rank, rank, dtype) for rank in (8, 3, 16)]
        self.gradients = [zeros_like(weights[0]), zeros_like(weights[1])]
        self.pairs = [
            SegmentPair(0, 5, 2.0, weights[0], self.gradients[0]),
            SegmentPair(5, 6, 2.0, weights[0], self.gradients[0]),
            SegmentPair(10, 20, 0.5, weights[1], self.gradients[1]),
            SegmentPair(20, 30, 1.0, weights[2], None),
            SegmentPair(30, 37, 2.0, weights[0], self.gradients[0]),
        ]

    def run(self, products: PackedProducts) -> dict[str, torch.Tensor]:
        """Forward and backward; everything they change."""
        saved = products.add_updates(self.y, self.x, self.pairs)
        products.add_update_gradients(dy_TO=self.dy, dx_TI=self.dx, x_TI=self.x, saved=saved, pairs=self.pairs)
        return {
            "y": self.y,
            "dx": self.dx,
            **{f"a{index}": gradient.a for index, gradient in enumerate(self.gradients)},
            **{f"b{index}": gradient.b for index, gradient in enumerate(self.gradients)},
        }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_grouped_products_give_what_the_loop_gives(dtype: torch.dtype, tolerance: float) -> None:
    looped = Case(dtype).run(LoopedProducts(RowProduct()))
    grouped = Case(dtype).run(GroupedProducts(RowProduct()))
    for name, expected in looped.items():
        assert expected.abs().max() > 1, name
        assert (grouped[name] - expected).abs().max() <= tolerance * expected.abs().max(), name


def test_rows_of_the_base_alone_stay_as_they_are() -> None:
    case = Case()
    before = case.y[6:10].clone()
    assert torch.equal(case.run(GroupedProducts(RowProduct()))["y"][6:10], before)


def test_a_tenants_nan_stays_in_its_own_rows_and_gradients() -> None:
    clean, dirty = Case(), Case()
    dirty.x[10:20] = float("nan")
    expected = clean.run(GroupedProducts(RowProduct()))
    found = dirty.run(GroupedProducts(RowProduct()))
    assert found["y"][10:20].isnan().all() and found["a1"].isnan().all()
    for name in ("a0", "b0"):
        assert torch.equal(found[name], expected[name])
    for rows in (slice(0, 10), slice(20, 37)):
        assert torch.equal(found["y"][rows], expected["y"][rows])
        assert torch.equal(found["dx"][rows], expected["dx"][rows])


def test_a_layer_that_no_adapter_trains_is_left_alone() -> None:
    case, products = Case(), GroupedProducts(RowProduct())
    case.pairs = []
    before = case.y.clone()
    assert torch.equal(case.run(products)["y"], before)


def test_each_expert_multiplies_its_own_rows() -> None:
    weight_EOI = torch.randn(4, OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1))
    x = Case().x
    rows = [ExpertRows(1, 0, 20), ExpertRows(2, 20, NUM_ROWS)]
    expected = LoopedProducts(RowProduct()).by_expert(x, weight_EOI, rows)
    found = GroupedProducts(RowProduct()).by_expert(x, weight_EOI, rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def peft_update(
    pair: LoraPair, alpha: float, x: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What PEFT adds to a bfloat16 layer, and the gradients of the input, of A and of B."""
    base = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    base.weight.zero_()
    config = peft.LoraConfig(r=pair.a.shape[0], lora_alpha=alpha, target_modules=["0"])
    adapted = peft.get_peft_model(torch.nn.Sequential(base), config)
    weights = {name.split(".")[-3]: weight for name, weight in adapted.named_parameters() if ".lora_" in name}
    weights["lora_A"].data.copy_(pair.a)
    weights["lora_B"].data.copy_(pair.b)
    x = x.clone().requires_grad_(True)
    y = adapted(x)
    return y.detach(), *torch.autograd.grad(y, [x, weights["lora_A"], weights["lora_B"]], dy)


@pytest.mark.parametrize("alpha", [32.0, 10.0])
@pytest.mark.parametrize("rank", [12, 24, 48, 96])
@pytest.mark.parametrize(
    "products", [GroupedProducts(RowProduct()), LoopedProducts(RowProduct())], ids=["grouped", "loop"]
)
def test_in_half_precision_an_update_is_as_large_as_in_peft(products: PackedProducts, rank: int, alpha: float) -> None:
    generator = torch.Generator().manual_seed(rank)
    num_rows = 512
    x = torch.randn(num_rows, INPUTS, generator=generator).bfloat16()
    dy = torch.randn(num_rows, OUTPUTS, generator=generator).bfloat16()
    pair = make_pair(rank, rank, torch.bfloat16)
    gradient = zeros_like(pair)
    y, dx = torch.zeros(num_rows, OUTPUTS).bfloat16(), torch.zeros_like(x)
    pairs = [SegmentPair(0, num_rows, LoraConfig(rank=rank).scale(rank, alpha), pair, gradient)]

    saved = products.add_updates(y, x, pairs)
    products.add_update_gradients(dy_TO=dy, dx_TI=dx, x_TI=x, saved=saved, pairs=pairs)

    for found, expected in zip((y, dx, gradient.a, gradient.b), peft_update(pair, alpha, x, dy), strict=True):
        found, expected = found.double().flatten(), expected.double().flatten()
        size = (found @ expected) / (expected @ expected)
        # Values rounded to bfloat16, to either side, leave up to 0.04 % of all; a factor that is rounded 0.16 to 0.2 %.
        assert abs(size.item() - 1) < 6e-4
