import pytest


@pytest.fixture
def in_order(monkeypatch):
    """Products sum over the inner dimension in order, as on a GPU; those of numpy sum in an order that rows change."""
    from triton.runtime import interpreter

    def create_dot(_builder, a, b, sums, *_):
        total = sums.data.copy()
        for column, row in zip(a.data.T, b.data, strict=True):
            total += column.astype(total.dtype)[:, None] * row.astype(total.dtype)
        return interpreter.TensorHandle(total, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
