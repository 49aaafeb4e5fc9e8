"""What the tests of the audit share."""

import pytest

from fp8flax._audit import auditing


@pytest.fixture
def texts(monkeypatch):
    """Returns the list of the programs that are audited."""
    found, read = [], auditing.read
    monkeypatch.setattr(auditing, "read", lambda text: found.append(text) or read(text))
    return found
