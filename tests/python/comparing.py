"""Comparisons that tests make of what ranks have returned."""

from __future__ import annotations

from typing import Any

import torch


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=tolerance, atol=tolerance)
