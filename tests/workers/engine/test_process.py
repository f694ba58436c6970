"""What belongs to a whole process is set once, and making or running a replica leaves it alone."""

import csv
import gc
import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers.utils import logging as messages

from headcount.schemas.process import OBJECTS_BETWEEN_COLLECTIONS
from headcount.workers import process
from headcount.workers.model.info.description import describe
from headcount.workers.process import CSV_FIELD_CHARACTERS, prepare_process
from headcount.workers.replica import Replica
from tests import ROOT
from tests.toys import toy_models as toy


def settings() -> dict[str, Any]:
    """What of a process others can notice."""
    return {
        "threads": torch.get_num_threads(),
        "csv": csv.field_size_limit(),
        "garbage": gc.get_threshold(),
        "transformers": messages.get_verbosity(),
        "bars": messages.is_progress_bar_enabled(),
        "transformer_lens": logging.getLogger("transformer_lens").level,
    }


def test_a_replica_changes_nothing_but_itself(
    shelf: toy.Shelf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = shelf.path("gpt2")
    monkeypatch.setattr(process, "keep_freed_memory", lambda: pytest.fail("malloc was set"))
    before = settings()
    replica = Replica(describe(path), toy.toy_scan(model=str(path)), "cpu")
    replica.measure(toy.repeating_tokens(8))
    assert settings() == before
    assert capfd.readouterr() == ("", "")


def test_a_process_is_prepared_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()
    limit = csv.field_size_limit(7)
    gc.set_threshold(700)
    messages.set_verbosity_info()
    # `enable_progress_bar` warns that the environment forbids it.
    monkeypatch.setattr(messages, "_tqdm_active", True)
    threads = torch.get_num_threads()
    try:
        prepare_process(threads=3)
        assert torch.get_num_threads() == 3
        assert csv.field_size_limit() == CSV_FIELD_CHARACTERS == limit
        assert gc.get_threshold()[0] == OBJECTS_BETWEEN_COLLECTIONS
        assert messages.get_verbosity() == logging.ERROR
        assert not messages.is_progress_bar_enabled()
    finally:
        prepare_process(threads)
    assert settings() == before


@pytest.mark.long
def test_libraries_that_are_imported_later_are_as_quiet() -> None:
    script = """
import json, sys
from headcount.workers.process import prepare_process
prepare_process()
imported = "transformers" in sys.modules
import huggingface_hub.utils
from transformers.utils import logging
quiet = huggingface_hub.utils.are_progress_bars_disabled() and not logging.is_progress_bar_enabled()
print(json.dumps([imported, quiet, logging.get_verbosity()]))
"""
    unset = ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    printed = subprocess.check_output(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, text=True
    )
    assert json.loads(printed) == [False, True, logging.ERROR]
