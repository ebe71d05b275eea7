"""Reading cubins: every target read to its last instruction, resources and counts checked against other sources."""

import importlib.metadata
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kda_lib.arch import TARGETS, Arch
from kda_lib.compile import Artifact, compile_kernel
from kda_lib.kernels.config import SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.kernels.fma import FmaForm, default_form
from kda_lib.lab import sass
from kda_lib.lab.sass import Instruction, disassemble, disassemble_all, instruction_mix, read_resources
from kda_lib.shapes import KdaShapes

VECTOR = 8


def compiled(target: str, m: int, form: FmaForm | None = None) -> list[Artifact]:
    arch = Arch.parse(target)
    return [compile_kernel(c(arch, m, KdaShapes(8), form=form), arch) for c in (skinny_n_config, skinny_k_config)]


@pytest.fixture(scope="module")
def artifacts() -> dict[str, list[Artifact]]:
    """Both kernels in the default form for all targets, and in all three forms for sm_100a."""
    found = {target: compiled(target, 2) for target in TARGETS}
    found["sm_100a"] += [*compiled("sm_100a", 2, FmaForm.SHIFT), *compiled("sm_100a", 2, FmaForm.CVT)]
    return found


@pytest.fixture(scope="module")
def spilling() -> bytes:
    """A kernel that keeps an array in local memory: the index is only known at run time."""
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir

    from kda_lib.kernels.probe import Probe

    code = """{
        .local .align 16 .b8 array[256]; .reg .b64 array_at, there, here; .reg .b32 i, j, x; mov.u64 array_at, array;
        mov.u32 i, %tid.x; and.b32 i, i, 15; mul.wide.u32 there, i, 16; add.s64 there, there, array_at;
        mov.u32 j, %ctaid.x; and.b32 j, j, 15; mul.wide.u32 here, j, 16; add.s64 here, here, array_at;
        st.volatile.local.v4.b32 [there], {i, i, i, i}; ld.volatile.local.b32 x, [here];
        st.volatile.local.b32 [array_at], x; }"""
    with tempfile.TemporaryDirectory() as dump:
        cute.compile[cute.GPUArch("sm_90a"), cute.KeepCUBIN(), DumpDir(dump)](Probe(code))
        (cubin,) = Path(dump).glob("*.cubin")
        return cubin.read_bytes()


@pytest.fixture(scope="module")
def listings(artifacts: dict[str, list[Artifact]]) -> dict[str, list[list[Instruction]]]:
    """The instructions of :func:`artifacts`, in the same order."""
    return {target: disassemble_all([a.cubin for a in found], target) for target, found in artifacts.items()}


def straight(instructions: list[Instruction]) -> list[Instruction]:
    """Without jumps, whose targets count from the start of the batch."""
    return [i for i in instructions if i.base not in ("BRA", "BSSY", "CALL")]


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_is_read_to_the_last_instruction(
    target: str, artifacts: dict[str, list[Artifact]], listings: dict[str, list[list[Instruction]]]
) -> None:
    last = artifacts[target][-1].cubin
    assert straight(disassemble(last)) == straight(listings[target][-1])
    for artifact, listing in zip(artifacts[target], listings[target], strict=True):
        assert [i.offset for i in listing] == list(range(0, read_resources(artifact.cubin).code_bytes, 16))
        assert "EXIT" in {i.base for i in listing}
        for i in listing:
            assert re.fullmatch(r"(@!?U?P[0-9T])?", i.predicate)
            assert all(o.count("[") == o.count("]") and o.count("(") == o.count(")") for o in i.operands)


@pytest.mark.parametrize("target", TARGETS)
def test_resources_agree_with_the_code(
    target: str, artifacts: dict[str, list[Artifact]], listings: dict[str, list[list[Instruction]]]
) -> None:
    for artifact, listing in zip(artifacts[target], listings[target], strict=True):
        resources = read_resources(artifact.cubin)
        used = [int(n) for i in listing for n in re.findall(r"\bR(\d+)\b", " ".join(i.operands))]
        # A vector operand names only its first register.
        assert max(used) < resources.registers <= 255
        assert (resources.smem_bytes > 0) == (artifact.kernel == "skinny_n")
        assert resources.entry == artifact.entry


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_resources_agree_with_nvdisasm(target: str, artifacts: dict[str, list[Artifact]]) -> None:
    cubin = artifacts[target][0].cubin
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [sass.find_nvdisasm(), file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = read_resources(cubin)
    assert resources.registers == info(text, "REGCOUNT")
    assert resources.stack_bytes == info(text, "FRAME_SIZE") == 0
    shared = re.search(rf"^\.nv\.shared\.{resources.entry}:\s+\.zero\s+(\d+)", text, re.MULTILINE)
    assert shared
    assert resources.smem_bytes == int(shared[1])


def info(listing: str, attribute: str) -> int:
    match = re.search(rf"EIATTR_{attribute}\b.*?\.word\s+index.*?\.word\s+(0x\w+)", listing, re.DOTALL)
    assert match
    return int(match[1], 16)


def expected_counts(artifact: Artifact) -> tuple[int, int]:
    """FMAs of a thread, and operands that they take, from the configuration."""
    c = artifact.config
    rows, steps = (c.rows, c.steps) if isinstance(c, SkinnyNConfig) else (c.row_tile, 1)
    return rows * c.tokens * steps * VECTOR, (rows + c.tokens) * steps * VECTOR


@pytest.mark.parametrize("target", TARGETS)
def test_mix_counts_what_the_configuration_asks_for(
    target: str, artifacts: dict[str, list[Artifact]], listings: dict[str, list[list[Instruction]]]
) -> None:
    # SHIFT takes one instruction an operand; CVT two for the upper half (PRMT, then a shift) and one for the lower.
    cost = {FmaForm.NATIVE: 0.0, FmaForm.SHIFT: 1.0, FmaForm.CVT: 1.5}
    for artifact, listing in zip(artifacts[target], listings[target], strict=True):
        fmas, operands = expected_counts(artifact)
        form = artifact.config.fma
        mix = instruction_mix(listing)
        assert mix.fmas == mix.region["FHFMA" if form is FmaForm.NATIVE else "FFMA"] == fmas
        assert sum(mix.conversions.values()) == cost[form] * operands
        assert mix.conversions_per_fma == cost[form] * operands / fmas
        assert mix.region_conversions <= sum(mix.conversions.values())


def test_known_facts(listings: dict[str, list[list[Instruction]]]) -> None:
    assert default_form(Arch.parse("sm_100a")) is FmaForm.NATIVE
    for mix in map(instruction_mix, listings["sm_100a"][:2]):
        assert mix.conversions == {}
        assert "FFMA" not in mix.region
    for mix in map(instruction_mix, listings["sm_90a"]):
        assert set(mix.conversions) <= {"SHF", "LOP3", "IMAD"}
        assert mix.region_conversions > 0
        assert "FHFMA" not in mix.region


def test_no_spills(listings: dict[str, list[list[Instruction]]]) -> None:
    for listing in (one for found in listings.values() for one in found):
        assert sass.spills(listing) == sass.Spills(0, 0, 0, 0)


def test_local_memory_is_seen(spilling: bytes) -> None:
    assert sass.spills(disassemble(spilling)) == sass.Spills(stores=2, loads=1, store_bytes=20, load_bytes=4)
    assert read_resources(spilling).stack_bytes == 256


def lines(*texts: str) -> list[Instruction]:
    """``lines("FFMA R0,R1,R2,R3")``: instructions written by hand."""
    split = [text.partition(" ") for text in texts]
    return [Instruction(16 * i, "", op, tuple(rest.split(","))) for i, (op, _, rest) in enumerate(split)]


@pytest.mark.parametrize(
    ("code", "conversions", "in_region"),
    [
        # Loads end the search, whatever computed their addresses, and write as many registers as they are wide.
        (["IMAD.WIDE R4,R2,0x10,R8", "LDG.E.128 R4,[R4.64]", "FFMA R0,R5,R7,RZ"], {}, 0),
        # A value that was converted in two instructions, one of them in the region.
        (
            ["LDG.E R4,[R2.64]", "PRMT R5,R4,0x7632,R9", "FFMA R0,R1,R1,RZ", "SHF.L.U32 R6,R5,0x10,RZ",
             "FFMA R0,R6.reuse,R6,R0"],
            {"PRMT": 1, "SHF": 1}, 1,
        ),
        # Neither an addend, nor a comparison, nor a register that was overwritten since.
        (
            ["FADD R3,R8,R9", "ISETP.GT.AND P0,PT,R4,0x3,PT", "SHF.L.U32 R4,R8,0x10,RZ", "LDS R4,[R1]",
             "FFMA R0,R4,-R4,R3"],
            {}, 0,
        ),
        # What a predicate comes before is still the result.
        (["IADD3 R1,P0,R2,R3,RZ", "LOP3.LUT P0,R7,R1,0xffff0000,RZ,0xc0,!PT", "FHFMA.BF16 R0,R7,UR4,R0"],
         {"IADD3": 1, "LOP3": 1}, 0),
    ],
)  # fmt: skip
def test_conversions_follow_the_data(code: list[str], conversions: dict[str, int], in_region: int) -> None:
    mix = instruction_mix(lines(*code))
    assert mix.conversions == conversions
    assert mix.region_conversions == in_region


def test_mix_refuses_what_it_cannot_answer() -> None:
    with pytest.raises(ValueError, match="expected one of FFMA, FHFMA, got none in 1"):
        instruction_mix(lines("HFMA2 R0,-RZ,RZ,0,0"))
    with pytest.raises(ValueError, match=r"straight-line code between the FMAs, got /\*0010\*/ BRA 0x0"):
        instruction_mix(lines("FFMA R0,R1,R2,R0", "BRA 0x0", "FFMA R0,R1,R2,R0"))


@pytest.mark.parametrize("read", [read_resources, disassemble])
def test_not_a_cubin(read: Any, artifacts: dict[str, list[Artifact]]) -> None:
    cubin = artifacts["sm_90a"][0].cubin
    with pytest.raises(ValueError, match="expected an ELF file, got 5 bytes"):
        read(b"hello")
    with pytest.raises(ValueError, match=r"expected one kernel, got none"):
        read(cubin.replace(b".text.", b".tixt."))


def test_unreadable_code_is_an_error_that_says_where(artifacts: dict[str, list[Artifact]]) -> None:
    cubin = artifacts["sm_90a"][0].cubin
    code = next(s.data() for s in sass._elf(cubin).iter_sections() if s.name.startswith(".text."))
    broken = cubin.replace(code[32:48], b"\xff" * 16)
    with pytest.raises(ValueError, match=r"nvdisasm cannot read it: .*0x00000020"):
        disassemble_all([broken], "sm_90a")


@pytest.mark.parametrize(
    "fields", [{"opcode": "INVALID-1"}, {"opcode": ""}, {}, {"opcode": "NOP", "surprise": "1"}, {"opcode": "??? R1"}]
)
def test_nothing_falls_through(fields: dict[str, str]) -> None:
    listed = [{"opcode": "NOP"}, fields]
    with pytest.raises(ValueError, match="no readable instruction at offset 0x10"):
        sass._instructions([{"sass-instructions": listed}], 32)
    with pytest.raises(ValueError, match="expected 2 instructions, nvdisasm lists 1"):
        sass._instructions([{"sass-instructions": listed[:1]}], 32)


def test_missing_disassembler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    sass.find_nvdisasm.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "files", missing)
        with pytest.raises(sass.DisassemblerMissing, match="pip install nvidia-cuda-nvdisasm"):
            sass.find_nvdisasm()
    assert Path(sass.find_nvdisasm()).is_file()


def test_no_cubins() -> None:
    assert disassemble_all([], "sm_90a") == []
