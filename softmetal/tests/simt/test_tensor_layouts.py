"""Cooperative tensors under each layout: every element is held once, and what is compatible fits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensor_programs import PROLOGUE, layouts

from softmetal.testing import Library

# Two products of a chain: S = A B (16x32) is summed by rows, and is the left operand of S C (16x64).
CHAIN = (
    PROLOGUE
    + """
typedef tensor<device half, dextents<int, 2>, tensor_inline> Operand;
typedef tensor<device float, dextents<int, 2>, tensor_inline> Result;
constant constexpr auto first_mode = matmul2d_descriptor::mode::multiply;

#define OPERATIONS                                                                                  \\
  constexpr auto first_of = matmul2d_descriptor(16, 32, 16, false, false, false, first_mode);       \\
  constexpr auto second_of = matmul2d_descriptor(16, 64, 32, false, false, false, first_mode);      \\
  matmul2d<first_of, execution_simdgroup> first;                                                    \\
  matmul2d<second_of, execution_simdgroup> second;                                                  \\
  auto s = first.get_destination_cooperative_tensor<Operand, Operand, float>();                     \\
  auto rows = first.get_row_reduction_destination_cooperative_tensor<Operand, Operand, float>();    \\
  auto columns = first.get_column_reduction_destination_cooperative_tensor<Operand, Operand, float>();

kernel void facts(device int* out [[buffer(0)]]) {
  OPERATIONS
  out[0] = s.get_capacity();
  out[1] = rows.get_capacity();
  out[2] = is_iterator_compatible(s, rows);
  out[3] = is_iterator_compatible(s, columns);
  out[4] = second.is_compatible_as_left_input<float, half, float>(s);
}

// {column, row} and whether the slot is valid, lane by lane.
kernel void elements(device int* out [[buffer(0)]], constant int& capacity [[buffer(1)]],
                     ushort lane [[thread_index_in_simdgroup]]) {
  OPERATIONS
  for (ushort i = 0; i < s.get_capacity(); ++i) {
    const auto at = s.get_multidimensional_index(i);
    device int* slot = out + (lane * capacity + i) * 3;
    slot[0] = at[0];
    slot[1] = at[1];
    slot[2] = s.is_valid_element(i);
  }
}

kernel void chain(device half* a [[buffer(0)]], device half* b [[buffer(1)]], device half* c [[buffer(2)]],
                  device float* out [[buffer(3)]], device float* sums [[buffer(4)]]) {
  OPERATIONS
  Operand left(a, dextents<int, 2>(16, 16)), right(b, dextents<int, 2>(32, 16));
  Operand last(c, dextents<int, 2>(64, 32));
  Result result(out, dextents<int, 2>(64, 16));
  first.run(left, right, s);
  auto weights = second.get_left_input_cooperative_tensor<float, half, float>(s);
  auto product = second.get_destination_cooperative_tensor<decltype(weights), Operand, float>();
  second.run(weights, last, product);
  product.store(result);
}

kernel void reductions(device half* a [[buffer(0)]], device half* b [[buffer(1)]],
                       device float* out [[buffer(2)]], constant float& identity [[buffer(3)]],
                       constant int& operation [[buffer(4)]]) {
  OPERATIONS
  Operand left(a, dextents<int, 2>(16, 16)), right(b, dextents<int, 2>(32, 16));
  first.run(left, right, s);
  reduce_rows(s, rows, reduction_operation(operation), identity);
  reduce_columns(s, columns, reduction_operation(operation), identity);
  for (ushort i = 0; i < rows.get_capacity(); ++i)
    if (rows.is_valid_element(i)) out[rows.get_multidimensional_index(i)[0]] = rows[i];
  for (ushort i = 0; i < columns.get_capacity(); ++i)
    if (columns.is_valid_element(i)) out[16 + columns.get_multidimensional_index(i)[0]] = columns[i];
}

// Each element minus the sum of its row, found through an iterator.
kernel void mapped(device half* a [[buffer(0)]], device half* b [[buffer(1)]],
                   device float* out [[buffer(2)]]) {
  OPERATIONS
  Operand left(a, dextents<int, 2>(16, 16)), right(b, dextents<int, 2>(32, 16));
  Result result(out, dextents<int, 2>(32, 16));
  first.run(left, right, s);
  reduce_rows(s, rows, reduction_operation::sum, 0.0f);
  for (auto it = s.begin(); it != s.end(); ++it)
    if (it.is_valid_element()) *it -= *rows.map_iterator(it);
  s.store(result);
}
"""
)
KINDS = {  # of SEED % 4: are rows mapped, and is a destination a left input?
    0: (False, False),
    1: (True, False),
    2: (True, True),
    3: (True, True),
}


def kind(layout: str) -> int:
    return int(layout.partition(":")[2]) % 4 if layout.startswith("random") else 2


@pytest.fixture(scope="module")
def chain() -> Library:
    return Library(CHAIN, std="metal4.0")


def launch(library: Library, name: str, buffers: list[object], layout: str) -> None:
    library.pipeline(name).run(buffers, (1, 1, 1), (32, 1, 1), tensor_layout=layout)


def facts(library: Library, layout: str) -> dict[str, int]:
    out = np.full(5, -1, np.int32)
    launch(library, "facts", [out], layout)
    return dict(zip(("s", "rows", "maps_rows", "maps_columns", "is_left"), out.tolist(), strict=True))


def operands(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-8, 9, shape, generator=generator).half() / 4
        for shape in ((16, 16), (16, 32), (32, 64))
    ]


def test_every_element_is_held_once(chain: Library) -> None:
    for layout in layouts(fresh=3):
        capacity = facts(chain, layout)["s"]
        slots = np.zeros((32 * capacity, 3), np.int32)
        launch(chain, "elements", [slots, np.int32(capacity).tobytes()], layout)
        held = slots[slots[:, 2] == 1]
        count = np.zeros((16, 32), int)
        np.add.at(count, (held[:, 1], held[:, 0]), 1)
        assert (count == 1).all(), layout
        has_empty_slots = capacity > 16 * 32 // 32
        assert has_empty_slots == (kind(layout) == 3), layout
        assert (len(held) < len(slots)) == has_empty_slots, layout


def test_layouts_differ(chain: Library) -> None:
    def elements(layout: str) -> bytes:
        slots = np.zeros((32 * 24, 3), np.int32)
        launch(chain, "elements", [slots, np.int32(24).tobytes()], layout)
        return slots.tobytes()

    names = ["m5", "blocks8", *(f"random:{seed}" for seed in range(8))]
    assert len({elements(layout) for layout in names}) == len(names)
    assert elements("random:5") == elements("random:5")


def test_compatible_tensors(chain: Library) -> None:
    for layout in layouts(fresh=2):
        found = facts(chain, layout)
        maps_rows, is_left = KINDS[kind(layout)]
        assert (bool(found["maps_rows"]), bool(found["is_left"])) == (maps_rows, is_left), layout
        assert bool(found["maps_columns"]) == maps_rows, layout


def test_a_destination_as_the_next_left_operand(chain: Library) -> None:
    """Right where the layout says that it is compatible; wrong, which shows the check, where it says not."""
    a, b, c = operands()
    expected = (a.double() @ b.double()).float().double() @ c.double()
    for layout in layouts():
        out = torch.full((16, 64), float("nan"))
        launch(chain, "chain", [a, b, c, out, None], layout)
        is_right = torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-4)
        assert is_right == bool(facts(chain, layout)["is_left"]), layout


@pytest.mark.parametrize("operation", ["sum", "max", "min"])
def test_reductions(chain: Library, operation: str) -> None:
    a, b, _ = operands(1)
    s = a.double() @ b.double()
    number = ("sum", "max", "min").index(operation)
    identity = {"sum": 0.0, "max": -np.inf, "min": np.inf}[operation]
    reduced = [getattr(torch, f"a{operation}" if number else operation)(s, dim) for dim in (1, 0)]
    for layout in layouts():
        out = torch.full((48,), float("nan"))
        arguments = [a, b, out, np.float32(identity).tobytes(), np.int32(number).tobytes()]
        launch(chain, "reductions", arguments, layout)
        torch.testing.assert_close(out.double(), torch.cat(reduced), rtol=1e-5, atol=1e-4)


def test_the_identity_takes_part_in_a_reduction(chain: Library) -> None:
    """The default identity, 0, is the largest of negative numbers."""
    a, b, _ = (one.abs() + 1 for one in operands(2))
    out = torch.full((48,), float("nan"))
    launch(chain, "reductions", [-a, b, out, np.float32(0).tobytes(), np.int32(1).tobytes()], "m5")
    assert out.tolist() == [0.0] * 48


def test_iterators(chain: Library) -> None:
    """In a layout without a mapping the iterator is past the end, where nothing but NaN is found."""
    a, b, _ = operands(3)
    s = a.double() @ b.double()
    for layout in layouts():
        out = torch.full((16, 32), float("nan"))
        launch(chain, "mapped", [a, b, out], layout)
        if KINDS[kind(layout)][0]:
            torch.testing.assert_close(out.double(), s - s.sum(1, keepdim=True), rtol=1e-5, atol=1e-4)
        else:
            assert out.isnan().any(), layout


def test_unknown_layouts_are_refused(chain: Library) -> None:
    for layout in ("m4", "random", "random:x", "random:-1", f"random:{1 << 64}"):
        with pytest.raises(ValueError, match="use 'm5', 'blocks8' or 'random:SEED'"):
            facts(chain, layout)
