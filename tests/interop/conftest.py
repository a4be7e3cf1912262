import pytest

from cumla.interop.ops import Op


@pytest.fixture
def calls(monkeypatch):
    """The names of the operations that call Python."""
    calls = []
    run = Op.run

    def counted(self, *args, **kwargs):
        calls.append(self.name)
        run(self, *args, **kwargs)

    monkeypatch.setattr(Op, "run", counted)
    return calls
