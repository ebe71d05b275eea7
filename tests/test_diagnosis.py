"""Compiler failures made readable: real rejections, recorded logs of older releases, the probe, the error itself."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from compiled import compiled

from kda_lib.arch import Arch
from kda_lib.compile import compile_kernel
from kda_lib.diagnosis import explain_failure, probe, read_log, statements
from kda_lib.errors import CompileError, UnknownTarget, UnsupportedInstruction
from kda_lib.kernels.config import SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.kernels.fma import FmaForm
from kda_lib.shapes import KdaShapes

LOGS = Path(__file__).parent / "data" / "dsl_logs"
REPOSITORY = Path(__file__).parents[1]
TP8 = KdaShapes(8)


class Said(Exception):
    """What a release of the DSL raised: its text, and its raw log where the release keeps one."""

    def __init__(self, text: str, raw_error: str = "") -> None:
        super().__init__(text)
        self.raw_error = raw_error


def recorded(name: str, form: str) -> tuple[Said, str]:
    """An exception that another release raised, in one of its two forms, and the PTX that it left."""
    text = (LOGS / f"{name}.{form}.txt").read_text()
    ptx = LOGS / f"{name}.ptx"
    return Said("", text) if form == "raw" else Said(text), ptx.read_text() if ptx.is_file() else ""


def never(target: str) -> str:
    raise AssertionError(f"the PTX for {target} was asked for")


def native(target: str) -> SkinnyNConfig:
    return skinny_n_config(Arch.parse(target), 2, TP8, FmaForm.NATIVE)


@dataclasses.dataclass(frozen=True)
class Unchecked(SkinnyNConfig):
    """A configuration that passes for legal on any target."""

    def validate(self, arch: Arch) -> Unchecked:
        return self


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Unchecked]:
    """Makes configurations for one CTA a row, with programmatic dependent launch, whatever the target."""
    monkeypatch.setattr("kda_lib.compile.kernel_name", lambda config: "skinny_n")
    fields = dataclasses.asdict(skinny_n_config(Arch.parse("sm_80"), 1, TP8, FmaForm.SHIFT))
    return lambda **changes: Unchecked(**(fields | {"pdl": True} | changes))


def places(config: SkinnyNConfig) -> int:
    """How many native FMAs the kernel has, counted where it compiles."""
    return compiled(config, "sm_100a").ptx.count("fma.rn.f32.bf16")


def line_of(error: UnsupportedInstruction) -> str:
    assert error.source is not None
    file, _, line = error.source.partition(":")
    return (REPOSITORY / file).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a"])
def test_native_fma_is_rejected_by_name(target: str) -> None:
    config = native(target)
    with pytest.raises(UnsupportedInstruction) as caught:
        compile_kernel(config, target)
    error = caught.value
    assert (error.instruction, error.target) == ("fma.rn.f32.bf16", target)
    assert (error.lowest_target, error.found_by) == ("sm_100", "log")
    assert error.uses == places(config)
    assert str(error.source).startswith("kda_lib/kernels/fma.py:")
    assert "fma.rn" in line_of(error)
    assert "FmaForm.SHIFT" in error.alternative
    assert "Feature 'fma.f32.bf16' requires .target sm_100 or higher" in error.log
    assert "\x1b" not in error.log


def test_both_kernels_are_diagnosed() -> None:
    config = skinny_k_config(Arch.parse("sm_90a"), 2, TP8, FmaForm.NATIVE)
    with pytest.raises(UnsupportedInstruction, match=r"sm_90a has no fma\.rn\.f32\.bf16"):
        compile_kernel(config, "sm_90a")


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89"])
def test_the_assembler_takes_cvt_below_sm_90(target: str) -> None:
    config = skinny_k_config(Arch.parse(target), 1, TP8, FmaForm.CVT)
    assert "cvt.f32.bf16" in compile_kernel(config, target).ptx


def test_dependent_launch_on_sm_80(unchecked: Callable[..., Unchecked]) -> None:
    with pytest.raises(UnsupportedInstruction) as caught:
        compile_kernel(unchecked(), "sm_80")
    error = caught.value
    assert (error.instruction, error.lowest_target, error.uses) == ("griddepcontrol.wait", "sm_90", 1)
    assert "griddepcontrol_wait()" in line_of(error)
    assert "pdl=False" in error.alternative
    assert [note.split(",")[0] for note in error.__notes__] == ["also rejected: griddepcontrol.launch_dependents"]


def test_the_instruction_that_needs_most_is_named_first(unchecked: Callable[..., Unchecked]) -> None:
    with pytest.raises(UnsupportedInstruction) as caught:
        compile_kernel(unchecked(fma=FmaForm.NATIVE), "sm_80")
    assert (caught.value.instruction, caught.value.lowest_target) == ("fma.rn.f32.bf16", "sm_100")
    assert len(caught.value.__notes__) == 2


def test_clusters_on_sm_80_are_found_without_log_or_ptx(unchecked: Callable[..., Unchecked]) -> None:
    with pytest.raises(UnsupportedInstruction) as caught:
        compile_kernel(unchecked(split=4, steps=1, pdl=False), "sm_80")
    error = caught.value
    assert "Error: unsupported operation" in error.log
    assert error.found_by == "probe"
    assert "cluster" in error.instruction
    assert error.lowest_target == "sm_90"
    assert "cluster" in line_of(error)
    assert "split=1" in error.alternative
    assert any("mapa.shared::cluster.u32" in note for note in error.__notes__)


@pytest.mark.parametrize(
    ("target", "said"), [("sm_99", "KeyError"), ("sm_75", "KeyError"), ("sm_107a", "CUDA toolkit version")]
)
def test_a_target_that_the_dsl_does_not_know(target: str, said: str) -> None:
    config = skinny_n_config(Arch.parse("sm_80"), 1, TP8, FmaForm.SHIFT)
    with pytest.raises(
        UnknownTarget, match=rf"nvidia-cutlass-dsl \S+ does not know the target {target}; name"
    ) as caught:
        compile_kernel(config, target)
    assert caught.value.target == target
    assert said in caught.value.log


def test_a_target_that_ptxas_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutlass.base_dsl.dsl import BaseDSL

    monkeypatch.setattr(BaseDSL, "_is_supported_arch", lambda self: None)
    config = skinny_n_config(Arch.parse("sm_80"), 1, TP8, FmaForm.SHIFT)
    with pytest.raises(UnknownTarget) as caught:
        compile_kernel(config, "sm_107a")
    assert "Value 'sm_107a' is not defined for option 'gpu-name'" in caught.value.log


@pytest.mark.parametrize("said", ["Unsupported .target 'sm_107a'", "-arch=compute_107 is an unsupported option"])
def test_other_wordings_for_an_unknown_target(said: str) -> None:
    # ptxas reading PTX and libNVVM, as their own message tables have it; the DSL checks before either can say so.
    assert isinstance(explain_failure(Said(said), Arch.parse("sm_107a"), "", never), UnknownTarget)


def test_an_operation_that_lacks_the_target_is_not_an_unknown_target() -> None:
    said = Said("Unsupported GPU architecture 'sm_90a'. This kernel is only compatible with: sm_100a.")
    error = explain_failure(said, Arch.parse("sm_90a"), "", never)
    assert type(error) is CompileError
    assert "only compatible with: sm_100a" in str(error)


@pytest.mark.parametrize("form", ["raw", "str"])
def test_log_of_4_7_1(form: str) -> None:
    said, ptx = recorded("4.7.1_native_sm_90a", form)
    error = explain_failure(said, Arch.parse("sm_90a"), ptx, lambda target: "")
    assert isinstance(error, UnsupportedInstruction)
    assert (error.instruction, error.lowest_target, error.found_by) == ("fma.rn.f32.bf16", "sm_100", "log")
    assert (error.uses, error.source) == (1, None)
    assert "\x1b" not in error.log


@pytest.mark.parametrize("form", ["raw", "str"])
def test_log_of_4_7_1_with_two_lines_for_one_instruction(form: str) -> None:
    said, ptx = recorded("4.7.1_pdl_sm_80", form)
    log = said.raw_error or str(said)
    found = [(rejection.instruction, rejection.lowest_target) for rejection in read_log(log, ptx)]
    assert found == [("griddepcontrol.wait", "sm_90"), ("griddepcontrol.launch_dependents", "sm_90")]


@pytest.mark.parametrize("form", ["raw", "str"])
@pytest.mark.parametrize(
    ("name", "instruction", "lowest"),
    [
        ("4.6.2_native_sm_90a", "fma.rn.f32.bf16", "sm_100"),
        ("4.6.2_pdl_sm_80", "griddepcontrol.wait", "sm_90"),
    ],
)
def test_no_log_from_4_6_2(name: str, instruction: str, lowest: str, form: str) -> None:
    said, ptx = recorded(name, form)
    error = explain_failure(said, Arch.parse(name.partition("_sm_")[2]), ptx, lambda target: ptx)
    assert isinstance(error, UnsupportedInstruction)
    assert (error.instruction, error.lowest_target, error.found_by) == (instruction, lowest, "probe")
    assert error.uses == 1


@pytest.mark.parametrize("name", ["4.6.2_cluster_sm_80", "4.7.1_cluster_sm_80"])
def test_neither_log_nor_ptx_from_older_releases(name: str) -> None:
    said, ptx = recorded(name, "raw")
    assert not ptx
    asked: list[str] = []

    def trace(target: str) -> str:
        asked.append(target)
        return "barrier.cluster.arrive;\nbar.sync 0;\n" if target == "sm_90" else ""

    error = explain_failure(said, Arch.parse("sm_80"), ptx, trace)
    assert isinstance(error, UnsupportedInstruction)
    assert (error.instruction, error.lowest_target, error.found_by) == ("barrier.cluster.arrive", "sm_90", "probe")
    assert asked == ["sm_86", "sm_89", "sm_90"], "the nearest target that has PTX differs least"


PTX = """
.visible .entry k(.param .u64 k_param_0)
{
	.reg .b32 	%r<3>;
	.loc	1 12 5
	ld.param.b64 	%rd1, [k_param_0];
	.loc	2 34 0
	{.reg .b16 a, b; mov.b32 {a, b}, %r1; new.op.b16 a, b;} // old.op %r1;
	@%p1 bra 	$L__BB0_2;
$L__BB0_2:
	new.op.b16 	%r1, 0x1F;
	{ .reg .pred done; again: st.shared::cluster.f32 [%r1], %r2; @!done bra again; }
	odd.op 	%tid.x;
	.file	1 "elsewhere/user.py"
	.file	2 "PACKAGE/kernels/fma.py"
"""


def test_statements() -> None:
    package = (REPOSITORY / "kda_lib").as_posix()
    found = list(statements(PTX.replace("PACKAGE", package)))
    opcodes = ["ld.param.b64", "mov.b32", "new.op.b16", "bra", "new.op.b16", "st.shared::cluster.f32", "bra", "odd.op"]
    assert [statement.opcode for statement in found] == opcodes
    assert [statement.line for statement in found] == [6, 8, 8, 9, 11, 12, 12, 13]
    assert found[0].source == "user.py:12"
    assert found[2].source == "kda_lib/kernels/fma.py:34"
    assert found[2].registers == ".reg .b32 %r<3>; .reg .b16 a; .reg .b16 b;"


def test_probe_assembles_each_instruction_once_and_names_the_lowest_target() -> None:
    asked: list[tuple[str, str]] = []

    def accepts(code: str, target: str) -> bool:
        asked.append((code, target))
        return "mov" in code or "st.shared" in code or ("new" in code and Arch.parse(target) >= Arch(10, 3))

    rejected = probe(PTX, "sm_90a", accepts)
    # odd.op is taken by no target, so it says nothing about this one.
    assert [(r.instruction, r.lowest_target) for r in rejected] == [("new.op.b16", "sm_103")]
    here = [code for code, target in asked if target == "sm_90a"]
    assert here[1] == "{ .reg .b32 %r<3>; .reg .b16 a; .reg .b16 b; new.op.b16 a, b; }"
    assert not any("k_param_0" in code or "$L__" in code for code in here)


def test_an_error_of_the_assembler_that_names_no_target_is_passed_on() -> None:
    log = "PTXAS_ERROR_COMPILATION, ptxas log: ptxas application ptx input, line 5; error   : Unknown symbol 'q'"
    error = explain_failure(Said("", log), Arch.parse("sm_90a"), "", never)
    assert type(error) is CompileError
    assert str(error).startswith("sm_90a: the compiler failed")
    assert str(error).endswith("line 5; error   : Unknown symbol 'q'")


def test_a_failure_before_the_back_end_is_passed_on() -> None:
    error = explain_failure(Said("cannot convert a Tensor to an Int32"), Arch.parse("sm_90a"), "", never)
    assert type(error) is CompileError
    assert error.log == "Said: cannot convert a Tensor to an Int32"


def test_pickling_keeps_everything() -> None:
    errors: list[CompileError] = [
        example(source="kda_lib/kernels/fma.py:77"),
        UnknownTarget("no", target="sm_99", log="KeyError"),
        CompileError("no", target="sm_90", log="x"),
    ]
    errors[0].add_note("also rejected: griddepcontrol.wait")
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.__dict__) == (type(error), str(error), error.__dict__)


def example(**changes: Any) -> UnsupportedInstruction:
    fields: dict[str, Any] = {
        "instruction": "fma.rn.f32.bf16",
        "target": "sm_90a",
        "lowest_target": "sm_100",
        "uses": 64,
        "source": None,
        "alternative": "use fma.rn.f32",
        "found_by": "log",
        "log": "",
    }
    return UnsupportedInstruction(**(fields | changes))


def test_wording() -> None:
    assert str(example(source="kda_lib/kernels/fma.py:77")) == (
        "sm_90a has no fma.rn.f32.bf16: it needs sm_100 or higher; used in 64 places, "
        "emitted at kda_lib/kernels/fma.py:77. Instead: use fma.rn.f32."
    )
    assert str(example(lowest_target=None, uses=1, alternative="")) == (
        "sm_90a has no fma.rn.f32.bf16: no target that has it was found; used in 1 place."
    )


def test_several_threads() -> None:
    def rejected(target: str) -> tuple[str, str, int]:
        with pytest.raises(UnsupportedInstruction) as caught:
            compile_kernel(native(target), target)
        return caught.value.target, caught.value.instruction, caught.value.uses

    targets = ["sm_80", "sm_90a", "sm_89", "sm_90"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(rejected, targets))
    assert found == [(target, "fma.rn.f32.bf16", places(native(target))) for target in targets]
