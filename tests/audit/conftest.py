"""What the tests of the audit share."""

import pytest

from fp8flax._audit import auditing


@pytest.fixture
def texts(monkeypatch):
    """Returns the list of the programs that are audited."""
    found, parse = [], auditing.parse
    monkeypatch.setattr(auditing, "parse", lambda text: found.append(text) or parse(text))
    return found
