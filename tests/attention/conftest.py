"""The conformance suite runs once per implementation."""

import pytest

from jaxmagi import _native


@pytest.fixture(params=["ffi", "xla"])
def implementation(request: pytest.FixtureRequest) -> str:
    """ "ffi" (skipped where the compiled extension is missing) and "xla"."""
    if request.param == "ffi" and not _native.has_handler("jaxmagi_attention_forward", "cpu"):
        pytest.skip("the compiled extension jaxmagi._cpu is missing")
    return request.param
