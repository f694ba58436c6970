"""What belongs to a whole process is set once, and making or running a replica leaves it alone."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as messages

from tests import toy_models as toy
from workers import process
from workers.model.model_info import describe
from workers.process import CSV_FIELD_CHARACTERS, prepare_process
from workers.replica import Replica


def settings() -> dict[str, Any]:
    """What of a process others can notice."""
    return {
        "threads": torch.get_num_threads(),
        "csv": csv.field_size_limit(),
        "transformers": messages.get_verbosity(),
        "bars": messages.is_progress_bar_enabled(),
        "transformer_lens": logging.getLogger("transformer_lens").level,
    }


def test_a_replica_changes_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = toy.save_model(tmp_path / "gpt2", toy.gpt2())
    monkeypatch.setattr(process, "keep_freed_memory", lambda: pytest.fail("malloc was set"))
    before = settings()
    replica = Replica(describe(path), toy.toy_scan(model=str(path)), "cpu")
    replica.measure(toy.repeating_tokens(8))
    assert settings() == before
    assert capfd.readouterr() == ("", "")


def test_a_process_is_prepared_once_for_all() -> None:
    before = settings()
    limit = csv.field_size_limit(7)
    messages.set_verbosity_info()
    messages.enable_progress_bar()
    threads = torch.get_num_threads()
    try:
        prepare_process(threads=3)
        assert torch.get_num_threads() == 3
        assert csv.field_size_limit() == CSV_FIELD_CHARACTERS == limit
        assert messages.get_verbosity() == logging.ERROR
        assert not messages.is_progress_bar_enabled()
    finally:
        prepare_process(threads)
    assert settings() == before
