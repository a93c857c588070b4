"""Runs cases in batches, one compilation for many, and compares what comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import case_model
import case_programs
import jax
import jax.numpy as jnp
import numpy as np
from capabilities import BESIDE_FABRIC
from cases import Case
from faces import Face
from jax_capabilities import LEFT_TO_XLA
from rules import Rule, against

BATCH = 24  # Cases per program.
# Collectives are calls: what XLA makes of the arithmetic around them need not be fast.
OPTIONS = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
NATIVE = re.compile(
    r"stablehlo\.(?:all_reduce|all_gather|all_to_all|reduce_scatter|collective_\w+)\b"
    r"|custom_call @(?:\"[a-z]+-[a-z-]+-start\"|ragged_all_to_all)"
)


class ConformanceError(AssertionError):
    """A case did not do what the table says; the message names it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a case returned: types as JAX sees them, and the rows that this process holds."""

    types: dict[str, tuple[tuple[int, ...], str, bool]]
    rows: dict[str, dict[int, np.ndarray]]


def batches(cases: Iterable[Case], size: int = BATCH) -> list[list[Case]]:
    """Cases that can share a program: on one mesh, in types of one width."""
    return list(lazy_batches(cases, size))


def lazy_batches(cases: Iterable[Case], size: int = BATCH) -> Iterator[list[Case]]:
    """As `batches`, without ever holding all cases."""
    open_: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        mode = case.transform if case.transform in ("eager", "donated") else "jit"
        beside = bool(against((*BESIDE_FABRIC, *LEFT_TO_XLA), case))
        # JAX takes one shape of mesh per program.
        key = (case.mesh, case.axes == "line", mode, case.wide, beside)
        members = open_.setdefault(key, [])
        members.append(case)
        if len(members) == size:
            yield open_.pop(key)
    yield from open_.values()


def _inputs(batch: list[Case]) -> dict[str, tuple[jax.Array, jax.Array]]:
    return {
        _input_key(case): (
            case_programs.put(case, case_model.source(case)),
            case_programs.put(case, case_model.tangent(case)),
        )
        for case in {_input_key(case): case for case in batch}.values()
    }


def _input_key(case: Case) -> str:
    lay = case.layout
    return f"{lay.mesh} {lay.manual} {lay.vmapped} {lay.rows}"


def run(batch: list[Case], face: Face) -> dict[Case, Outcome]:
    """Runs cases that have the key of `batches` in common as one program.

    Raises:
        ConformanceError: on the fabric's faces, if the program has a collective of XLA's, or none
            of ours where there must be one.
    """
    programs = {case.name: case_programs.program(case, face.module) for case in batch}
    assert len(programs) == len(batch)

    def whole(inputs: dict[str, tuple[jax.Array, jax.Array]]) -> dict[str, Any]:
        return {case.name: programs[case.name](*inputs[_input_key(case)]) for case in batch}

    first = batch[0]
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(first.wide))
        stack.enter_context(face.context())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        warnings.filterwarnings("ignore", "jax.lax.p(send|recv) is deprecated")
        inputs = _inputs(batch)
        traced = jax.jit(whole, donate_argnums=0 if first.transform == "donated" else ()).trace(
            inputs
        )
        lowered = traced.lower()
        if face.beside is not None:
            _check_is_on_fabric(batch, lowered.as_text(), face.beside)
        results = whole(inputs) if first.transform == "eager" else lowered.compile(OPTIONS)(inputs)
        jax.block_until_ready(results)
    types = jax.tree.map(
        lambda a: (a.shape, str(a.dtype), a.weak_type),
        jax.tree.unflatten(jax.tree.structure(results), traced.jaxpr.out_avals),
    )
    return {
        case: Outcome(
            {k: types[case.name][k] for k in results[case.name]},
            {k: _rows(v) for k, v in results[case.name].items()},
        )
        for case in batch
    }


def _check_is_on_fabric(batch: list[Case], text: str, beside: tuple[Rule, ...]) -> None:
    names = ", or ".join(case.name for case in batch)
    found = sorted(set(NATIVE.findall(text)))
    # A vmap over the only axis is local arithmetic, and so is a group of one.
    communicating = [
        case
        for case in batch
        if case.layout.rows > 1 and any(axis != "v" for axis in case.layout.axes)
    ]
    helped = [case for case in communicating if against(beside, case)]
    if found and not any(against(beside, case) for case in batch):
        raise ConformanceError(f"XLA's own {found} in the program of {names}")
    if helped and not found:
        raise ConformanceError(f"nothing of XLA's, as it should be, in the program of {names}")
    needed = len(communicating) - len(helped)
    if (count := text.count("custom_call @jaxfabric_")) < needed:
        raise ConformanceError(f"only {count} of {needed} collectives on the fabric in {names}")


def _rows(y: jax.Array) -> dict[int, np.ndarray]:
    """Position to what the rank there got, of this process's ranks."""
    result: dict[int, np.ndarray] = {}
    for shard in y.addressable_shards:
        start = shard.index[0].start or 0
        for row, value in enumerate(np.asarray(shard.data)):
            result[start + row] = value
    return result


def compare(case: Case, outcome: Outcome) -> int:
    """Compares an outcome with the model; returns the number of rows that were compared."""
    wanted = case_model.expected(case)
    if outcome.rows.keys() != wanted.keys():
        raise ConformanceError(f"{case.name}: {sorted(outcome.rows)} instead of {sorted(wanted)}")
    compared = 0
    for name, want in wanted.items():
        if case.layout.vmapped:
            want = want.reshape(-1, case.layout.vmapped, *want.shape[1:])
        shape, dtype, _ = outcome.types[name]
        if (shape, dtype) != (want.shape, str(want.dtype)):
            raise ConformanceError(
                f"{case.name}: {name} is {dtype}{list(shape)} instead of "
                f"{want.dtype}{list(want.shape)}"
            )
        for position, got in outcome.rows[name].items():
            _assert_close(case, f"{name} of rank {position}", got, want[position])
            compared += 1
    if not compared:
        raise ConformanceError(f"{case.name}: no rank of this process has a result")
    return compared


def _assert_close(case: Case, what: str, got: np.ndarray, want: np.ndarray) -> None:
    try:
        tolerance = _tolerance(case, want.dtype)
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=0)
    except AssertionError as error:
        raise ConformanceError(f"{case.name}: {what}: {error}") from None


def _tolerance(case: Case, dtype: np.dtype) -> float:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    # Sums of small integers are exact; quotients, and what is computed from them, are not.
    exact = case.op not in ("pmean", "pmax", "pmin") or (
        case.op != "pmean" and case.transform not in case_model.DERIVATIVES
    )
    return 0 if exact else 16 * float(jnp.finfo(dtype).eps)


def equal(case: Case, ours: Outcome, stock: Outcome) -> None:
    """Compares with what jax.lax gave: types, weakness and values."""
    types, wanted = ours.types, stock.types
    if case.transform == "vmap_own_axis" or case.groups != "whole":
        # Weakness may get lost in local arithmetic, and in a maximum over groups.
        types, wanted = ({k: t[:2] for k, t in x.items()} for x in (types, wanted))
    if types != wanted:
        raise ConformanceError(f"{case.name}: {types} instead of jax.lax's {wanted}")
    for name, rows in stock.rows.items():
        for position, want in rows.items():
            _assert_close(
                case, f"{name} of rank {position} (jax.lax)", ours.rows[name][position], want
            )


def run_each(batch: list[Case], face: Face) -> dict[Case, Outcome]:
    """As `run`, but names the cases that cannot be made or run, one by one."""
    try:
        return run(batch, face)
    except Exception as error:
        failures = [] if len(batch) > 1 else [f"{face.name}: {batch[0].name}: {error!r}"]
        for case in batch if len(batch) > 1 else ():
            try:
                run([case], face)
            except Exception as own:
                failures.append(f"{face.name}: {case.name}: {type(own).__name__}: {own}")
        names = ", and ".join(case.name for case in batch)
        raise ConformanceError(
            "\n".join(failures) or f"{face.name}: each alone runs, together not: {names}"
        ) from error
