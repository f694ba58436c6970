"""What a call is refused with."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[Exception], call: Callable[..., object], *values: Any, **named: Any) -> str:
    """The one line of the error that a call raises."""
    with pytest.raises(error) as caught:
        call(*values, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)
