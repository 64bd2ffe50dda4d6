"""Maps with a low-rank adapter beside them: the closed forms against the merged matrix."""

import torch

from dampen.functional.explicit.layers import LowRank
from dampen.functional.explicit.squares import column_power


def test_the_closed_form_of_columns_and_output():
    torch.manual_seed(0)
    w, x = torch.randn(5, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    parts = tuple((torch.randn(2, 7).double(), torch.randn(5, 2).double(), s) for s in (0.5, 3.0))
    low = LowRank(parts)
    merged = w + sum(s * b @ a for a, b, s in parts)
    torch.testing.assert_close(low.merged(w), merged)
    torch.testing.assert_close(low.columns(w), column_power(merged))
    torch.testing.assert_close(x @ w.t() + low.output(x), x @ merged.t())
    torch.testing.assert_close(low.rows(slice(1, 3)).merged(w[1:3]), merged[1:3])
