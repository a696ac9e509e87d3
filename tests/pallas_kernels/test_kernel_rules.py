"""Rules that hold for every kernel, read from the sources: what interpret mode cannot see, and what ops consist of."""

import ast
import importlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pallas_kernels.all_cases import all_cases
from pallas_kernels.gpus import GPUS

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "pallas_kernels"
TESTS = ROOT / "tests" / "pallas_kernels"
SOURCES = sorted(KERNELS.rglob("*.py"))
KERNEL_FILES = [
    path for path in SOURCES if path.name.startswith(("triton", "mosaic")) and path.parent != KERNELS
]
TRITON_OPS = sorted(path.parent.name for path in KERNELS.glob("*/triton.py"))
TUNED_OPS = sorted(path.parent.name for path in KERNELS.glob("*/tuning.json"))
OPS_WITH_CASES = sorted(path.parent.name for path in KERNELS.glob("*/cases.py"))

PRODUCTS = {"dot", "dot_general", "matmul", "einsum", "tensordot"}
EXACT = {"precision", "allow_tf32"}
PALLAS_CALLERS = {"triton_call.py"}


def masked_loads_without_other(tree: ast.AST) -> list[int]:
    """Lines. What the masked lanes of such a load hold is undefined on a GPU; the interpreter hides it."""
    return [
        call.lineno
        for call in _calls(tree)
        if _name(call) == "load" and "mask" in _keywords(call) and "other" not in _keywords(call)
    ]


def products_without_precision(tree: ast.AST) -> list[int]:
    """Lines. Triton rounds float32 operands to TF32 if it is not told otherwise; the interpreter does not."""
    operators = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp | ast.AugAssign)]
    return [
        *(node.lineno for node in operators if isinstance(node.op, ast.MatMult)),
        *(call.lineno for call in _calls(tree) if _name(call) in PRODUCTS and not _is_exact(call)),
    ]


def pallas_calls(tree: ast.AST) -> list[int]:
    """Lines that name ``pallas_call``."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "pallas_call")
        or (isinstance(node, ast.ImportFrom) and any(alias.name == "pallas_call" for alias in node.names))
    ]


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    """The last part of what is called."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _keywords(call: ast.Call) -> set[str | None]:
    return {keyword.arg for keyword in call.keywords}


def _is_exact(call: ast.Call) -> bool:
    """Whether precision is given, and not as a constant that allows TF32."""
    given = [keyword.value for keyword in call.keywords if keyword.arg in EXACT]
    return bool(given) and not any(isinstance(v, ast.Constant) and v.value in (None, True) for v in given)


def _parse(path: Path) -> ast.AST:
    return ast.parse(path.read_text(), str(path))


def _label(path: Path) -> str:
    return str(path.relative_to(KERNELS))


def _integers(choice: Any) -> Iterator[tuple[str, int]]:
    """Names and values of the integers of a choice, which may nest dataclasses."""
    for field in fields(choice):
        value = getattr(choice, field.name)
        if is_dataclass(value):
            yield from _integers(value)
        elif isinstance(value, int):
            yield field.name, value


def _module(op: str, name: str) -> ModuleType:
    return importlib.import_module(f"pallas_kernels.{op}.{name}")


class TestSources:
    @pytest.mark.parametrize("path", KERNEL_FILES, ids=_label)
    def test_masked_loads_say_what_the_rest_is(self, path: Path) -> None:
        assert masked_loads_without_other(_parse(path)) == []

    @pytest.mark.parametrize("path", KERNEL_FILES, ids=_label)
    def test_products_do_not_become_tf32_silently(self, path: Path) -> None:
        assert products_without_precision(_parse(path)) == []

    @pytest.mark.parametrize("path", SOURCES, ids=_label)
    def test_one_place_calls_pallas(self, path: Path) -> None:
        if path.name not in PALLAS_CALLERS:
            assert pallas_calls(_parse(path)) == []


class TestOps:
    @pytest.mark.parametrize("op", TRITON_OPS)
    def test_folder_is_complete(self, op: str) -> None:
        wanted = (
            "__init__.py",
            "reference.py",
            "xla.py",
            "triton.py",
            "tuning.py",
            "tuning.json",
            "cases.py",
        )
        assert [name for name in wanted if not (KERNELS / op / name).exists()] == []

    @pytest.mark.parametrize("op", TRITON_OPS)
    def test_backend_has_the_shared_interface(self, op: str) -> None:
        missing = [
            f"{module}.{name}"
            for module, names in (
                ("triton", ["supports"]),
                ("tuning", ["Choice", "choose", "candidates", "key"]),
            )
            for name in names
            if not hasattr(_module(op, module), name)
        ]
        assert missing == []

    @pytest.mark.parametrize("op", TRITON_OPS)
    def test_backend_is_tested_by_a_contract(self, op: str) -> None:
        found = [
            base.id
            for path in TESTS.glob("test_*triton*.py")
            if f"pallas_kernels.{op}" in path.read_text()
            for node in ast.walk(_parse(path))
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            if isinstance(base, ast.Name) and base.id.endswith("Contract")
        ]
        assert found


class TestCases:
    def test_all_ops_are_in_the_list(self) -> None:
        assert sorted({case.op for case in all_cases()}) == OPS_WITH_CASES

    @pytest.mark.parametrize("op", OPS_WITH_CASES)
    def test_names_are_unique_and_know_their_op(self, op: str) -> None:
        cases = _module(op, "cases").kernel_cases()
        names = [(case.backend, case.name) for case in cases]
        assert sorted(names) == sorted(set(names))
        assert {case.op for case in cases} == {op}

    @pytest.mark.parametrize("op", OPS_WITH_CASES)
    def test_some_are_quick_but_not_many(self, op: str) -> None:
        cases = _module(op, "cases").kernel_cases()
        for backend in {case.backend for case in cases}:
            assert 1 <= sum(case.quick for case in cases if case.backend == backend) <= 3

    @pytest.mark.parametrize("op", OPS_WITH_CASES)
    def test_warps_are_powers_of_two(self, op: str) -> None:
        """Others make the compiler abort the process."""
        for case in _module(op, "cases").kernel_cases():
            for choice in case.candidates:
                for name, value in _integers(choice):
                    assert "warps" not in name or value in (1, 2, 4, 8, 16), f"{case.name}: {choice}"


@pytest.mark.parametrize("op", TUNED_OPS)
def test_measured_choices_are_choices(op: str) -> None:
    wanted = {field.name for field in fields(_module(op, "tuning").Choice)}
    table = json.loads((KERNELS / op / "tuning.json").read_text())
    assert set(table) <= {gpu.generation for gpu in GPUS.values()}
    for entries in table.values():
        for key, entry in entries.items():
            assert set(entry) <= wanted, key


class TestRulesFindFaults:
    def test_masked_load(self) -> None:
        good = ast.parse("plgpu.load(x.at[i], mask=m, other=0); plgpu.load(x.at[i]); json.load(file)")
        assert masked_loads_without_other(good) == []
        assert masked_loads_without_other(ast.parse("\ny = plgpu.load(x.at[i], mask=m)")) == [2]

    @pytest.mark.parametrize(
        "source",
        [
            "a @ b",
            "a @= b",
            "plgpu.dot(a, b)",
            "jnp.dot(a, b, precision=None)",
            "plgpu.dot(a, b, allow_tf32=True)",
            "jax.lax.dot_general(a, b, dims)",
        ],
    )
    def test_inexact_product(self, source: str) -> None:
        assert products_without_precision(ast.parse(source)) == [1]

    @pytest.mark.parametrize(
        "source", ["plgpu.dot(a, b, allow_tf32=False)", "jnp.dot(a, b, precision='highest')"]
    )
    def test_exact_product(self, source: str) -> None:
        assert products_without_precision(ast.parse(source)) == []

    @pytest.mark.parametrize(
        "source", ["pl.pallas_call(f)", "from jax.experimental.pallas import pallas_call"]
    )
    def test_pallas_call(self, source: str) -> None:
        assert pallas_calls(ast.parse(source)) == [1]
