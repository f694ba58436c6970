"""The GPU's sweep answers what the definitions say, and compiles for a GPU.

What it answers is tested on a GPU where there is one, and everywhere in Triton's interpreter, which
is chosen before triton is imported and therefore has a process of its own.
"""

import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.workers.engine.tile_sweep import Swept
from headcount.workers.engine.token_pairs import TokenPairs, find_matches
from headcount.workers.kernel import sweep_kernel as kernel
from headcount.workers.kernel.kernel_check import ALLOWED, DRAWN_FACTS, PLAIN, Shape, compare
from headcount.workers.kernel.sweep_kernel import available, sweep
from headcount.workers.model.attention_facts import AttentionFacts
from tests import ROOT
from tests.reference.attention_answers import defined_answers

triton = pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


def answers_of(swept: Swept) -> dict[str, Tensor]:
    answers = {"z": swept.z, "lse": swept.lse, "distance": swept.distance}
    answers |= {} if swept.entropy is None else {"entropy": swept.entropy}
    return answers | {f"mass {i}": mass for i, mass in enumerate(swept.masses)}


def swept_in_float32(
    q: Tensor, k: Tensor, v: Tensor, scale: float, labels: Sequence[TokenPairs] = ()
) -> Swept:
    facts = AttentionFacts(scale)
    return sweep(q, k, v, facts, labels, entropy=True, number_format="float32")


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    labels: Sequence[TokenPairs],
    atol: float = 5e-6,
    **other_tolerances: float,
) -> Swept:
    """Sweep, and compare every answer with its definition, to 1e-5 and `atol`; some have others."""
    swept = swept_in_float32(q, k, v, scale, labels)
    answers = answers_of(swept)
    definitions = defined_answers(q, k, v, AttentionFacts(scale), labels)
    assert list(answers) == list(definitions)
    for name, answer in answers.items():
        assert answer.dtype == torch.float32
        torch.testing.assert_close(
            answer.double(),
            definitions[name],
            rtol=1e-5,
            atol=other_tolerances.get(name, atol),
            msg=lambda m, n=name: f"{n}: {m}",
        )
    assert swept.entropy is not None
    assert (swept.entropy >= 0).all()
    return swept


def random_qkv(
    batch: int, heads: int, kv_heads: int, n_ctx: int, d_head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as a model has them: views of a projection `[batch pos 3·head d_head]`."""
    generator = torch.Generator().manual_seed(n_ctx)
    projected = torch.randn(batch, n_ctx, heads + 2 * kv_heads, d_head, generator=generator)
    q, k, v = projected.to(DEVICE).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    return q, k, v


def match_labels(tokens: Tensor) -> Sequence[TokenPairs]:
    return list(find_matches(tokens).values())


def random_tokens(batch: int, n_ctx: int) -> Tensor:
    generator = torch.Generator().manual_seed(n_ctx)
    return torch.randint(5, (batch, n_ctx), generator=generator).to(DEVICE)


class TestSweep:
    __test__ = INTERPRETED or DEVICE == "cuda"

    @pytest.mark.parametrize(
        ("n_ctx", "batch", "heads", "kv_heads", "d_head"),
        [
            # One tile of keys and less, exactly two, and more than four.
            *((n_ctx, 2, 2, 1, 24) for n_ctx in (1, 2, 17, 64, 130)),
            *((n_ctx, 1, 4, 2, 64) for n_ctx in (17, 130)),
            *((35, 1, 1, 1, d_head) for d_head in (1, 65, 80, 128, 200, 256)),
        ],
        ids=str,
    )
    def test_every_answer_is_its_definition(
        self, n_ctx: int, batch: int, heads: int, kv_heads: int, d_head: int
    ) -> None:
        q, k, v = random_qkv(batch, heads, kv_heads, n_ctx, d_head)
        swept = check(q, k, v, d_head**-0.5, match_labels(random_tokens(batch, n_ctx)))
        assert swept.z.transpose(1, 2).is_contiguous()

    def test_any_strides(self) -> None:
        torch.manual_seed(0)
        q, k, v = (torch.randn(n, 24, 2, 70, device=DEVICE).permute(2, 0, 3, 1) for n in (4, 2, 2))
        check(q, k, v, 0.2, match_labels(random_tokens(2, 70)))
        check(q, k[:, :1].expand(2, 4, 70, 24), v[:1, 1:].expand(2, 4, 70, 24), 0.2, [])
        wide = torch.randn(2, 2, 70, 96, device=DEVICE)
        check(wide[..., ::2], wide[..., 1::2], wide[..., :48].contiguous(), 0.2, [])

    @pytest.mark.parametrize("d_head", [24, 72])
    def test_nothing_beyond_the_tensors_is_read(self, d_head: int) -> None:
        storage = torch.full((3, 1, 1, 100, d_head + 8), torch.nan, device=DEVICE)
        storage[..., :97, :d_head] = torch.stack(random_qkv(1, 1, 1, 97, d_head))
        q, k, v = storage[..., :97, :d_head]
        check(q, k, v, 0.2, match_labels(random_tokens(1, 97)))

    def test_labels_choose_the_members(self) -> None:
        n_ctx = 97
        zeros = torch.zeros(2, 1, n_ctx, 8, device=DEVICE)
        unique = torch.arange(n_ctx, device=DEVICE).int().repeat(2, 1)
        negative = torch.full((2, n_ctx), -1).int().to(DEVICE)
        constant = torch.full_like(unique, 3)
        q = torch.arange(n_ctx, device=DEVICE)
        one, no_key = torch.ones_like(q), torch.zeros_like(q)
        # Labels, and how many keys are members for each query.
        members = [
            (TokenPairs("", unique, unique, 0), one),
            (TokenPairs("", unique, unique, 1), no_key),
            # A negative label fits nothing, itself included.
            (TokenPairs("", negative, negative, 0), no_key),
            (TokenPairs("", unique, negative, 0), no_key),
            # Lags within a tile and beyond it.
            (TokenPairs("", constant, constant, -2), q + 1),
            (TokenPairs("", constant, constant, 2), q - 1),
            (TokenPairs("", constant, constant, 40), q - 39),
            (TokenPairs("", constant, constant, 96), q - 95),
            (TokenPairs("", constant, constant, 200), no_key),
        ]
        swept = check(zeros, zeros, zeros, 1.0, [labels for labels, _ in members])
        for mass, (_, count) in zip(swept.masses, members, strict=True):
            torch.testing.assert_close(mass[1, 0], count.clamp(min=0) / (q + 1.0))

    def test_only_what_was_requested_is_answered(self) -> None:
        q, k, v = random_qkv(1, 2, 2, 50, 8)
        labels = match_labels(random_tokens(1, 50))
        facts = AttentionFacts(0.3)
        full = answers_of(swept_in_float32(q, k, v, 0.3, labels))
        for entropy, requested in ((False, []), (True, []), (False, labels[:1]), (False, labels)):
            swept = sweep(q, k, v, facts, requested, entropy=entropy, number_format="float32")
            assert (swept.entropy is None) != entropy
            assert len(swept.masses) == len(requested)
            for name, answer in answers_of(swept).items():
                torch.testing.assert_close(answer, full[name], rtol=0, atol=0)

    @pytest.mark.parametrize("order", ["rising", "falling", "random"])
    def test_scores_of_ten_thousand_cost_nothing_but_their_own_rounding(self, order: str) -> None:
        # Integers in base 2, so that the scores are exact and any loss is the sweep's own: two or
        # three near each other.
        steps = torch.arange(130) // 3 * 473.0 - 10_000 + torch.arange(130) % 3
        shuffled = torch.randperm(130, generator=torch.Generator().manual_seed(0))
        steps = {"rising": steps, "falling": steps.flip(0), "random": steps[shuffled]}[order].to(
            DEVICE
        )
        assert -1e4 <= steps.min() < -9e3
        assert steps.max() > 9e3
        k = torch.stack([steps, steps], -1)[None, None]
        q = torch.full((1, 1, 130, 2), 0.5, device=DEVICE)
        v = torch.randn(1, 1, 130, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        check(q, k, v, math.log(2), match_labels(random_tokens(1, 130)), atol=1e-6)

    @pytest.mark.parametrize(
        ("q_size", "k_size", "v_size"),
        # float16 holds 6e-8 to 65504, of which only those above 6e-5 have all their bits.
        [(1e6, 1e-6, 1e6), (1e-7, 1e7, 1e-7), (1e-12, 1e5, 1e12), (0.0, 1.0, 0.0)],
        ids=str,
    )
    def test_split_factors_of_any_size(self, q_size: float, k_size: float, v_size: float) -> None:
        q, k, v = random_qkv(2, 2, 1, 70, 24)
        # The second sequence is a million times as small: each head has a scaling of its own.
        smaller = torch.tensor([1.0, 1e-6], device=DEVICE)[:, None, None, None]
        swept = check(
            q * q_size, k * k_size * smaller, v, 0.3, match_labels(random_tokens(2, 70)), atol=1e-5
        )
        z = swept_in_float32(q * q_size, k * k_size * smaller, v * v_size * smaller, 0.3).z
        torch.testing.assert_close(z, swept.z * v_size * smaller, rtol=1e-5, atol=2e-6 * v_size)

    def test_three_products_of_halves_have_the_error_of_float32(self) -> None:
        # A few numbers of a head are far above the others, as in trained models.
        q, k, v = random_qkv(1, 2, 2, 130, 64)
        outliers = torch.ones(64, device=DEVICE)
        outliers[[3, 40]] = torch.tensor([200.0, 0.002], device=DEVICE)
        k, v = k * outliers, v * outliers
        q = q / outliers
        swept = swept_in_float32(q, k, v, 0.125)
        exact = defined_answers(q, k, v, AttentionFacts(0.125), [])
        in_float32 = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.125
        )
        error = (swept.z - exact["z"]).abs().amax((0, 1, 2))
        # In proportion to each component's size, however small beside the largest of the head.
        sizes = v.abs().amax((0, 1, 2))
        assert (error / sizes).max() < 2e-6
        assert error.max() < 4 * (in_float32 - exact["z"]).abs().max() + 1e-6
        assert (swept.lse - exact["lse"]).abs().max() < 3e-6

    @pytest.mark.parametrize("height", [10.0, 20.0, 88.0, 200.0, 1e4])
    def test_the_entropy_of_nearly_one_key_is_never_negative(self, height: float) -> None:
        q, k, v = random_qkv(1, 1, 1, 130, 8)
        q = torch.nn.functional.pad(q[..., 1:] / 100, (1, 0), value=1.0)
        k = torch.nn.functional.pad(k[..., 1:] / 100, (1, 0))
        k[:, :, [0, 70], 0], k[:, :, 100, 0] = height, 2 * height
        rounding = 5e-6 + height * 2e-7
        labels = match_labels(random_tokens(1, 130))
        check(q, k, v, 1.0, labels, atol=rounding, distance=130 * rounding)

    def test_a_short_distance_is_as_precise_as_a_long_one(self) -> None:
        # Scores rise by 16 a key, so nearly all attention is on the query itself.
        k = 16 * torch.arange(130.0, device=DEVICE)[None, None, :, None]
        scale = math.log(2)
        distance = swept_in_float32(torch.ones_like(k), k, k, scale).distance
        facts = AttentionFacts(scale)
        definitions = defined_answers(torch.ones_like(k), k, k, facts, [])["distance"]
        assert 0 < definitions[0, 0, 1:].max() < 2e-5
        torch.testing.assert_close(distance.double(), definitions, rtol=2e-6, atol=0)

    # The interpreter keeps bfloat16 as integers, and would multiply those.
    @pytest.mark.parametrize("factors", [f for f in ALLOWED if not INTERPRETED or f[0] != "b"])
    def test_it_agrees_with_the_tiles_as_first_contact_demands(self, factors: str) -> None:
        shapes = (Shape(2, 2, 97, 24), Shape(4, 1, 37, 64), Shape(1, 1, 130, 128))
        layers = [(shape, PLAIN) for shape in shapes]
        # Two tiles of queries, of which the second sees no key of the first tile of keys.
        layers += [(Shape(3, 1, 70, 8, d_v=5), facts) for facts in DRAWN_FACTS[1:]]
        for shape, facts in layers:
            comparison = compare(sweep, shape, factors, torch.device(DEVICE), facts)
            assert comparison.agrees, comparison

    def test_errors_name_what_arrived(self) -> None:
        q, k, v = random_qkv(1, 4, 2, 7, 8)
        label = torch.zeros(1, 7, dtype=torch.int32)

        def refused(match: str, *qkv: Tensor, labels: Sequence[TokenPairs] = ()) -> None:
            with pytest.raises(ModelError, match=match):
                swept_in_float32(qkv[0], qkv[1], qkv[2], 1.0, labels)

        refused(r"\[1, 2, 6, 8\].*expected q, k, v \[batch", q, k[:, :, 1:], v[:, :, 1:])
        refused("multiple of k's", q[:, :3], k, v)
        refused("and v's d_head", q, k[..., 1:], v)
        refused("d_head 257: the kernel takes at most 256", *[torch.zeros(1, 1, 2, 257)] * 3)
        refused("float64", q.double(), k.double(), v.double())
        refused("float16", q, k.half(), v.half())
        refused("int64", q, k, v, labels=[TokenPairs("", label.long(), label, 0)])
        shorter = [TokenPairs("", label, label[:, 1:], 0)]
        refused(r"\[1, 6\]: expected .* labels int32 \[batch pos\]", q, k, v, labels=shorter)


@pytest.mark.long
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="they have run in this process")
def test_all_of_the_above_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    words = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "", "-k", "TestSweep", __file__)
    command = [sys.executable, *words]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def compiled_for_h100(dtype: str, d_head: int, split: bool, with_facts: bool = False) -> Any:
    """The kernel for an H100, as `sweep` would have it compiled, with two kinds of labels."""
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    function: Any = kernel._sweep_tile
    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    tiles = kernel.TILE_SIZES[torch_dtype][d_head]
    constants_by_name = {
        "HEADS_PER_KV_HEAD": 1,
        "LAGS": (1, 0),
        "ENTROPY": True,
        "SPLIT": split,
        **dict.fromkeys(["D_HEAD", "D_V", "PADDED_D_V"], d_head),
        **dict.fromkeys(["CAPPED", "SLOPED", "GATED", "WINDOWED"], with_facts),
        "DIMS": tiles.dims,
        "QUERIES": tiles.queries,
        "KEYS": tiles.keys,
    }
    types = dict.fromkeys("qkv", f"*{dtype}")
    pointers = "z row_sums slopes sinks q_factors k_factors v_factors"
    types |= dict.fromkeys(pointers.split(), "*fp32")
    types |= {"scale": "fp32", "cap": "fp32", "window": "i32", "n_ctx": "i32"}
    types |= dict.fromkeys(["query_labels", "key_labels"], ("*i32", "*i32"))
    types |= dict.fromkeys(["q_stride", "k_stride", "v_stride"], ("i32", "i32", "i32", "constexpr"))
    types |= dict.fromkeys(constants_by_name, "constexpr")
    signature = {name: types[name] for name in function.arg_names}
    constants: dict[Any, Any] = {
        (function.arg_names.index(name),): value for name, value in constants_by_name.items()
    }
    # Triton compiles another kernel for pointers and numbers that 16 divides. Those of `sweep` are
    # of that kind, and a stride of 1 is a constant.
    divisible: dict[Any, Any] = {}
    for i, kind in enumerate(signature.values()):
        for j, part in enumerate(kind if isinstance(kind, tuple) else [kind]):
            path = (i, j) if isinstance(kind, tuple) else (i,)
            if part == "constexpr":
                constants.setdefault(path, 1)
            elif part != "fp32":
                divisible[path] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(function, signature, constants, divisible),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiles.warps, "num_stages": tiles.stages},
    )


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("dtype", "split", "d_head", "with_facts"),
    [
        # Every branch of the kernel. The other sizes of its tiles are compiled in `make long`.
        pytest.param("fp32", True, 64, True, marks=pytest.mark.long),
        *(
            pytest.param(dtype, split, d_head, False, marks=pytest.mark.long)
            for dtype, split, d_head in (
                *(("bf16", False, d_head) for d_head in (64, 128, 256)),
                *(("fp32", True, d_head) for d_head in (128, 256)),
                ("fp32", False, 128),
                ("fp16", False, 64),
            )
        ),
    ],
)
def test_it_compiles_for_an_h100(
    dtype: str,
    split: bool,
    d_head: int,
    with_facts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel_binary = compiled_for_h100(dtype, d_head, split, with_facts)
    # The instruction of Hopper's tensor cores, and the formats that it multiplies.
    products = re.findall(r"wgmma\.mma_async\S*?\.f32\.(\w+)\.\w+", kernel_binary.asm["ptx"])
    assert {*products} == {
        {"fp32": "f16" if split else "tf32", "fp16": "f16", "bf16": "bf16"}[dtype]
    }
    assert kernel_binary.metadata.shared <= kernel.H100_SHARED_BYTES
    cubin = tmp_path / "sweep.cubin"
    cubin.write_bytes(kernel_binary.asm["cubin"])
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run(
        [dump, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    # Bytes of a thread's registers that did not fit and went to memory.
    spilled = int(re.findall(r"STACK:(\d+)", usage)[0])
    assert spilled <= 8


def test_without_triton_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not available(torch.device("cpu"))
    assert available(torch.device("cuda")) == torch.cuda.is_available()
    # The module once more, as it would be where triton cannot be imported.
    monkeypatch.setitem(sys.modules, "triton", None)
    without_triton = runpy.run_path(str(kernel.__file__))
    assert without_triton["triton"] is None
    assert not without_triton["available"](torch.device("cuda"))
