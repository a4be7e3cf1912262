import pytest

from cumla.interop.ops import Op


@pytest.fixture
def calls(monkeypatch):
    """The names of the operations that call Python."""
    calls = []
    write = Op.write

    def counted(self, *args, **kwargs):
        calls.append(self.name)
        write(self, *args, **kwargs)

    monkeypatch.setattr(Op, "write", counted)
    return calls
