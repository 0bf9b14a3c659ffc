"""matmul2d multiplies what its operands and its descriptor say, whichever thread holds what."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensor_programs import DYNAMIC, Case, Product, layouts, library

from softmetal.testing import Library

HALF, BFLOAT, FLOAT, CHAR, INT = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32
DTYPES = [
    (HALF, HALF, FLOAT),
    (HALF, HALF, HALF),
    (BFLOAT, BFLOAT, FLOAT),
    (BFLOAT, BFLOAT, BFLOAT),
    (HALF, FLOAT, FLOAT),
    (FLOAT, HALF, FLOAT),
    (FLOAT, BFLOAT, FLOAT),
    (BFLOAT, HALF, FLOAT),
    (FLOAT, FLOAT, FLOAT),
    (CHAR, CHAR, INT),
]
OF_DTYPES = [Product(*dtypes, 16, 32, 16) for dtypes in DTYPES]
OF_FLAGS = [
    Product(HALF, HALF, FLOAT, 16, 32, 16, transposed=(left, right), add=add, in_memory=in_memory)
    for left, right, add, in_memory in itertools.product((False, True), repeat=4)
]
OF_SHAPES = [
    Product(HALF, HALF, FLOAT, m, n, k, transposed=(False, True))
    for m, n, k in ((16, 16, 16), (32, 32, 32), (16, 8, 24), (24, 16, 8), (16, 96, 64), (5, 16, 7))
]
RELAXED = [Product(FLOAT, FLOAT, FLOAT, 16, 32, 32, relaxed=relaxed) for relaxed in (False, True)]
RAGGED = [Product(HALF, HALF, FLOAT, 16, 32, DYNAMIC, transposed=(False, right)) for right in (False, True)]


@pytest.fixture(scope="module")
def products() -> Library:
    return library([*dict.fromkeys([*OF_DTYPES, *OF_FLAGS, *OF_SHAPES, *RELAXED, *RAGGED])])


@pytest.mark.parametrize("product", [*OF_DTYPES, *OF_FLAGS, *OF_SHAPES, *RELAXED], ids=lambda one: one.name)
def test_product(products: Library, product: Product) -> None:
    for layout in layouts():
        case = Case(product, product.m, product.n, product.k)
        case.run(products, tensor_layout=layout)
        case.assert_right(layout)


@pytest.mark.parametrize("product", RAGGED, ids=lambda one: one.name)
def test_operands_that_are_smaller_than_the_tile(products: Library, product: Product) -> None:
    for layout in layouts():
        for m, n, k in ((16, 32, 100), (7, 32, 16), (16, 19, 16), (1, 1, 1), (15, 31, 33)):
            case = Case(product, m, n, k)
            case.run(products, tensor_layout=layout)
            case.assert_right(f"{layout}, {m}x{n}x{k}")


def test_relaxed_precision_cuts_floats(products: Library) -> None:
    """With operands of 24 bits the relaxed product differs; without, it does not."""
    for relaxed in RELAXED:
        case = Case(relaxed, 16, 32, 32)
        for operand in case.operands[:2]:
            operand.mul_(1 + 2.0**-12)
        case.run(products)
        error = (case.operands[2].double() - case.expected()).abs().max()
        assert (error > 1e-3) == relaxed.relaxed


def test_the_wrong_operand_is_noticed(products: Library) -> None:
    """The control of the comparison: one element differs by one unit."""
    case = Case(OF_SHAPES[0], 16, 16, 16)
    case.run(products)
    case.assert_right("itself")
    case.operands[2][3, 5] += 2.0**-10
    with pytest.raises(AssertionError, match="of the tolerance"):
        case.assert_right("one element")
