"""docs/conformance.md is what the rules say."""

import conformance_doc
import pytest

pytestmark = pytest.mark.timeout(60)


def test_page_is_up_to_date():
    command = "python tests/conformance/conformance_doc.py --write"
    assert conformance_doc.PATH.read_text() == conformance_doc.text(), f"stale: {command}"
