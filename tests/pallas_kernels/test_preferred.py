"""Ops with a fallback."""

import logging

import pytest

from pallas_kernels.preferred import Preferred


def kernel(x, *, scale=1, generation, interpret):
    return "kernel", x, scale, generation, interpret


def supports(x, *, scale=1, generation):
    return x < 10, "x is too large"


def fallback(x, *, scale=1):
    return "fallback", x, scale


def op(strict=False):
    return Preferred("attention", "triton", kernel, supports, fallback, "hopper", strict, False)


def test_what_the_kernel_supports_goes_to_it():
    assert op(strict=True)(3, scale=2) == ("kernel", 3, 2, "hopper", False)


def test_the_rest_falls_back_and_each_reason_is_told_once(caplog):
    preferred = op()
    with caplog.at_level(logging.WARNING):
        assert preferred(30) == ("fallback", 30, 1)
        assert preferred(40) == ("fallback", 40, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: not by triton, because x is too large"
    ]


def test_strict_makes_the_fallback_an_error():
    with pytest.raises(
        RuntimeError, match="attention: triton cannot serve this: x is too large; strict forbids"
    ):
        op(strict=True)(30)


def test_equal_ops_are_equal_so_that_engines_share_compiled_programs():
    first, second = op(), op()
    first(30)
    assert first == second
    assert hash(first) == hash(second)
