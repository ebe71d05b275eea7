"""arch, shapes, errors and the launch configurations: the parts that need no compiler."""

import dataclasses
import pickle
import subprocess
import sys

import pytest

import kda_lib
from kda_lib.arch import KNOWN_CAPABILITIES, PRODUCTS, TARGETS, Arch
from kda_lib.errors import NotWarmedUp, UnsupportedInstruction
from kda_lib.kernels.config import SkinnyKConfig, SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.kernels.fma import FmaForm, default_form, portable_form, supports
from kda_lib.lab.profile import load_profile, profile_names
from kda_lib.shapes import KdaShapes, check_tokens

SM90A = Arch.parse("sm_90a")
TP8 = KdaShapes(8)


def test_import_is_light():
    code = (
        "import sys, time; start = time.perf_counter(); import kda_lib; spent = time.perf_counter() - start; "
        "print(spent, [m for m in ('torch', 'cutlass', 'flashinfer', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, modules = out.split(maxsplit=1)
    assert modules.strip() == "[]"
    assert float(seconds) < 0.3


@pytest.mark.parametrize(
    ("text", "target"),
    [("sm_90a", "sm_90a"), ("90a", "sm_90a"), ("SM_100f", "sm_100f"), ("9.0", "sm_90a"), ("8.9", "sm_89"),
     ("12.1", "sm_121a"), (" h100 ", "sm_90a"), ("B300", "sm_103a"), ("dgx_spark", "sm_121a"), ("sm_80", "sm_80")],
)  # fmt: skip
def test_parse(text, target):
    assert Arch.parse(text).target == target
    assert Arch.parse(Arch.parse(text)) == Arch.parse(text)


@pytest.mark.parametrize("text", ["", "sm", "sm_9", "hopper", "sm_90b", "sm_90a ptx", "9", "1.2.3"])
def test_parse_refuses(text):
    with pytest.raises(ValueError, match=r"target: expected one of sm_80.*got"):
        Arch.parse(text)


@pytest.mark.parametrize("value", [90, None, (9, 0), 9.0])
def test_parse_refuses_types(value):
    with pytest.raises(TypeError, match="target: expected a string"):
        Arch.parse(value)


CAPABILITIES = {  # capability: (mixed FMA, cvt.f32.bf16, PDL, clusters)
    (8, 0): (0, 1, 0, 0), (8, 6): (0, 1, 0, 0), (8, 7): (0, 1, 0, 0), (8, 9): (0, 1, 0, 0), (9, 0): (0, 1, 1, 1),
    (10, 0): (1, 1, 1, 1), (10, 3): (1, 1, 1, 1), (10, 7): (1, 1, 1, 1), (11, 0): (1, 1, 1, 1), (12, 0): (1, 1, 1, 1),
    (12, 1): (1, 1, 1, 1), (13, 0): (0, 0, 0, 0), (7, 5): (0, 0, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize(("capability", "expected"), CAPABILITIES.items())
def test_predicates(capability, expected):
    arch = Arch.of_capability(capability)
    got = (arch.has_mixed_bf16_fma, arch.has_cvt_f32_bf16, arch.has_pdl, arch.has_clusters)
    assert got == tuple(map(bool, expected))
    assert arch.known == (capability in KNOWN_CAPABILITIES)


def test_an_unknown_capability_gets_the_portable_path():
    arch = Arch.parse("sm_130a")
    assert default_form(arch) is portable_form(arch) is FmaForm.SHIFT
    config = skinny_n_config(arch, 4, TP8)
    assert (config.pdl, config.split) == (False, 1)


@pytest.mark.parametrize("target", TARGETS)
def test_forms(target):
    arch = Arch.parse(target)
    assert supports(arch, default_form(arch))
    assert supports(arch, portable_form(arch))
    assert supports(arch, FmaForm.NATIVE) == (arch.capability >= (10, 0))
    assert supports(arch, FmaForm.CVT)


def test_products_are_the_profiles():
    profiles = {name: load_profile(name).target for name in profile_names() if name != "cpu"}
    assert profiles == PRODUCTS


@pytest.mark.parametrize(
    ("tp", "packed", "fa_beta", "f_b", "heads"),
    [(4, 12448, 160, 3072, 24), (8, 6288, 144, 1536, 12), (16, 3216, 144, 768, 6)],
)
def test_shapes(tp, packed, fa_beta, f_b, heads):
    shapes = KdaShapes(tp)
    assert (shapes.packed_rows, shapes.fa_beta_rows, shapes.f_b_rows, shapes.heads) == (packed, fa_beta, f_b, heads)
    assert shapes.qkvg_slice.stop == shapes.fa_beta_slice.start == shapes.qkvg_rows == 4 * heads * 128
    assert shapes.fa_beta_slice.stop == packed
    assert 0 <= fa_beta - 128 - heads < 16


def test_weight_bytes_of_tp8():
    assert TP8.weight_bytes == 6288 * 7168 * 2 + 1536 * 128 * 2 == 90_537_984


@pytest.mark.parametrize(
    ("tp", "error"), [(0, ValueError), (7, ValueError), (-8, ValueError), (8.0, TypeError), (True, TypeError)]
)
def test_shapes_refuse(tp, error):
    with pytest.raises(error, match="tp: expected"):
        KdaShapes(tp)


@pytest.mark.parametrize(
    ("m", "error"),
    [(0, ValueError), (17, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), ("4", TypeError)],
)
def test_tokens_refuse(m, error):
    with pytest.raises(error, match="M: expected"):
        check_tokens(m)
    for make in (skinny_n_config, skinny_k_config):
        with pytest.raises(error, match="M: expected"):
            make(SM90A, m, TP8)


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("target", TARGETS)
def test_every_m_has_a_configuration(target, tp):
    arch, shapes = Arch.parse(target), KdaShapes(tp)
    additions = set()
    for m in range(1, 17):
        n = skinny_n_config(arch, m, shapes)
        k = skinny_k_config(arch, m, shapes)
        assert n.tokens * n.groups * n.passes >= m
        assert k.tokens * k.groups >= m
        assert (n.pdl, k.pdl) == (arch.has_pdl, arch.has_pdl)
        assert n.fma is default_form(arch)
        assert k.launch.grid * k.rows == shapes.f_b_rows
        assert n.launch.grid * n.rows == shapes.fa_beta_rows * n.split
        additions.add((n.split, n.steps))
    assert len(additions) == 1, "the order of additions must not depend on M"


N8 = skinny_n_config(SM90A, 8, TP8)
K8 = skinny_k_config(SM90A, 8, TP8)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (N8, {"m": 0}, "M: expected"),
        (N8, {"m": 17}, "M: expected"),
        (N8, {"n": 0}, "n: expected at least 1"),
        (N8, {"rows": 5}, "rows: expected a divisor of n = 144"),
        (N8, {"k": 7170}, "k: expected a multiple of the vector"),
        (N8, {"k": 7176}, "k: expected a multiple of split x steps"),
        (N8, {"split": 3}, "k: expected a multiple of split"),
        (N8, {"split": 14}, "split: expected at most 8"),
        (N8, {"groups": 0}, "groups: expected at least 1"),
        (N8, {"tokens": 16}, "tokens: expected less than 2 m"),
        (N8, {"rows": 144}, "rows x tokens: expected at most"),
        (N8, {"rows": 16, "tokens": 1}, "rows x steps: expected at most"),
        (N8, {"groups": 32}, "threads of a block"),
        (K8, {"k": 132}, "k: expected a multiple of the vector"),
        (K8, {"k": 96}, "k: expected 8, 16"),
        (K8, {"k": 512, "x_stride": 512}, "k: expected 8, 16"),
        (K8, {"rows": 7}, "rows: expected a divisor"),
        (K8, {"rows": 3, "row_tile": 3}, "rows: expected a multiple of 6"),
        (K8, {"x_stride": 120}, "x_stride: expected"),
        (K8, {"x_stride": 140}, "x_stride: expected"),
        (K8, {"rows": 768}, "threads of a block"),
        (K8, {"tokens": 0}, "tokens: expected at least 1"),
    ],
)
def test_validation(config, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes).validate(SM90A)


@pytest.mark.parametrize("config", [N8, K8])
def test_what_a_target_lacks_is_refused(config):
    sm80 = Arch.parse("sm_80")
    with pytest.raises(ValueError, match="pdl: expected False on sm_80"):
        config.validate(sm80)
    if isinstance(config, SkinnyNConfig):
        with pytest.raises(ValueError, match="split: expected 1 on sm_80"):
            dataclasses.replace(config, pdl=False).validate(sm80)
    with pytest.raises(TypeError, match="fma: expected an FmaForm"):
        dataclasses.replace(config, fma="native").validate(SM90A)
    with pytest.raises(TypeError, match="pdl: expected a bool"):
        dataclasses.replace(config, pdl="no").validate(SM90A)
    for value in (1.5, True, "2", None):
        with pytest.raises(TypeError, match="rows: expected an int"):
            dataclasses.replace(config, rows=value).validate(SM90A)


def test_configurations_are_frozen():
    for config, kind in ((N8, SkinnyNConfig), (K8, SkinnyKConfig)):
        assert isinstance(config, kind)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.m = 3


def test_unsupported_instruction_says_all_and_crosses_processes():
    error = UnsupportedInstruction(
        instruction="fma.rn.f32.bf16", target="sm_90a", lowest_target="sm_100", uses=2,
        source="kda_lib/kernels/fma.py:1", alternative="FmaForm.SHIFT", found_by="log", log="ptxas: ...",
    )  # fmt: skip
    assert str(error) == (
        "sm_90a has no fma.rn.f32.bf16: it needs sm_100 or higher; used in 2 places, emitted at "
        "kda_lib/kernels/fma.py:1. Instead: FmaForm.SHIFT."
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is UnsupportedInstruction
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)


def test_not_warmed_up_lists_what_is_missing():
    error = NotWarmedUp(["skinny_n M=3", "skinny_k M=3"])
    assert error.missing == ("skinny_n M=3", "skinny_k M=3")
    assert "skinny_n M=3, skinny_k M=3" in str(error)
    assert "warmup" in str(error)


def test_version():
    assert kda_lib.__version__ == "0.1.0"
