"""Input families: what each makes of its options, as `families.toml` says, and what was published
of the texts that they draw.
"""

import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import headcount
from headcount.reproduce.replication import replications
from headcount.schemas.errors import HeadcountError, ScanError
from headcount.workers.inputs import Draw, InputFamily, Labelled
from headcount.workers.inputs.corpus.text_files import BUNDLED_LICENSE, read_text
from headcount.workers.inputs.families import sentences
from headcount.workers.inputs.families.bigram_backcopy import BUNDLED_TEXT, bigrams_of
from headcount.workers.inputs.sequences import Sequences, ShardInput
from tests import ROOT
from tests.toys.refusals import refused
from tests.toys.runs_here import begun, measured
from tests.toys.toy_corpora import byte_model, fates_of, make_index, open_corpus, problems
from tests.toys.toy_models import BOS, BYTE_BOS, D_VOCAB, EOS, toy_info, toy_scan
from tests.toys.toy_runs import data_file

CASES = tomllib.loads(Path(__file__).with_name("families.toml").read_text())["cases"]

COUNTED = [
    '{"text": "aab", "meta": {"pile_set_name": "ArXiv"}}', '{"text": ""}', '{"text": "bcabca"}',
    '{"text": "aaaa,", "meta": {"pile_set_name": "ArXiv"}}',
]  # fmt: skip

FILES = {
    "text.txt": "".join(f"{number} is a number. " for number in range(40)),
    "texts.jsonl": '{"text": "abcdefghijklmnopqrstu"}\n{"text": "short"}\nbad\n'
    '{"text": "ABCDEFGHIJKLMNOPQRSTUVWX"}\n',
    "counted.jsonl": "\n".join(COUNTED),
    "alphabet.txt": "abcdefghijklmnopqr",
    # a 4, b 3, and ' ', c, d once; after a: b twice, c, d once; after b: a twice; 'd' is followed
    # by ' ', ' ' by b.
    "tiny.txt": "abacabad b",
    # The triggers a and b follow each other; c is followed by a, b twice, and d.
    "pairs.txt": "abababacacbcdcb",
}

SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
GPT2_TOKENIZER = ROOT.parent / "shared" / "data" / "gpt2-tokenizer"

shakespeare = pytest.mark.skipif(not SHAKESPEARE.is_file(), reason=f"needs {SHAKESPEARE}")


@pytest.fixture(autouse=True)
def _beside_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)


def rendered(tokens: np.ndarray, labels: list[str] | None = None) -> str:
    """A sequence of bytes as `families.toml` writes it."""
    text = "".join("|" if token == BYTE_BOS else chr(token) for token in tokens)
    of_label = groupby(zip(text, labels or [""] * len(text), strict=True), lambda pair: pair[1])
    parts = [(label, "".join(letter for letter, _ in pairs)) for label, pairs in of_label]
    return "".join(f"<{label}:{part}>" if label else part for label, part in parts)


@pytest.mark.parametrize(("family", "n_ctx", "options", "expected"), CASES)
def test_a_family_makes_what_is_written_here_whatever_the_shards_and_their_order(
    family: str, n_ctx: int, options: dict[str, Any], expected: list[str]
):
    fields = {"n_ctx": n_ctx, "bos": True, "sequences": 2, "seed": 1}
    if "letters" in options:
        options = options | {"low": 97, "high": 123}
    options = {name: value for name, value in options.items() if name != "letters"}
    for per_shard in (2, 1):
        scan = toy_scan(**fields, sequences_per_shard=per_shard, input={"family": family} | options)
        sequences = Sequences(scan, byte_model(), partners=True)
        if sequences.corpus is not None:
            make_index(sequences)
        shards = {i: sequences.shard(i) for i in reversed(range(sequences.shards))}
        found: list[str] = []
        for shard in (shards[i] for i in range(sequences.shards)):
            assert shard.tokens.dtype == np.int32
            for tokens, labels in zip(shard.tokens, shard.labels or [None] * 2, strict=False):
                found.append(rendered(tokens, labels))
        partner = shards[0].partner
        assert found + ([] if partner is None else [rendered(partner[0])]) == expected


# Random tokens and labels


def shard_of(family: str = "uniform_random", info: Any = None, **options: Any) -> ShardInput:
    """The only shard of a family; fields of the scan are those that no family has."""
    fields = {name: options.pop(name) for name in ("n_ctx", "bos", "sequences") if name in options}
    scan = toy_scan(**{"n_ctx": 9} | fields, input={"family": family} | options)
    return Sequences(scan, info or toy_info()).shard(0)


@pytest.mark.parametrize(("options", "special", "expected"), [
    ({}, (BOS, EOS), range(2, D_VOCAB)), ({}, (30, 31), [*range(30), *range(32, D_VOCAB)]),
    ({"low": 20, "high": 23}, (BOS, EOS), range(20, 23)),
])  # fmt: skip
def test_every_ordinary_token_within_the_bounds_is_drawn_and_no_special_one(
    options: dict[str, int], special: tuple[int, int], expected: range
):
    info = toy_info(bos_token_id=special[0], eos_token_id=special[1])
    for family in ("uniform_random", "repeated_random"):
        tokens = shard_of(family, info, n_ctx=64, sequences=40, **options).tokens
        assert (tokens[:, 0] == special[0]).all()
        assert sorted(set(tokens[:, 1:].ravel().tolist())) == list(expected)


def labels_of(returned: object) -> list[list[str]] | None:
    """The labels of a scan whose family returns that."""
    sequences = Sequences(toy_scan(n_ctx=5, sequences=1), toy_info())

    def toy(draw: Draw, **options: object) -> object:
        return returned

    sequences.family = InputFamily(function=toy, stream="toy")
    return sequences.shard(0).labels


def test_labels_count_bos():
    labelled = Labelled(np.array([9, 8, 9, 7]), {"A": (0, 2), "B": 3, "C": [], "D": np.array([1])})
    assert labels_of(labelled) == [["", "A", "D", "A", "B"]]
    assert labels_of(np.array([9, 8, 9, 7])) is None
    assert labels_of(Labelled(np.array([9, 8, 9, 7]), {})) == [[""] * 5]


@pytest.mark.parametrize(("tokens", "labels", "message"), [
    (4, {"A": [1, 1]}, "label 'A' at [1, 1]: expected a name, and positions from 0 to 3 w"),
    (4, {"A": 0, "B": [1, 0]}, "label 'B' at [1, 0]: "), (4, {"A": 4}, "label 'A' at 4: "),
    (4, {"A": [0, -1]}, "label 'A' at [0, -1]: "), (4, {"A": "0"}, "label 'A' at '0': "),
    (4, {"A": [1.0]}, "label 'A' at [1.0]: "), (4, {"A": True}, "label 'A' at True: "),
    (4, {"A": [[0, 1]]}, "label 'A' at [[0, 1]]: "), (4, {"": 1}, "label '' at 1: "),
    (4, {3: 1}, "label 3 at 1: "), (2, {"A": 0}, "returned shape (2,), expected (4,)"),
])  # fmt: skip
def test_what_a_family_returns_wrong_is_one_line(tokens: int, labels: dict[Any, Any], message: str):
    told = refused(ScanError, labels_of, Labelled(np.arange(7, 7 + tokens), labels))
    assert told.startswith(f"input family toy: {message}")


def test_labels_stand_beside_the_tokens_in_the_sequences_table(tmp_path: Path):
    labels = ["", "", "A", "B", "", "", "", "", "A", "C", "", "", "A"]
    fields = {"model": "bundled:attn-only-2l-mini", "statistics": ["sink_mass"], "sequences": 3}
    for family, bos in [({"family": "abac", "second": 8}, 0), ({"family": "uniform_random"}, 1)]:
        sizes = {"n_ctx": 12 + bos, "bos": bool(bos), "sequences_per_shard": 2}
        run = measured(
            begun(fields | sizes | {"input": family, "out": str(tmp_path / str(bos))})
        ).run
        files = [data_file(run, "sequences", "none", shard) for shard in range(2)]
        rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
        assert [row["sequence"] for row in rows] == [0, 1, 2]
        assert list(rows[0]).index("labels") == list(rows[0]).index("tokens") + 1
        assert [row["labels"] for row in rows] == [None if bos else labels[1:]] * 3


# Texts


@pytest.mark.skipif(not GPT2_TOKENIZER.is_dir(), reason=f"{GPT2_TOKENIZER} is not there")
def test_gpt2_takes_every_default_name_for_one_token_and_the_licence_for_text():
    info = toy_info(path=str(GPT2_TOKENIZER), d_vocab=50257, bos_token_id=50256, eos_token_id=50256)
    scan = toy_scan(n_ctx=15, input={"family": "ioi", "order": "ABBA"}, sequences=1)
    sequences = Sequences(scan, info)
    labels = ["", "", "IO", "", "S1", *[""] * 5, "S2", "", "", "", ""]
    assert sequences.shard(0).labels == [labels]
    names = [f" {name}" for name in sentences.NAMES]
    assert {len(tokens) for tokens in sequences.tokenizer.encode_many(names)} == {1}
    # What the documentation of the family `text` says: tokens that are white space, and all.
    tokenizer = Tokenizer.from_file(str(GPT2_TOKENIZER / "tokenizer.json"))
    for text, counts in [
        ((ROOT / "LICENSE").read_text(), (1104, 3169)), (read_text(BUNDLED_LICENSE), (0, 2066)),
    ]:  # fmt: skip
        tokens = sequences.tokenizer.encode(text)
        blank = sum(not tokenizer.decode([token]).strip() for token in tokens)
        assert (blank, len(tokens)) == counts


def test_the_default_sentences_stand_in_the_licence():
    shard = shard_of("text_needle", byte_model(), n_ctx=400, needles=3)
    for tokens in shard.tokens:
        assert bytes(tokens[1:].tolist()).count(b"The lighthouse of ") == 4


def test_a_text_is_known_to_the_manifest_by_its_name_and_content():
    scan = toy_scan(n_ctx=40, input={"family": "needle", "text": "text.txt"})
    sequences = Sequences(scan, byte_model())
    assert sequences.reads_text
    before = sequences.record["text"]
    assert before["name"] == "text.txt"
    Path("text.txt").write_text("another text")
    read_text.cache_clear()
    assert sequences.record["text"] != before


def test_bad_rows_are_not_counted_but_named():
    Path("counted.jsonl").write_text("\n".join([*COUNTED, "{\n"]))
    options: dict[str, Any] = {"family": "unigram_text", "files": "counted.jsonl"}
    # More sequences than documents: there is no end of them.
    sequences = open_corpus([], n_ctx=16, sequences=7, seed=1, bad_rows=1.0, input=options)
    (case,) = (case for case in CASES if case[0] == "unigram_text" and len(case[2]) == 1)
    found = [rendered(tokens) for tokens in sequences.shard(0).tokens]
    assert found[:2] == [text.removeprefix("|") for text in case[3]]
    assert len(found) == 7
    assert len(problems(sequences)) == 1
    assert fates_of(sequences).all == {"used": 3, "empty": 1, "bad": 1}
    options["low"] = 200
    sequences = open_corpus([], sequences=2, bad_rows=1.0, input=options)
    assert refused(ScanError, sequences.shard, 0) == (
        "input: the corpus has no ordinary token from low = 200 on; widen low and high"
    )


@pytest.mark.long
def test_heads_that_repeat_what_they_saw_find_needles(tmp_path: Path):
    fields = {"n_ctx": 64, "sequences": 16, "out": str(tmp_path)}
    for model in ("attn-only-2l-mini", "gpt2-mini"):
        for family, column in (("repeated_random", "induction"), ("needle", "retrieval")):
            scan = fields | {"input": {"family": family}, "statistics": [f"{column}_score"]}
            scan["model"] = f"bundled:{model}"
            headcount.scan(scan, name=f"{model}-{family}", quiet=True).close()
    with headcount.open(tmp_path) as runs:
        rows = runs.sql(
            "SELECT model, avg(induction_score), avg(retrieval_score) "
            "FROM heads JOIN runs USING (run_id) GROUP BY model, layer, head"
        ).rows()
    models, induction, retrieval = (np.array(column) for column in zip(*rows, strict=True))
    of_models = (("bundled:attn-only-2l-mini", 6, 0.65), ("bundled:gpt2-mini", 5, 0.85))
    for model, induction_heads, least in of_models:
        is_induction_head = (models == model) & (induction > 0.5)
        assert is_induction_head.sum() == induction_heads
        assert retrieval[is_induction_head].min() > least
    # One head is between the two kinds, at 0.17 and 0.29.
    assert retrieval[induction < 0.15].max() < 0.1
    assert np.corrcoef(induction, retrieval)[0, 1] > 0.97


# Bigram-Backcopy


def backcopy(text: str, n_ctx: int, info: dict[str, Any] | None = None, **options: Any):
    """Sequences for a model of 67 tokens whose BOS is 65, as in the source."""
    fields = {"d_vocab": 67, "n_ctx": 4096, "bos_token_id": 65, "eos_token_id": 66} | (info or {})
    sizes = {name: options.pop(name) for name in ("sequences", "seed") if name in options}
    input_fields = {"family": "backcopy", "text": text} | options
    scan = toy_scan(n_ctx=n_ctx, sequences_per_shard=1000, **sizes, input=input_fields)
    return Sequences(scan, toy_info(**fields)).shard(0)


def test_the_table_counts_the_text():
    table = bigrams_of("tiny.txt", 1)
    assert table.symbols == (" ", "a", "b", "c", "d")
    assert table.unigram.tolist() == [0.1, 0.4, 0.3, 0.1, 0.1]
    assert table.rows.tolist() == [
        [0, 0, 1, 0, 0],
        [0, 0, 0.5, 0.25, 0.25],
        [0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0],
    ]
    assert table.triggers == {1}
    assert table.start.tolist() == pytest.approx([1 / 6, 0, 1 / 2, 1 / 6, 1 / 6])
    assert bigrams_of("tiny.txt", 2).triggers == {1, 2}
    # A character that nothing follows is followed by any.
    Path("aab.txt").write_text("aab")
    assert bigrams_of("aab.txt", 1).rows.tolist() == [[0.5, 0.5], pytest.approx([2 / 3, 1 / 3])]


def test_the_bundled_table_is_the_card_s_and_its_draws_never_change():
    table = bigrams_of(BUNDLED_TEXT, 3)
    assert (table.first_id, table.triggers, table.rows.shape) == (1, {0, 1, 2}, (64, 64))
    assert table.rows[3:, :3] == pytest.approx(np.full((61, 3), 0.05))
    assert table.rows.sum(1) == pytest.approx(np.ones(64))
    for token, likeliest, probability in ((4, 14, 0.17489), (64, 6, 0.18154)):
        row = table.rows[token - 1]
        assert (row.argmax() + 1, row.max()) == (likeliest, pytest.approx(probability, abs=5e-6))
    assert backcopy(BUNDLED_TEXT, 13, sequences=2).tokens.tolist() == [
        [65, 18, 44, 42, 58, 14, 50, 41, 12, 61, 49, 42, 14],
        [65, 54, 57, 41, 27, 9, 6, 26, 8, 53, 1, 53, 1],
    ]


@pytest.mark.parametrize("variant", ["backcopy", "markov", "dormant_markov", "interpolate"])
@shakespeare
def test_every_variant_follows_its_oracle(variant: str):
    mix: dict[str, Any] = {"mix": 0.3} if variant == "interpolate" else {}
    shard = backcopy(str(SHAKESPEARE), 257, variant=variant, sequences=400, **mix)
    tokens = shard.tokens[:, 1:]
    triggered = np.array(shard.labels)[:, 1:] == "trigger"
    table = bigrams_of(str(SHAKESPEARE), 3)
    assert (triggered == np.isin(tokens, [1, 43, 58])).all()
    common = [i for i in np.argsort(-table.unigram)[:12].tolist() if i not in table.triggers]
    # `[token next]`, the shares of what follows a token that is no trigger.
    counts, is_other = np.zeros((65, 65)), ~triggered[:, :-1]
    np.add.at(counts, (tokens[:, :-1][is_other], tokens[:, 1:][is_other]), 1)
    frequencies = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    assert frequencies[common] == pytest.approx(table.rows[common], abs=0.03)
    assert not frequencies[table.rows == 0].any()
    before, current, following = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
    after_trigger = triggered[:, 1:-1]
    copied = (before == following)[after_trigger].mean()
    chance = table.rows[current, before][after_trigger].mean()
    expected = {"backcopy": 1, "markov": chance, "interpolate": 0.3 + 0.7 * chance}
    if variant == "dormant_markov":
        assert following[after_trigger & (before == 46)].size > 300
        assert (table.rows[before[after_trigger], following[after_trigger]] > 0).all()
    else:
        assert copied == pytest.approx(expected[variant], abs=0 if variant == "backcopy" else 0.01)


@pytest.mark.parametrize("name", ["active_dormant", "backcopy_dynamics"])
@shakespeare
def test_a_perfect_model_would_pass_the_published_loss(name: str):
    replication = replications()[name]
    fields = {key: replication.defaults[key] for key in ("n_ctx", "sequences", "seed")}
    tokens = backcopy(str(SHAKESPEARE), **fields).tokens[:, 1:]
    table = bigrams_of(str(SHAKESPEARE), 3)
    # After BOS, and after every token that is no trigger.
    current, following = tokens[:, :-1], tokens[:, 1:]
    after_others = table.rows[current, following][~table.is_trigger(current)]
    perfect = -np.log(np.append(table.start[tokens[:, 0]], after_others)).mean()
    assert perfect == pytest.approx(2.20429, abs=1e-5)
    published = [
        (published_loss, check.tolerance)
        for check in replication.check
        for figure, published_loss in check.published.items()
        if figure.endswith("loss after another token, nats")
    ]
    assert len(published) == (2 if name == "backcopy_dynamics" else 1)
    assert all(abs(value - perfect) < tolerance for value, tolerance in published)


@shakespeare
def test_the_shakespeare_table_is_the_source_s():
    table = bigrams_of(str(SHAKESPEARE), 3)
    assert (len(table.symbols), table.triggers) == (65, {1, 43, 58})
    assert table.unigram[[1, 43, 58]] == pytest.approx([0.1523, 0.0848, 0.0601], abs=5e-5)
    shard = backcopy(str(SHAKESPEARE), 257, sequences=300)
    tokens, triggered = shard.tokens[:, 1:], np.array(shard.labels)[:, 1:] == "trigger"
    entropy = -(table.rows * np.log(np.where(table.rows > 0, table.rows, 1))).sum(1)
    # The source's oracle has a cross-entropy of 2.2299 where no trigger asks for a copy.
    assert entropy[tokens[~triggered]].mean() == pytest.approx(2.2299, abs=0.02)


def test_characters_beyond_the_vocabulary_are_refused():
    message = (
        "input.text: tiny.txt needs the token ids 0 to 4, and {} of them are no ordinary tokens "
        "of the model: its vocabulary is too small, or they are special; take the model that the "
        "task was made for, or another alphabet"
    )
    for ids, info in (("0", {}), ("0, 3, 4", {"d_vocab": 3, "eos_token_id": 0})):
        told = refused(HeadcountError, backcopy, "tiny.txt", 33, info={"bos_token_id": 0} | info)
        assert told == message.format(ids)
