"""The examples in the docstrings of jaxfabric.lax do what they say, on four devices."""

import doctest

import jax
import jax.numpy as jnp
import pytest

import jaxfabric
from jaxfabric import lax


@pytest.mark.parametrize("op", lax.__all__)
def test_example(op):
    names = {"jax": jax, "jnp": jnp, "jaxfabric": jaxfabric}
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(lax, op), op, globs=names)
    assert test.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
