"""Products of all owners at once against the loop that is their reference: grouped, and by tables of where they lie.

The CPU has kernels for the first; for those of the second it has a stand-in.
"""

import weakref
from collections.abc import Callable, Sequence

import peft
import pytest
import torch

from harness.lora_kernels import LoraKernels
from twinkle.module import grouped_products
from twinkle.module.adapter import AdapterLayout, LoraAdapter, LoraConfig, LoraPair, LoraShape
from twinkle.module.lora_check import relative_error
from twinkle.module.lora_tables import Places
from twinkle.module.packed_products import LoopedProducts
from twinkle.module.row_product import RowProduct
from twinkle.module.segmented import Route, RoutedPass, Segment
from twinkle.module.stacked import StackedRoute
from twinkle.module.stacks import AdapterStacks, Stack, StackShape
from twinkle.module.tabled import MOST_MEMBERS, TabledRoute

INPUTS, OUTPUTS = 48, 64
NUM_ROWS = 37
NUM_EXPERTS, NUM_CHOICES = 4, 2
CPU = torch.device("cpu")
LINEAR, EXPERTS, ODD = "layer", "experts.up", "gates"
ODD_OUTPUTS = 6
SHAPES = {
    LINEAR: StackShape(INPUTS, OUTPUTS, None),
    EXPERTS: StackShape(INPUTS, OUTPUTS, NUM_EXPERTS),
    "left alone": StackShape(INPUTS, OUTPUTS, None),
    ODD: StackShape(INPUTS, ODD_OUTPUTS, None),
}
MakeRoute = Callable[[Sequence[Segment]], RoutedPass]


def make_adapter(
    rank: int, scale: float, dtype: torch.dtype = torch.float32, *, paths: Sequence[str] = (LINEAR, EXPERTS)
) -> LoraAdapter:
    shapes = [
        LoraShape(path, SHAPES[path].in_features, SHAPES[path].out_features, rank, scale, SHAPES[path].num_experts)
        for path in paths
    ]
    layout = AdapterLayout(tuple(shapes))
    adapter = LoraAdapter(LoraConfig(rank=rank), layout, device=CPU, compute_dtype=dtype, trainable=True)
    adapter.params.copy_(torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(rank)).to(dtype))
    adapter.publish()
    return adapter


def make_stacks(dtype: torch.dtype = torch.float32, room: int = 1 << 30) -> AdapterStacks:
    return AdapterStacks(SHAPES, device=CPU, dtype=dtype, room=lambda: room)


def looped(segments: Sequence[Segment]) -> RoutedPass:
    return Route(segments, LoopedProducts(RowProduct()))


def stacked(segments: Sequence[Segment], stacks: AdapterStacks | None = None, num_rows: int = NUM_ROWS) -> RoutedPass:
    owners = (one.adapter for one in segments if one.adapter is not None)
    dtype = next((next(iter(owner.compute_views.values())).a.dtype for owner in owners), torch.float32)
    return StackedRoute(segments, num_rows, stacks or make_stacks(dtype), CPU, looped=LoopedProducts(RowProduct()))


def tabled(segments: Sequence[Segment], num_rows: int = NUM_ROWS) -> RoutedPass:
    return TabledRoute(
        segments,
        num_rows,
        Places([path for path, shape in SHAPES.items() if shape.num_experts is None]),
        kernels=LoraKernels(),
        device=CPU,
        others=lambda: stacked(segments, num_rows=num_rows),
    )


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


class Case:
    """A few tenants: mixed ranks, two data of one tenant side by side, rows of the base alone, one without gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(9)
        self.x = torch.randn(NUM_ROWS, INPUTS, generator=generator).to(dtype)
        self.y = torch.randn(NUM_ROWS, OUTPUTS, generator=generator).to(dtype)
        self.dy = torch.randn(NUM_ROWS, OUTPUTS, generator=generator).to(dtype)
        self.dx = torch.randn(NUM_ROWS, INPUTS, generator=generator).to(dtype)
        self.experts = torch.randint(0, NUM_EXPERTS - 1, (NUM_ROWS, NUM_CHOICES), generator=generator)
        first, second, third = (make_adapter(rank, scale, dtype) for rank, scale in ((8, 2.0), (3, 0.5), (16, 1.0)))
        self.adapters = [first, second]
        self.segments = [
            Segment(first, 0, 5, first.grad_views),
            Segment(first, 5, 6, first.grad_views),
            Segment(second, 10, 20, second.grad_views),
            Segment(third, 20, 30, None),
            Segment(first, 30, 36, first.grad_views),
        ]

    def run(self, make_route: MakeRoute) -> dict[str, torch.Tensor]:
        """Forward and backward of a Linear and of a projection of experts; everything they change."""
        route = make_route(self.segments)
        updates = route.updates(LINEAR)
        saved = updates.add(self.y, self.x)
        updates.add_gradients(dy_TO=self.dy, dx_TI=self.dx, x_TI=self.x, saved=saved)
        assignments = route.assign(self.experts, NUM_EXPERTS)
        x, y, dy, dx = (matrix.index_select(0, assignments.tokens_A) for matrix in (self.x, self.y, self.dy, self.dx))
        updates = assignments.updates(EXPERTS)
        saved = updates.add(y, x)
        updates.add_gradients(dy_TO=dy, dx_TI=dx, x_TI=x, saved=saved)
        weight_EOI = torch.randn(NUM_EXPERTS, OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1))
        return {
            "y": self.y,
            "dx": self.dx,
            "y of experts": y,
            "dx of experts": dx,
            "frozen experts": assignments.by_expert(x, weight_EOI.to(x.dtype)),
            "order": assignments.order_A.float(),
            "places": assignments.places_TK.float(),
            **{f"gradient {index}": adapter.grad for index, adapter in enumerate(self.adapters)},
        }


@pytest.mark.parametrize(
    ("make_route", "kernel_takes"),
    [(stacked, 1024), (stacked, 5), (tabled, 1024)],
    ids=["at once", "in ranges", "in place"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_products_of_all_owners_at_once_give_what_the_loop_gives(
    dtype: torch.dtype, tolerance: float, make_route: MakeRoute, kernel_takes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Case(dtype).run(looped)
    monkeypatch.setattr(grouped_products, "MAX_GROUPS", kernel_takes)
    found = Case(dtype).run(make_route)
    for name, right in expected.items():
        assert right.abs().max() > 1, name
        assert_close(found[name], right, tolerance)


def test_more_groups_than_the_kernel_takes_are_never_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    product = torch.nn.functional.grouped_mm

    def noted(left, right, *, offs):  # type: ignore[no-untyped-def]
        given.append(offs.numel())
        return product(left, right, offs=offs)

    monkeypatch.setattr(grouped_products, "MAX_GROUPS", 7)
    monkeypatch.setattr(grouped_products.functional, "grouped_mm", noted)
    Case().run(stacked)
    assert max(given) < 7


EACH_ROUTE = pytest.mark.parametrize("make_route", [stacked, tabled])


@EACH_ROUTE
def test_rows_of_the_base_alone_stay_as_they_are(make_route: MakeRoute) -> None:
    case = Case()
    before = case.y.clone()
    found = case.run(make_route)["y"]
    assert torch.equal(found[6:10], before[6:10])
    assert torch.equal(found[36:], before[36:])


@EACH_ROUTE
@pytest.mark.parametrize("kernel_takes", [1024, 5], ids=["at once", "in ranges"])
def test_a_tenants_nan_stays_in_its_own_rows_and_gradients(
    kernel_takes: int, make_route: MakeRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_products, "MAX_GROUPS", kernel_takes)
    clean, dirty = Case(), Case()
    dirty.x[10:20] = float("nan")
    expected, found = clean.run(make_route), dirty.run(make_route)
    assert found["y"][10:20].isnan().all() and found["gradient 1"].isnan().any()
    assert torch.equal(found["gradient 0"], expected["gradient 0"])
    for rows in (slice(0, 10), slice(20, 37)):
        assert torch.equal(found["y"][rows], expected["y"][rows])
        assert torch.equal(found["dx"][rows], expected["dx"][rows])


@EACH_ROUTE
def test_a_layer_that_no_adapter_trains_is_left_alone(make_route: MakeRoute) -> None:
    case = Case()
    before = case.y.clone()
    assert make_route(case.segments).updates("left alone").add(case.y, case.x) == ()
    assert torch.equal(case.y, before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_layer_whose_rows_the_kernel_does_not_take_goes_segment_by_segment(
    dtype: torch.dtype, tolerance: float
) -> None:
    results = []
    for make_route in (looped, stacked):
        case = Case(dtype)
        adapters = [make_adapter(rank, 0.5, dtype, paths=(LINEAR, ODD)) for rank in (3, 8)]
        segments = [
            Segment(one, start, end, one.grad_views)
            for one, start, end in zip(adapters, (10, 20), (19, NUM_ROWS), strict=True)
        ]
        updates = make_route(segments).updates(ODD)
        y, dy = case.y[:, :ODD_OUTPUTS].contiguous(), case.dy[:, :ODD_OUTPUTS].contiguous()
        saved = updates.add(y, case.x)
        updates.add_gradients(dy_TO=dy, dx_TI=case.dx, x_TI=case.x, saved=saved)
        assert not torch.equal(y, case.y[:, :ODD_OUTPUTS])
        results.append((y, case.dx, *(one.grad for one in adapters)))
    for expected, found in zip(*results, strict=True):
        assert expected.abs().max() > 0
        assert_close(found, expected, tolerance)


def test_weights_are_copied_again_only_where_an_adapter_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    case, stacks = Case(), make_stacks()
    stacked(case.segments, stacks)
    copied: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, values: (copied.append(len(values)), copy(to, values)))

    stacked(case.segments, stacks)
    unchanged = list(copied)
    case.adapters[1].params.mul_(2)
    case.adapters[1].publish()
    found = case.run(lambda segments: stacked(segments, stacks))

    assert unchanged == []
    # A and B of both modules, for all layers in one call.
    assert copied == [4]
    other = Case()
    other.adapters[1].params.mul_(2)
    expected = other.run(looped)
    assert_close(found["y"], expected["y"])


def test_training_takes_over_a_stack_that_a_sampler_has_made() -> None:
    """It was made in inference mode, whose tensors nobody outside of it may change."""
    case, stacks = Case(), make_stacks()
    with torch.inference_mode():
        stacked(case.segments, stacks)
    case.adapters[1].params.mul_(2)
    case.adapters[1].publish()
    found = case.run(lambda segments: stacked(segments, stacks))

    other = Case()
    other.adapters[1].params.mul_(2)
    for name, expected in other.run(looped).items():
        assert_close(found[name], expected)


def test_stacks_that_there_is_no_room_for_are_made_in_each_layer_and_hold_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    zeros = Stack._zeros

    def noted(stack: Stack, shape: StackShape) -> LoraPair:
        pair = zeros(stack, shape)
        made.extend(map(weakref.ref, pair))
        return pair

    monkeypatch.setattr(Stack, "_zeros", noted)
    case, stacks = Case(), make_stacks(room=1000)
    route = stacked(case.segments, stacks)
    updates = route.updates(LINEAR)
    saved = updates.add(case.y, case.x)
    assert made and not any(each() is not None for each in made), "not until the way back"
    updates.add_gradients(dy_TO=case.dy, dx_TI=case.dx, x_TI=case.x, saved=saved)
    assert stacks.size_bytes == 0
    expected = Case().run(looped)
    assert_close(case.y, expected["y"])
    assert_close(case.dx, expected["dx"])


def test_a_stack_takes_no_memory_that_the_pass_needs_and_is_kept_once_there_is_more() -> None:
    case = Case()
    size_bytes = make_stacks().of(case.adapters).size_bytes
    room = 2 * size_bytes
    stacks = AdapterStacks(SHAPES, device=CPU, dtype=torch.float32, room=lambda: room - stacks.size_bytes)
    assert not stacks.of(case.adapters, beside_bytes=1).is_kept
    kept = stacks.of(case.adapters)
    assert kept.is_kept and stacks.size_bytes == size_bytes
    assert stacks.of(case.adapters, beside_bytes=room) is kept


def test_an_adapter_that_is_gone_leaves_nothing_to_one_at_its_address() -> None:
    stacks = make_stacks()
    for rank in (3, 5, 8):
        adapter = make_adapter(rank, 1.0)
        x, y = torch.ones(NUM_ROWS, INPUTS), torch.zeros(NUM_ROWS, OUTPUTS)
        stacked([Segment(adapter, 0, NUM_ROWS)], stacks).updates(LINEAR).add(y, x)
        pair = adapter.views[LINEAR]
        assert_close(y, x @ pair.a.t() @ pair.b.t())
        del adapter, pair


def peft_update(
    adapter: LoraAdapter, alpha: float, x: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What PEFT adds to a bfloat16 layer, and the gradients of the input, of A and of B."""
    pair = adapter.compute_views[LINEAR]
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
@pytest.mark.parametrize("make_route", [looped, stacked, tabled])
def test_in_half_precision_an_update_is_as_large_as_in_peft(
    make_route: Callable[..., RoutedPass], rank: int, alpha: float
) -> None:
    generator = torch.Generator().manual_seed(rank)
    num_rows = 512
    x = torch.randn(num_rows, INPUTS, generator=generator).bfloat16()
    dy = torch.randn(num_rows, OUTPUTS, generator=generator).bfloat16()
    adapter = make_adapter(rank, LoraConfig(rank=rank).scale(rank, alpha), torch.bfloat16, paths=[LINEAR])
    y, dx = torch.zeros(num_rows, OUTPUTS).bfloat16(), torch.zeros_like(x)
    segments = [Segment(adapter, 0, num_rows, adapter.grad_views)]
    route = looped(segments) if make_route is looped else make_route(segments, num_rows=num_rows)

    updates = route.updates(LINEAR)
    saved = updates.add(y, x)
    updates.add_gradients(dy_TO=dy, dx_TI=dx, x_TI=x, saved=saved)

    gradient = adapter.grad_views[LINEAR]
    expected_all = peft_update(adapter, alpha, x, dy)
    for found, expected in zip((y, dx, gradient.a, gradient.b), expected_all, strict=True):
        found, expected = found.double().flatten(), expected.double().flatten()
        size = (found @ expected) / (expected @ expected)
        # Values rounded to bfloat16, to either side, leave up to 0.04 % of all; a factor that is rounded 0.16 to 0.2 %.
        assert abs(size.item() - 1) < 6e-4


def test_a_kernel_that_takes_another_tenants_matrix_is_found_out() -> None:
    for num_members in range(1, MOST_MEMBERS + 1):
        assert relative_error(LoraKernels(), CPU, torch.float32, ranks=(5, 16), num_members=num_members) < 1e-5
    mistaken = LoraKernels()
    right = mistaken.expand._run

    def of_the_first(grid, inner, y_0, y_1, y_2, tiles, bases, *rest, **options):  # type: ignore[no-untyped-def]
        right(grid, inner, y_0, y_1, y_2, tiles, bases[:1].expand(len(bases)), *rest, **options)

    mistaken.expand._run = of_the_first
    assert relative_error(mistaken, CPU, torch.float32, ranks=(5, 5)) > 0.1


@pytest.mark.parametrize("name", ["shrink", "expand", "add_outer"])
def test_a_kernel_that_takes_another_members_matrix_is_found_out(name: str) -> None:
    mistaken = LoraKernels()
    right = getattr(mistaken, name)._run

    def of_the_first(grid, *given, **options):  # type: ignore[no-untyped-def]
        """The second member, which is narrower, takes the first one's."""
        given = list(given)
        tensors = ((index, each) for index, each in enumerate(given) if isinstance(each, torch.Tensor))
        index = next(index for index, each in tensors if each.dtype == torch.int64 and each.dim() == 3)
        given[index] = given[index][[0, 0, 2]]
        right(grid, *given, **options)

    getattr(mistaken, name)._run = of_the_first
    assert relative_error(mistaken, CPU, torch.float32, ranks=(5, 5), num_members=3) > 0.1


def test_an_adapters_bits_in_a_group_do_not_depend_on_what_others_train() -> None:
    """One trains the first member alone, in company of one that trains none, the first, or both."""
    shapes = {path: SHAPES[path] for path in (LINEAR, "left alone")}
    generator = torch.Generator().manual_seed(2)
    x, dx = (torch.randn(NUM_ROWS, INPUTS, generator=generator) for _ in range(2))
    given = [torch.randn(NUM_ROWS, OUTPUTS, generator=generator) for _ in range(4)]
    found = []
    for trained_by_company in ((ODD,), (LINEAR,), tuple(shapes)):
        one = make_adapter(8, 2.0, paths=[LINEAR])
        company = make_adapter(16, 1.0, paths=trained_by_company)
        segments = [Segment(company, 0, 20, company.grad_views), Segment(one, 20, NUM_ROWS, one.grad_views)]
        places = Places([*shapes, ODD])
        route = TabledRoute(
            segments, NUM_ROWS, places, kernels=LoraKernels(), device=CPU, others=lambda: Route((), None)
        )
        updates = route.together(list(shapes))
        ys, dys = [each.clone() for each in given[:2]], given[2:]
        own_dx = dx.clone()
        saved = updates.add(ys, x)
        updates.add_gradients(dys, dx_TI=own_dx, x_TI=x, saved=saved)
        found.append([*(y[20:] for y in ys), own_dx[20:], one.grad])
        assert torch.equal(ys[1][20:], given[1][20:]) and not torch.equal(ys[0][20:], given[0][20:])
    for others in found[1:]:
        assert all(torch.equal(left, right) for left, right in zip(found[0], others, strict=True))


def test_an_adapter_that_trains_other_layers_is_left_out_of_this_one() -> None:
    """Beside one that trains it; its rows keep what the base gives."""
    other, one = make_adapter(3, 1.0, paths=[EXPERTS]), make_adapter(8, 2.0)
    segments = [Segment(other, 0, 20, other.grad_views), Segment(one, 20, NUM_ROWS, one.grad_views)]
    ys = []
    for make_route in (looped, tabled):
        case = Case()
        updates = make_route(segments).updates(LINEAR)
        saved = updates.add(case.y, case.x)
        updates.add_gradients(dy_TO=case.dy, dx_TI=case.dx, x_TI=case.x, saved=saved)
        assert not other.grad.any()
        ys.append(case.y)
    assert torch.equal(ys[1][:20], Case().y[:20])
    assert_close(ys[1], ys[0])


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, True),
        ((10, 0), torch.bfloat16, True),
        ((10, 3), torch.bfloat16, True),
        ((9, 0), torch.float16, False),
        ((8, 0), torch.bfloat16, False),
        ((8, 9), torch.bfloat16, False),
        ((12, 0), torch.bfloat16, False),
    ],
)
def test_products_are_grouped_only_where_no_layer_then_waits(
    capability: tuple[int, int], dtype: torch.dtype, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere torch's ``_grouped_mm`` copies the groups' ends to the host (ATen's GroupedMMUtils.h)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped_products.supports_grouped_products(torch.device("cuda"), dtype) is expected
    assert not grouped_products.supports_grouped_products(CPU, dtype)
